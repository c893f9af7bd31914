"""events.jsonl: what comes back, and what a kill, a full disk or another hand leaves of it."""

import errno
import json
import os

import numpy as np
import pytest

from fedmtl.errors import FedmtlError
from fedmtl.runs.event_lines import OtherEvent, round_of
from fedmtl.runs.events import AnswerEvent, EndEvent, FailureEvent, RoundEvent, StartEvent, UpdateEvent
from fedmtl.runs.log import append_event, cut_back, missing_rounds, read_events, repair_events


class TestEvents:
    def test_they_come_back_in_order(self, run):
        for number in range(3):
            append_event(run, UpdateEvent(round=number, client="a"))
        assert [event.round for event in read_events(run)] == [0, 1, 2]

    def test_a_run_without_any_has_none(self, run):
        assert read_events(run) == []

    def test_undefined_numbers_are_null_and_numpys_are_numbers(self, run):
        fields = {
            "values": [float("nan"), np.float32("inf"), np.float32(0.5), np.float64(0.1), np.int64(3)],
            "array": np.array([1.0, np.nan]),
            "flag": np.bool_(True),
            "keys": {1: (2,)},
        }
        append_event(run, OtherEvent(name="x", unknown=fields))
        assert json.loads(run.events.read_text()) == {
            "event": "x",
            "values": [None, None, 0.5, 0.1, 3],
            "array": [1.0, None],
            "flag": True,
            "keys": {"1": [2]},
        }

    def test_one_event_is_one_line_whatever_its_text(self, run):
        append_event(run, FailureEvent(round=1, client="a", reason="a\nb\u2028c ä"))
        assert run.events.read_bytes().count(b"\n") == 1
        assert read_events(run)[0].reason == "a\nb\u2028c ä"

    def test_any_cut_through_the_last_line_leaves_the_others(self, run):
        append_event(run, StartEvent())
        append_event(run, RoundEvent(round=1))
        whole = run.events.read_bytes()
        first = whole.index(b"\n") + 1
        for length in range(first, len(whole) - 1):
            run.events.write_bytes(whole[:length])
            assert read_events(run) == [StartEvent()]

    def test_a_broken_line_in_the_middle_is_an_error_that_names_it(self, run):
        run.events.write_text('{"event": "start"}\n{"eve\n{"event": "end"}\n')
        with pytest.raises(FedmtlError, match=r"events\.jsonl, line 2: is not JSON"):
            read_events(run)

    def test_a_full_disk_leaves_no_half_line(self, run, monkeypatch):
        append_event(run, StartEvent())
        write = os.write

        def half_then_full(descriptor, data):
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[: len(data) - 5])

        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(FedmtlError, match="no space left on its disk; free some"):
            append_event(run, RoundEvent(round=1))
        monkeypatch.undo()
        append_event(run, EndEvent())
        assert [event.kind for event in read_events(run)] == ["start", "end"]

    def test_what_is_for_observers_never_reaches_the_file(self, run):
        with pytest.raises(AssertionError, match="answer is for observers only"):
            append_event(run, AnswerEvent(round=1, client="a", samples=3))
        assert not run.events.exists()

    def test_a_field_that_is_no_json_is_an_error_that_names_the_kind(self, run):
        with pytest.raises(FedmtlError, match=r"event mine\.thing: a field is not JSON"):
            append_event(run, OtherEvent(name="mine.thing", unknown={"x": object()}))
        assert not run.events.exists()


# Lines of another version: an unknown kind, unknown fields, keys in another order, an integer in a field of seconds.
FOREIGN = [
    b'{"event": "mine.thing", "round": 1, "x": {"y": [1, 2]}}',
    b'{"round": 1, "event": "update",  "client": "b", "seconds": 2, "later": {"a": null}}',
    b'{"event": "data", "task": "sst2", "later": "\\u00e4"}',
]


class TestForeignLines:
    @pytest.fixture
    def foreign(self, three_rounds):
        lines = three_rounds.events.read_bytes().split(b"\n")
        three_rounds.events.write_bytes(b"\n".join([*lines[:3], *FOREIGN, *lines[3:]]))
        return three_rounds

    def test_they_are_read(self, foreign):
        other, update, data = read_events(foreign)[3:6]
        assert (other.kind, round_of(other), other.unknown) == ("mine.thing", 1, {"round": 1, "x": {"y": [1, 2]}})
        assert (update.client, update.seconds, update.unknown) == ("b", 2.0, {"later": {"a": None}})
        assert data.unknown == {"later": "ä"}

    def test_a_cut_leaves_their_bytes(self, foreign):
        cut_back(foreign, 1)
        assert foreign.events.read_bytes().split(b"\n")[3:6] == FOREIGN
        cut_back(foreign, 0)
        # The first two are of round 1.
        assert [line for line in foreign.events.read_bytes().split(b"\n") if line in FOREIGN] == FOREIGN[2:]

    def test_a_repair_leaves_their_bytes(self, foreign):
        whole = foreign.events.read_bytes()
        foreign.events.write_bytes(b"{oops\n" + whole)
        assert repair_events(foreign) == [1]
        assert foreign.events.read_bytes() == whole


BROKEN = {
    "deep": "[" * 2000,
    "nested": '{"event": "start", "x": ' + "[" * 300 + "]" * 300 + "}",
    "digits": '{"event": "round", "round": ' + "9" * 5000 + "}",
    "half": '{"event": "ro',
    "no-dict": "[1, 2]",
    "null": "null",
    "no-event": '{"round": 1}',
    "no-round": '{"event": "round"}',
    "text-round": '{"event": "round", "round": "1"}',
    "true-round": '{"event": "round", "round": true}',
    "other-kind": '{"event": "later", "round": []}',
    "no-metrics": '{"event": "evaluation", "round": 1, "task": "sst2"}',
    "nan": '{"event": "round", "round": 1, "seconds": NaN}',
    "endless": '{"event": "update", "round": 1, "client": "a", "bytes_up": 1' + "0" * 400 + "}",
    "kind": '{"event": "start", "tasks": {"a": {"kind": 5}}}',
    "null-seconds": '{"event": "round", "round": 1, "seconds": null}',
    "start-round": '{"event": "start", "round": -1}',
    "bytes": "\udcff\udcfe",
}


class TestBrokenEvents:
    @pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
    def test_any_broken_line_is_one_line_that_names_it(self, three_rounds, line):
        lines = three_rounds.events.read_text().splitlines()
        lines.insert(3, line)
        three_rounds.events.write_text("\n".join(lines) + "\n", errors="surrogateescape")
        for read in (read_events, lambda run: cut_back(run, 1)):
            with pytest.raises(FedmtlError, match=r"events\.jsonl, line 4: ") as caught:
                read(three_rounds)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
    def test_the_advice_of_the_message_works(self, three_rounds, line):
        whole = read_events(three_rounds)
        lines = three_rounds.events.read_text().splitlines()
        lines.insert(3, line)
        three_rounds.events.write_text("\n".join(lines) + "\n", errors="surrogateescape")
        broken = three_rounds.events.read_bytes()
        with pytest.raises(FedmtlError, match=r"with `fedmtl run --resume \S+ --repair`"):
            read_events(three_rounds)
        assert repair_events(three_rounds) == [4]
        assert read_events(three_rounds) == whole
        assert (three_rounds.path / "events.jsonl.broken-1").read_bytes() == broken
        assert repair_events(three_rounds) == []

    def test_rounds_that_no_event_closes_are_named(self, three_rounds):
        events = read_events(three_rounds)
        assert missing_rounds(events, 3) == []
        # Start, plan and four events a round: the first seven lines close round 0 only.
        assert missing_rounds(events[:7], 3) == [1, 2, 3]
