"""events.jsonl: what comes back, and what a kill, a full disk or another hand leaves of it."""

import errno
import json
import os

import numpy as np
import pytest

from fedmtl.errors import FedmtlError
from fedmtl.runs.log import append_event, missing_rounds, read_events, repair_events
from fedmtl.runs.results import cut_back


class TestEvents:
    def test_they_come_back_in_order(self, run):
        for number in range(3):
            append_event(run, {"event": "update", "round": number, "client": "a"})
        assert [event["round"] for event in read_events(run)] == [0, 1, 2]

    def test_a_run_without_any_has_none(self, run):
        assert read_events(run) == []

    def test_undefined_numbers_are_null_and_numpys_are_numbers(self, run):
        append_event(
            run,
            {
                "event": "x",
                "values": [float("nan"), np.float32("inf"), np.float32(0.5), np.float64(0.1), np.int64(3)],
                "array": np.array([1.0, np.nan]),
                "flag": np.bool_(True),
                "keys": {1: (2,)},
            },
        )
        assert json.loads(run.events.read_text()) == {
            "event": "x",
            "values": [None, None, 0.5, 0.1, 3],
            "array": [1.0, None],
            "flag": True,
            "keys": {"1": [2]},
        }

    def test_one_event_is_one_line_whatever_its_text(self, run):
        append_event(run, {"event": "failure", "round": 1, "client": "a", "reason": "a\nb\u2028c ä"})
        assert run.events.read_bytes().count(b"\n") == 1
        assert read_events(run)[0]["reason"] == "a\nb\u2028c ä"

    def test_any_cut_through_the_last_line_leaves_the_others(self, run):
        append_event(run, {"event": "start"})
        append_event(run, {"event": "round", "round": 1})
        whole = run.events.read_bytes()
        first = whole.index(b"\n") + 1
        for length in range(first, len(whole) - 1):
            run.events.write_bytes(whole[:length])
            assert read_events(run) == [{"event": "start"}]

    def test_a_broken_line_in_the_middle_is_an_error_that_names_it(self, run):
        run.events.write_text('{"event": "start"}\n{"eve\n{"event": "end"}\n')
        with pytest.raises(FedmtlError, match=r"events\.jsonl, line 2: is not JSON"):
            read_events(run)

    def test_a_full_disk_leaves_no_half_line(self, run, monkeypatch):
        append_event(run, {"event": "start"})
        write = os.write

        def half_then_full(descriptor, data):
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[: len(data) - 5])

        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(FedmtlError, match="no space left on its disk; free some"):
            append_event(run, {"event": "round", "round": 1})
        monkeypatch.undo()
        append_event(run, {"event": "end"})
        assert [event["event"] for event in read_events(run)] == ["start", "end"]


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
    "kind": '{"event": "start", "tasks": {"a": {"kind": "other"}}}',
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
