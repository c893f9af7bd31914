"""A site that is struck off during a run, one whose name somebody else takes, and one that is late."""

from __future__ import annotations

import re
import threading
import time

import pytest

from engines.flower.deployment import Server, Site, make_certs, of_kind
from fedmtl.engines.flower.calls import SiteJob, WelcomeCall
from fedmtl.engines.flower.certificates import make_node_key, read_private_key
from fedmtl.engines.flower.enrolment import enroll, unenroll
from fedmtl.engines.flower.line import LineRefused, SiteKeys
from fedmtl.engines.flower.site_service import SiteRefused
from fedmtl.runs.event_lines import first_of
from fedmtl.runs.events import RoundEvent, SiteEvent

CLIENTS = ("clients={a: {tasks: [sentiment, similarity, paraphrase]}, b: {tasks: [sentiment]}}", "evaluation.every=100")
TASKS = {"a": ("sentiment", "similarity", "paraphrase"), "b": ("sentiment",)}


def test_a_site_that_is_struck_off_after_round_1_contributes_to_no_other(make_config, tmp_path):
    keys = make_certs(tmp_path / "certs", TASKS)
    config = make_config(*CLIENTS, "training.num_rounds=5", "federation.round_timeout=60")

    class Striking(Server):
        def _observe(self, event):
            super()._observe(event)
            if isinstance(event, RoundEvent) and event.round == 1:
                unenroll(tmp_path / "certs", "b")

    server = Striking(config, tmp_path / "certs")
    sites = {name: Site(server, tmp_path / name, name, TASKS[name], keys[name]) for name in TASKS}
    run = server.finish()
    sites["a"].finish()
    struck = sites["b"].finish()
    assert isinstance(struck, LineRefused)
    assert "not enrolled" in str(struck)
    assert [event["round"] for event in of_kind(run, "update") if event["client"] == "b"] == [1]
    assert [event["round"] for event in of_kind(run, "update") if event["client"] == "a"] == [1, 2, 3, 4, 5]
    assert server.failures().get("b", []) in ([], ["unenrolled"])
    assert "b" in {event["client"] for event in of_kind(run, "remark")}


def test_an_open_job_of_a_site_that_is_struck_off_is_closed_at_once(make_config, tmp_path):
    """It took the job, is struck off, and the round does not wait for its deadline."""
    keys = make_certs(tmp_path / "certs", TASKS)
    config = make_config(*CLIENTS, "training.num_rounds=1", "federation.round_timeout=300")
    server = Server(config, tmp_path / "certs")
    honest = Site(server, tmp_path / "a", "a", TASKS["a"], keys["a"])
    struck = Site(server, tmp_path / "b", "b", TASKS["b"], keys["b"], is_started=False)

    def take_the_job() -> None:
        line, pool = struck.line(), struck.pool()
        line.join()
        while True:
            received = line.receive()
            if received is not None and received.envelope.kind == "welcome":
                (answer,) = pool.map([WelcomeCall(received.envelope.words)], 60)
                line.answer(received.message, "hello", answer.result)
            elif received is not None:
                unenroll(tmp_path / "certs", "b")
                line.close()
                return

    thread = threading.Thread(target=take_the_job, daemon=True)
    thread.start()
    run = server.finish()
    thread.join(60)
    honest.finish()
    assert server.failures() == {"b": ["unenrolled"]}
    assert [event["client"] for event in of_kind(run, "update")] == ["a"]


def test_a_site_that_is_enrolled_during_the_run_takes_part_and_its_examples_are_bounded(make_config, tmp_path):
    keys = make_certs(tmp_path / "certs", {"a": TASKS["a"]})
    config = make_config(*CLIENTS, "training.num_rounds=8")
    server = Server(config, tmp_path / "certs")
    first = Site(server, tmp_path / "a", "a", TASKS["a"], keys["a"])
    private, public = make_node_key("b", tmp_path / "certs/sites")
    enroll(tmp_path / "certs", "b", public.read_bytes(), TASKS["b"], {"sentiment": 3})
    second = Site(server, tmp_path / "b", "b", TASKS["b"], SiteKeys(read_private_key(private), keys["a"].ca))
    run = server.finish()
    for site in (first, second):
        assert site.finish() == f"{run.name} is done"
    assert "b" in {event["client"] for event in of_kind(run, "update")}


@pytest.mark.slow
def test_an_answer_that_comes_too_late_is_a_remark_and_the_next_one_counts(make_config, tmp_path):
    keys = make_certs(tmp_path / "certs", TASKS)
    config = make_config(*CLIENTS, "training.num_rounds=2", "federation.round_timeout=6")
    server = Server(config, tmp_path / "certs")
    honest = Site(server, tmp_path / "a", "a", TASKS["a"], keys["a"])
    site = Site(server, tmp_path / "b", "b", TASKS["b"], keys["b"], is_started=False)
    line, pool, words, late = site.line(), site.pool(), "", True
    line.join()
    with line.alive():
        while True:
            received = line.receive()
            if received is None:
                continue
            if received.envelope.kind == "end":
                break
            if received.envelope.kind == "welcome":
                words = received.envelope.words
                (answer,) = pool.map([WelcomeCall(words)], 60)
                line.answer(received.message, "hello", answer.result)
                continue
            (answer,) = pool.map([SiteJob(words, received.envelope.frame)], 60)
            while late and not any(isinstance(event, RoundEvent) and event.round == 1 for event in server.events):
                time.sleep(0.05)
            late = False
            line.answer(received.message, "update", frame=answer.result.update)
    line.close()
    run = server.finish()
    honest.finish()
    assert server.failures()["b"] == ["no answer within 6 s (federation.round_timeout)"]
    (remark,) = of_kind(run, "remark")
    assert (remark["client"], remark["reason"]) == ("b", "answered the job of round 1, which is closed")
    assert [event["round"] for event in of_kind(run, "update") if event["client"] == "b"] == [2]


def test_a_second_process_does_not_take_the_name_of_a_site_on_loopback(make_config, tmp_path):
    config = make_config(*CLIENTS, "training.num_rounds=4")
    server = Server(config)
    first = Site(server, tmp_path / "b", "b", TASKS["b"])
    while not first_of(server.events, SiteEvent):
        time.sleep(0.05)
    impostor = Site(server, tmp_path / "impostor", "b", TASKS["b"]).finish()
    assert isinstance(impostor, SiteRefused)
    assert "another process is here as b" in str(impostor)
    other = Site(server, tmp_path / "a", "a", TASKS["a"])
    run = server.finish()
    assert first.finish() == other.finish() == f"{run.name} is done"
    assert [event["round"] for event in of_kind(run, "update") if event["client"] == "b"] == [1, 2, 3, 4]
    # What a site's operator sees of every round.
    line = rf"round (\d): trained {TASKS['b'][0]} loss \d+\.\d{{3}} \(\d+\.\d s\)"
    assert [match[1] for match in map(re.compile(line).fullmatch, first.said) if match] == ["1", "2", "3", "4"]
    assert server.failures() == {}
    assert [event["client"] for event in of_kind(run, "remark")] == ["unknown"]
