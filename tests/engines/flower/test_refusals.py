"""Whatever a stranger, or a site that is not what it should be, sends: it costs itself, never the run."""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from engines.flower.deployment import Server, Site, make_certs, of_kind
from fedmtl.config.file import load_config
from fedmtl.engines.flower.calls import SiteJob, WelcomeCall
from fedmtl.engines.flower.certificates import CA, CURVE, make_authority
from fedmtl.engines.flower.line import LineRefused, SiteKeys
from fedmtl.engines.flower.site_service import CannotJoin, SiteRefused
from fedmtl.federation.wire.frame import CHECKSUM, FRAME, MAGIC, VERSION
from fedmtl.runs.events import SiteEvent
from small_config import SMALL

ONE_EACH = ("federation.clients_per_task=1", "evaluation.every=100", "training.num_rounds=6")


def pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def ten_gigabytes() -> bytes:
    return FRAME.pack(MAGIC, VERSION, 8, 10 << 30) + CHECKSUM.pack(0) + bytes(64)


def lie(site: Site, frames: dict[int, bytes | None]) -> None:
    """Take part with a good hello; answer the job of each round as told, None being the answer to the first."""
    line, pool, words, rounds, first = site.line(), site.pool(), "", 0, b""
    line.join()
    while True:
        received = line.receive()
        if received is None:
            continue
        kind, frame = received.envelope.kind, received.envelope.frame
        if kind == "end":
            line.close()
            return
        if kind == "welcome":
            words = received.envelope.words
            (answer,) = pool.map([WelcomeCall(words)], 60)
            line.answer(received.message, "hello", answer.result)
            continue
        assert frame is not None
        rounds += 1
        if rounds == 1:
            (answer,) = pool.map([SiteJob(words, frame)], 60)
            first = answer.result.update.read_bytes()
        told = frames.get(rounds)
        line.answer(received.message, "update", frame=first if told is None else told)
        if rounds == 1:
            line.answer(received.message, "update", frame=first + b"again")


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """A run of six rounds with an honest site, and one that lies in all but the first."""
    folder = tmp_path_factory.mktemp("harmed")
    overrides = [*SMALL, *ONE_EACH, f"output={folder / 'runs'}", "tasks.paraphrase={train_samples: 40}"]
    overrides = [each for each in overrides if not each.startswith("tasks.similarity")]
    keys = make_certs(folder / "certs", {"good": ["sentiment"], "bad": ["paraphrase"]})
    config = load_config(
        None, [*overrides, "clients={good: {tasks: [sentiment]}, bad: {tasks: [paraphrase]}}", "data.source=embedded"]
    )
    server = Server(config, folder / "certs")
    refused = intrude(server, folder, keys)
    bad = Site(server, folder / "bad", "bad", ("paraphrase",), keys["bad"], is_started=False)
    liar = threading.Thread(target=lie, args=(bad, {3: b"garbage", 4: pickled(), 5: ten_gigabytes(), 6: b""}))
    liar.start()
    # A site that was refused is not waited for any more: the good one comes when the bad one is there.
    while not any(isinstance(event, SiteEvent) for event in server.events):
        time.sleep(0.02)
    good = Site(server, folder / "good", "good", ("sentiment",), keys["good"])
    run = server.finish()
    liar.join()
    assert good.finish() == f"{run.name} is done"
    return run, server, refused


def intrude(server, folder, keys):
    """What strangers at the door are told, while the run waits for its second site."""
    refused = {}
    stranger = SiteKeys(ec.generate_private_key(CURVE()), folder / "certs" / CA)
    refused["stranger"] = Site(server, folder / "stranger", "bad", ("paraphrase",), stranger).finish()
    make_authority(folder / "elsewhere", ["127.0.0.1"])
    untrusting = SiteKeys(keys["bad"].key, folder / "elsewhere" / CA)
    refused["wrong ca"] = Site(server, folder / "wrong", "bad", ("paraphrase",), untrusting).finish()
    own = folder / "own.tsv"
    own.write_text("sentence\tlabel\n" + "a good day\tpositive\na bad day\tnegative\n" * 4)
    thief = (server, folder / "thief")
    refused["task"] = Site(*thief, "bad", ("sentiment",), keys["bad"], {"sentiment": str(own)}).finish()
    refused["name"] = Site(*thief, "good", ("sentiment",), keys["bad"]).finish()
    refused["no data"] = Site(*thief, "bad", ("sentiment",), keys["bad"]).finish()
    refused["body"] = say_ten_gigabytes(server, folder / "certs" / CA)
    return refused


def say_ten_gigabytes(server, ca) -> bytes:
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((server.address.host, server.address.port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        secure.sendall(
            b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: server\r\nContent-Type: application/x-protobuf\r\n"
            b"Content-Length: 10737418240\r\n\r\n"
        )
        return secure.recv(200)


def test_a_key_that_is_not_enrolled_is_refused(harmed):
    assert isinstance(harmed[2]["stranger"], LineRefused)
    assert "not enrolled" in str(harmed[2]["stranger"])


def test_a_server_of_another_authority_is_not_trusted(harmed):
    assert isinstance(harmed[2]["wrong ca"], LineRefused)
    assert "not to be trusted" in str(harmed[2]["wrong ca"])


def test_a_site_cannot_bring_a_task_it_is_not_enrolled_for(harmed):
    assert isinstance(harmed[2]["task"], SiteRefused)
    assert "brings sentiment; it is enrolled for paraphrase" in str(harmed[2]["task"])


def test_a_site_cannot_take_the_name_of_another(harmed):
    assert "says it is good, its key is bad's" in str(harmed[2]["name"])


def test_a_site_without_its_examples_ends_with_what_to_do(harmed):
    assert isinstance(harmed[2]["no data"], CannotJoin)
    assert "write `--data sentiment=FILE`" in str(harmed[2]["no data"])


def test_a_body_of_ten_gigabytes_is_refused_by_its_length(harmed):
    assert b" 413 " in harmed[2]["body"]


def test_every_lie_is_a_failure_with_its_reason(harmed):
    run, _, _ = harmed
    reasons = {event["round"]: event["reason"] for event in of_kind(run, "failure") if event["round"] > 1}
    assert set(reasons) == {2, 3, 4, 5, 6}
    assert reasons[2] == "is for round 1; round 2 is open"
    assert "shorter than a frame" in reasons[3]
    assert "not a fedmtl frame" in reasons[4]
    assert "the frame says 10737418248 bytes" in reasons[5]


def test_an_answer_counts_once(harmed):
    run, _, _ = harmed
    first = [event for event in of_kind(run, "update") if event["round"] == 1]
    assert [event["client"] for event in first] == ["bad", "good"]
    assert [event["reason"] for event in of_kind(run, "failure") if event["round"] == 1] in (
        [],
        ["answered twice, or what is no longer asked"],
    )


def test_the_run_is_unharmed(harmed):
    run, _, _ = harmed
    assert of_kind(run, "end")[0]["status"] == "done"
    assert {event["round"] for event in of_kind(run, "update") if event["client"] == "good"} == set(range(1, 7))
