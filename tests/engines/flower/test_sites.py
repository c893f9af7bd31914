"""Sites that are silent, come back, change their tasks, or are too few; and what of a site can be seen on the line."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress

import pytest
from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.supercore.task_identity import TaskIdentity

from engines.flower.deployment import Server, Site, of_kind
from engines.flower.tap import Tap
from fedmtl.deploy.server import Endpoint, serve_run
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.calls import WelcomeCall
from fedmtl.engines.flower.line import Line, LineLost
from fedmtl.engines.flower.site_service import printable
from fedmtl.errors import FedmtlError, WireError
from fedmtl.federation.server import RoundFailed
from fedmtl.tasks.embedded import embedded_columns

TWO = "clients={a: {tasks: [sentiment]}, b: {tasks: [sentiment, paraphrase]}}"


@pytest.fixture
def two_tasks(make_config):
    def make(*overrides: str):
        config = make_config(TWO.replace("paraphrase]", "paraphrase, similarity]"), "evaluation.every=100", *overrides)
        tasks = {name: config.tasks[name] for name in ("sentiment", "paraphrase")}
        clients = {name: each.model_copy(update={"tasks": [task for task in each.tasks if task in tasks]})
                   for name, each in config.clients.items()}  # fmt: skip
        return config.model_copy(update={"tasks": tasks, "clients": clients})

    return make


class SilentSite:
    """Says hello, takes its jobs, and never answers."""

    def __init__(self, site: Site) -> None:
        self._line, self._pool = site.line(), site.pool()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        self._line.join()
        with suppress(LineLost):
            while not self._done.is_set():
                received = self._line.receive()
                if received is not None and received.envelope.kind == "welcome":
                    (answer,) = self._pool.map([WelcomeCall(received.envelope.words)], 60)
                    self._line.answer(received.message, "hello", answer.result)

    def end(self) -> None:
        self._done.set()
        self._thread.join(10)
        self._line.close()


def test_a_silent_site_costs_its_contribution_and_not_the_round(two_tasks, tmp_path):
    server = Server(two_tasks("federation.round_timeout=2"))
    good = Site(server, tmp_path / "a", "a", ("sentiment",))
    silent = SilentSite(Site(server, tmp_path / "b", "b", ("sentiment", "paraphrase"), is_started=False))
    run = server.finish()
    silent.end()
    good.finish()
    assert [(event["round"], event["client"]) for event in of_kind(run, "update")] == [(1, "a"), (2, "a")]
    assert server.failures() == {"b": ["no answer within 2 s (federation.round_timeout)"] * 2}


def test_a_task_without_its_sites_ends_the_run_where_that_is_asked(two_tasks, tmp_path):
    server = Server(two_tasks("federation.round_timeout=2", "federation.min_clients_per_task=1"))
    Site(server, tmp_path / "a", "a", ("sentiment",))
    silent = SilentSite(Site(server, tmp_path / "b", "b", ("paraphrase",), is_started=False))
    with pytest.raises(RoundFailed, match=r"got 0 updates of paraphrase, federation\.min_clients_per_task is 1"):
        server.finish()
    silent.end()


def test_too_few_sites_end_the_run_with_what_was_needed(two_tasks, tmp_path):
    server = Server(two_tasks("federation.min_clients=2", "federation.join_timeout=2"))
    Site(server, tmp_path / "a", "a", ("sentiment",))
    with pytest.raises(RoundFailed, match=r"round 1 got 1 updates, federation\.min_clients is 2"):
        server.finish()


def test_a_site_may_change_its_tasks(two_tasks, tmp_path):
    server = Server(two_tasks("training.num_rounds=12"))
    steady = Site(server, tmp_path / "a", "a", ("sentiment",))
    line_of_first = Site(server, tmp_path / "b", "b", ("sentiment",), leaves_after=2)
    assert line_of_first.finish() == "left"
    Site(server, tmp_path / "b", "b", ("paraphrase",))
    run = server.finish()
    steady.finish()
    brought = [tuple(event["tasks"]) for event in of_kind(run, "update") if event["client"] == "b"]
    assert brought == sorted(brought, key=lambda tasks: tasks == ("paraphrase",))
    assert set(brought) == {("sentiment",), ("paraphrase",)}


@pytest.mark.slow
def test_no_text_of_a_site_is_on_the_line(make_config, tmp_path):
    config = make_config("federation.clients_per_task=1", "evaluation.where=clients")
    server = Server(config)
    tap = Tap(server.address)
    behind = Server.__new__(Server)
    behind.address = tap.address
    sites = [Site(behind, tmp_path / task, f"{task}_client", (task,)) for task in config.tasks]
    server.finish()
    for site in sites:
        site.finish()
    tap.close()
    sent = tap.sent
    assert len(sent) > 100_000, "updates went through"
    assert b"sentiment_client" in sent, "it is not encrypted, and can be searched"
    for task in config.tasks:
        columns = embedded_columns(task, "train") | embedded_columns(task, "validation")
        texts = {text for name, column in columns.items() if name.startswith("sentence") for text in column}
        assert len(texts) > 100
        for text in texts:
            for piece in re.findall(r"(?:\S+ ){3}", text):
                assert piece.encode() not in sent
                assert json.dumps(piece)[1:-1].encode() not in sent


def test_words_of_a_server_do_not_steer_the_sites_terminal():
    assert printable("done\x1b[2J\n\x9b1mnow", 500) == r"done\x1b[2J\n\x9b1mnow"
    assert printable("x" * 1000, 500) == "x" * 500 + "..."


def test_a_taken_address_is_one_line(make_config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint(Address("127.0.0.1", taken.getsockname()[1]), None)
        with pytest.raises(FedmtlError, match=r"cannot be listened on .*; choose another --listen"):
            serve_run(make_config(), "taken", endpoint)


def test_a_line_without_a_server_is_lost_and_not_an_error(tmp_path):
    line = Line(Address("127.0.0.1", 9), None, tmp_path, 1 << 20)
    with pytest.raises(LineLost):
        line.join()
    line.close()


@pytest.mark.parametrize("name", ["/tmp/owned", "../../owned", "0" * 63, "0" * 63 + "/", ""])
def test_nothing_that_a_server_sends_becomes_part_of_a_path(tmp_path, monkeypatch, name):
    line = Line(Address("127.0.0.1", 9), None, tmp_path / "site" / "spool", 1 << 20)
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    proto = message_to_proto(Message(RecordDict(), 7, "query"))
    proto.metadata.message_id = name
    monkeypatch.setattr(line, "_post", lambda *given: PullMessagesResponse(messages_list=[proto]))
    with pytest.raises(WireError, match="the message's id is not a hash"):
        line.receive()
    line.close()
