"""A site's record: a chain that shows what was changed, removed or put in between."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib

import pytest
import torch

from fedmtl.cli.app import app
from fedmtl.engines.flower.audit import (
    HEAD,
    MAGIC,
    MAX_HEADER,
    MAX_INFLATION,
    NAME,
    Audit,
    describe_frame,
    entries,
    verify,
)
from fedmtl.errors import FedmtlError
from fedmtl.federation.messages import Update
from fedmtl.federation.wire import encode_update, frame
from fedmtl.sharing.plan import Key


@pytest.fixture
def record(tmp_path):
    audit = Audit(tmp_path)
    for number in range(5):
        audit.record("in", "job", f"message {number}".encode(), round=number)
    return tmp_path / NAME


def test_a_chain_is_whole_across_restarts(record):
    Audit(record.parent).record("out", "update", b"more", decision="accepted")
    found = verify(record)
    assert (found.lines, found.broken, found.cuts) == (6, None, ())
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["bytes"] == 4
    assert lines[-1]["decision"] == "accepted"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"message", b"massage").replace(b'"round":2', b'"round":9'),
                        *lines[3:]], "line 4 does not follow from line 3"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 is number 4: 1 lines before it are missing"),
        (lambda lines: lines[1:], "line 1 is number 2"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "line 3 is not number 3"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 is number 2"),
        (lambda lines: [*lines[:2], b"not JSON", *lines[3:]], "line 4 does not follow from line 3"),
    ],
)  # fmt: skip
def test_a_line_that_is_touched_breaks_the_chain_there(record, harm, words):
    record.write_bytes(b"\n".join([*harm(record.read_bytes().splitlines()), b""]))
    assert words in (verify(record).broken or "")


def test_a_line_that_no_site_writes_breaks_the_chain_and_is_not_read_whole(record):
    with record.open("ab") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        found = verify(record)
        assert len(list(entries(record))) == 5
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.lines, found.broken) == (5, "line 6 is longer than any that a site writes")
    assert peak < 8 << 20
    with pytest.raises(FedmtlError, match="line 6 is longer"):
        Audit(record.parent)


def test_a_pipe_is_no_record(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(FedmtlError, match="is no file"):
        Audit(tmp_path)
    with pytest.raises(FedmtlError, match="no such file"):
        verify(tmp_path)


def test_a_line_that_was_cut_is_named_and_the_chain_goes_on_after_it(record):
    record.write_bytes(record.read_bytes()[:-20])
    assert (verify(record).broken, verify(record).cuts) == (None, (5,))
    Audit(record.parent).record("in", "end", b"")
    found = verify(record)
    assert (found.lines, found.broken, found.cuts) == (6, None, (5,))


def test_a_record_that_cannot_be_written_stops_the_site(tmp_path):
    with pytest.raises(FedmtlError, match="without its record this site does not take part"):
        Audit(tmp_path / "away").record("in", "job", b"")


def test_a_frame_is_described_without_torch(tmp_path):
    tensors = {Key("all", "a"): torch.zeros(3, 4), Key("task:notes", "heads.notes.b"): torch.zeros(2)}
    update = Update(3, "site", ("notes",), tensors, None, {"notes": 5}, {"notes": 0.5})
    path = tmp_path / "update"
    path.write_bytes(encode_update(update).tobytes())
    # One tensor more: the seconds.
    expected = {"job": None, "round": 3, "tasks": ["notes"], "tensors": 3, "values": 15}
    assert describe_frame(path) == expected


def test_what_is_known_of_frames_here_is_what_the_wire_packs():
    assert HEAD.size == frame.START
    assert (MAGIC, MAX_HEADER, MAX_INFLATION) == (frame.MAGIC, frame.MAX_HEADER, frame.MAX_INFLATION)


def framed(header: object) -> bytes:
    deflated = zlib.compress(json.dumps(header).encode())
    return HEAD.pack(MAGIC, 3, len(deflated), 0, 0) + deflated


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"FMTL",
        HEAD.pack(MAGIC, 3, 10, 0, 0) + b"not deflated",
        HEAD.pack(MAGIC, 3, 1 << 31, 0, 0),
        framed([]),
        framed({"round": 1, "tasks": 3, "tensors": []}),
        framed({"round": 1, "tasks": [], "tensors": [["", "", "", "", [10**30], 1]]}),
        framed({"round": 1, "tasks": [], "tensors": 5}),
    ],
)
def test_a_frame_that_cannot_be_read_is_described_by_nothing(tmp_path, content):
    (tmp_path / "job").write_bytes(content)
    assert describe_frame(tmp_path / "job") == {}


def test_a_servers_words_do_not_enter_the_record(tmp_path):
    (tmp_path / "job").write_bytes(framed({"kind": "<b>", "round": "7", "tasks": ["\x1b[2J", "notes"], "tensors": []}))
    assert describe_frame(tmp_path / "job") == {"job": None, "round": None, "tasks": ["?", "notes"], "tensors": 0,
                                                "values": 0}  # fmt: skip


@pytest.fixture
def command():
    from typer.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_commands_say_whole_or_where_not_and_show(record, command):
    done = command("audit", "verify", str(record.parent))
    assert "5 lines, each follows from the one before" in done.stdout
    assert "message" not in command("audit", "show", str(record)).stdout
    record.write_bytes(b"\n".join(record.read_bytes().splitlines()[1:]) + b"\n")
    assert "the chain is broken: line 1 is number 2" in str(command("audit", "verify", str(record)).exception)


def test_the_commands_of_the_policy_write_check_and_never_overwrite(tmp_path, command):
    path = str(tmp_path / "policy.yaml")
    assert command("policy", "init", path).exit_code == 0
    assert "policy: updates, losses" in command("policy", "check", path).stdout
    assert "is there already" in str(command("policy", "init", path).exception)
