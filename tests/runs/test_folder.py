"""The run folder: names, events, the table of rounds, and what a kill or a full disk leaves behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedmtl.errors import FedmtlError, RunNotFound
from fedmtl.runs.folder import (
    RunFolder,
    append_event,
    append_results,
    create_run,
    cut_back,
    find_run,
    locked,
    make_private_folder,
    missing_rounds,
    read_events,
    repair_events,
    results_table,
    write_atomic,
)

START = {
    "event": "start",
    "tasks": {"sst2": {"kind": "classification"}, "stsb": {"kind": "regression"}},
}


def round_events(number, accuracy=0.5):
    """One evaluated round of the two tasks; stsb's correlations are undefined."""
    errors = {"mse": 4.0, "rmse": 2.0, "mae": 1.5, "r2": -1.0}
    return [
        {"event": "update", "round": number, "client": "a"},
        {
            "event": "evaluation",
            "round": number,
            "task": "sst2",
            "metrics": {"accuracy": accuracy, "f1": 0.25, "matthews": None},
        },
        {
            "event": "evaluation",
            "round": number,
            "task": "stsb",
            "metrics": {"pearson": None, "spearman": None, **errors},
        },
        {
            "event": "round",
            "round": number,
            "clients": 2,
            "failures": 1,
            "losses": {"sst2": 0.7},
            "overall": None,
            "classification": accuracy,
            "seconds": 1.5,
            "bytes_up": 10,
            "bytes_down": 20,
        },
    ]


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "runs", "demo")


@pytest.fixture
def three_rounds(run):
    append_event(run, START)
    append_event(run, {"event": "plan", "total": 5})
    for number in range(4):
        events = round_events(number, accuracy=number / 4)
        for event in events:
            append_event(run, event)
        append_results(run, events)
    append_event(run, {"event": "end", "rounds": 3})
    return run


class TestNames:
    def test_a_second_run_of_one_name_gets_a_number(self, tmp_path):
        names = [create_run(tmp_path, "demo").name for _ in range(3)]
        assert names == ["demo", "demo-2", "demo-3"]

    def test_runs_created_at_the_same_time_never_share_a_folder(self, tmp_path):
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: create_run(tmp_path, "demo"), range(16)))
        assert len({run.path for run in runs}) == 16

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "ä", "a\n"])
    def test_a_name_that_is_no_plain_word_is_refused(self, tmp_path, name):
        with pytest.raises(FedmtlError, match="use letters, digits"):
            create_run(tmp_path, name)

    def test_an_output_that_is_a_file_is_named(self, tmp_path):
        (tmp_path / "runs").write_text("")
        with pytest.raises(FedmtlError, match="runs: cannot be written"):
            create_run(tmp_path / "runs", "demo")

    def test_a_run_is_found_by_name_and_by_folder(self, run, tmp_path, monkeypatch):
        append_event(run, START)
        assert find_run("demo", tmp_path / "runs") == run
        assert find_run(str(run.path)) == run
        monkeypatch.chdir(tmp_path)
        assert find_run("demo") == RunFolder(Path("runs/demo"))

    def test_a_missing_run_is_answered_with_near_names(self, run, tmp_path):
        append_event(run, START)
        with pytest.raises(RunNotFound, match=r"demmo: no such run in .*; did you mean demo"):
            find_run("demmo", tmp_path / "runs")
        with pytest.raises(RunNotFound, match="it has demo; give a name"):
            find_run("other", tmp_path / "runs")
        with pytest.raises(RunNotFound, match=r"no folder .*start one with `fedmtl run`"):
            find_run("demo", tmp_path / "none")
        with pytest.raises(RunNotFound, match="~nosuchuser: no such run in"):
            find_run("~nosuchuser", tmp_path / "runs")

    def test_every_part_lies_in_the_folder(self, run):
        parts = [run.config, run.events, run.results, run.checkpoints, run.clients, run.model, run.report]
        assert [part.name for part in parts] == [
            "config.yaml",
            "events.jsonl",
            "results.csv",
            "checkpoints",
            "clients",
            "model",
            "report.html",
        ]
        assert {part.parent for part in [*parts, run.spool]} == {run.path}


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


class TestResults:
    def test_columns_and_values_are_as_documented(self, three_rounds):
        header, first, second, *_ = three_rounds.results.read_text().splitlines()
        assert header == (
            "round,overall,classification,clients,failures,bytes_up,bytes_down,seconds,"
            "sst2.accuracy,sst2.f1,sst2.matthews,sst2.train_loss,"
            "stsb.pearson,stsb.spearman,stsb.mse,stsb.rmse,stsb.mae,stsb.r2,stsb.train_loss"
        )
        assert first == "0,,0.0,2,1,10,20,1.5,0.0,0.25,,0.7,,,4.0,2.0,1.5,-1.0,"
        assert second == "1,,0.25,2,1,10,20,1.5,0.25,0.25,,0.7,,,4.0,2.0,1.5,-1.0,"

    def test_a_round_that_was_not_evaluated_has_empty_metrics(self, run):
        append_event(run, START)
        append_results(run, [round_events(1)[-1]])
        assert run.results.read_text().splitlines()[1] == "1,,0.5,2,1,10,20,1.5,,,,0.7,,,,,,,"

    def test_it_can_be_recomputed_from_the_events(self, three_rounds):
        assert results_table(read_events(three_rounds)) == three_rounds.results.read_text()


class TestCutBack:
    def test_it_drops_later_rounds_and_the_end(self, three_rounds):
        cut_back(three_rounds, 1)
        events = read_events(three_rounds)
        assert [event["event"] for event in events[:2]] == ["start", "plan"]
        assert [event["round"] for event in events[2:]] == [0] * 4 + [1] * 4
        rows = three_rounds.results.read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["round", "0", "1"]

    def test_going_on_from_there_gives_the_files_of_a_run_never_cut(self, three_rounds):
        events, results = three_rounds.events.read_bytes(), three_rounds.results.read_bytes()
        cut_back(three_rounds, 1)
        for number in (2, 3):
            own = round_events(number, accuracy=number / 4)
            for event in own:
                append_event(three_rounds, event)
            append_results(three_rounds, own)
        append_event(three_rounds, {"event": "end", "rounds": 3})
        assert three_rounds.events.read_bytes() == events
        assert three_rounds.results.read_bytes() == results

    def test_it_mends_lines_that_a_kill_cut_off(self, three_rounds):
        for path in (three_rounds.events, three_rounds.results):
            path.write_bytes(path.read_bytes()[:-7])
        cut_back(three_rounds, 3)
        assert len(read_events(three_rounds)) == 2 + 4 * 4
        assert results_table(read_events(three_rounds)) == three_rounds.results.read_text()

    def test_a_run_killed_before_its_first_event_stays_empty(self, run):
        cut_back(run, 0)
        assert read_events(run) == []
        assert not run.results.exists()


class TestWriteAtomic:
    def test_it_replaces_the_file_and_makes_the_folder(self, tmp_path):
        path = tmp_path / "new" / "file"
        write_atomic(path, b"old")
        write_atomic(path, b"new")
        assert path.read_bytes() == b"new"
        assert [entry.name for entry in path.parent.iterdir()] == ["file"]

    def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        write_atomic(path, b"old")

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FedmtlError) as caught:
            write_atomic(path, b"new")
        assert str(caught.value) == (
            f"{tmp_path}: no space left on its disk; free some, or set `output` to another disk"
        )
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_only_its_owner_reads_the_file(self, tmp_path):
        write_atomic(tmp_path / "a", b"")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


class TestPrivacy:
    def test_a_run_its_events_and_its_results_are_for_their_owner_only(self, three_rounds):
        before = os.umask(0o022)
        try:
            run = create_run(three_rounds.path.parent, "other")
            append_event(run, START)
        finally:
            os.umask(before)
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert run.events.stat().st_mode & 0o777 == 0o600
        assert three_rounds.results.stat().st_mode & 0o777 == 0o600

    def test_a_folder_that_others_could_open_is_closed(self, tmp_path):
        (tmp_path / "a").mkdir(mode=0o755)
        make_private_folder(tmp_path / "a")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


HOLD = """
import sys, time
from pathlib import Path
from fedmtl.runs.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(120)
"""


class TestLock:
    def test_a_second_process_is_told_who_is_at_work_and_a_killed_one_leaves_nothing(self, tmp_path):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(FedmtlError) as caught, locked(tmp_path):
                pass
            assert str(caught.value) == (
                f"{tmp_path}: another process is at work in it (process {holder.pid}); wait until it ends, or end it"
                " first"
            )
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()
        # The file of the killed process is still there, and hinders nobody.
        assert (tmp_path / ".lock").read_text() == f"{holder.pid}\n"
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"

    def test_it_ends_with_its_block_even_by_an_error(self, tmp_path):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), locked(tmp_path):
                raise ZeroDivisionError

    def test_a_folder_that_is_gone_is_one_line(self, tmp_path):
        with pytest.raises(FedmtlError, match="gone: cannot be written"), locked(tmp_path / "gone"):
            pass


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

    def test_an_empty_table_of_results_gets_its_header_again(self, three_rounds):
        three_rounds.results.write_text("")
        append_results(three_rounds, round_events(4))
        assert three_rounds.results.read_text().startswith("round,overall,")
