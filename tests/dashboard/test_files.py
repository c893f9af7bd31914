"""Which run folders are found, and how a growing events.jsonl is read: each line once, and no link is followed."""

import os

import pytest

from dashboard.made_runs import a_round, append, end, line, opening, write_run
from fedmtl.dashboard import files
from fedmtl.dashboard.files import Tail, open_inside, scan


def found(root):
    return {run.id: run for run in scan([root])[0]}


def kinds(tail):
    """Read all there is now, and return the kinds of its events."""
    names = []
    while True:
        is_new, lines = tail.read()
        if is_new:
            names = ["anew"]
        names += [event.kind for event in tail.events(lines)]
        if not tail.is_behind:
            return names


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "first", 1, done=False)
    return tmp_path / "first"


@pytest.fixture
def tail(run):
    return Tail(found(run.parent)["0/first"])


def test_runs_and_the_cells_of_studies_are_found_in_a_folder(tmp_path):
    write_run(tmp_path / "one", 1)
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "grid" / "cells" / "x-seed0", 1)
    (tmp_path / "grid" / "study.yaml").write_text("seeds: [0]\n")
    runs, studies = scan([tmp_path])
    assert [(run.id, run.study) for run in runs] == [("0/grid/cells/x-seed0", "0/grid"), ("0/one", None)]
    assert list(studies) == ["0/grid"]


def test_a_root_may_be_a_run_or_a_study_itself(tmp_path):
    write_run(tmp_path / "one", 1)
    write_run(tmp_path / "grid" / "cells" / "x-seed0", 1)
    (tmp_path / "grid" / "study.yaml").write_text("{}")
    runs, studies = scan([tmp_path / "one", tmp_path / "grid"])
    assert [run.id for run in runs] == ["0", "1/cells/x-seed0"]
    assert [run.name for run in runs] == ["one", "x-seed0"]
    assert list(studies) == ["1"]


def test_linked_runs_are_not_found_and_linked_files_not_opened(tmp_path):
    outside = write_run(tmp_path / "outside" / "secret", 1)
    runs = tmp_path / "runs"
    write_run(runs / "real", 1)
    (runs / "linked").symlink_to(outside)
    (runs / "half").mkdir()
    (runs / "half" / "config.yaml").write_text("{}")
    (runs / "half" / "events.jsonl").symlink_to(outside / "events.jsonl")
    seen = found(runs)
    assert set(seen) == {"0/real", "0/half"}
    with pytest.raises(OSError):
        seen["0/half"].open("events.jsonl")


@pytest.mark.parametrize("parts", [("..", "x"), ("real", "..", "x"), ("a/b",), ("",), (".",), ("x\0y",)])
def test_no_name_leads_out_of_the_folder(tmp_path, parts):
    (tmp_path / "x").write_text("secret")
    (tmp_path / "runs" / "real").mkdir(parents=True)
    with pytest.raises(OSError):
        open_inside(tmp_path / "runs", parts)


def test_a_folder_that_becomes_a_link_is_not_opened(run):
    ref = found(run.parent)["0/first"]
    run.rename(run.parent.parent / "elsewhere")
    run.symlink_to(run.parent.parent / "elsewhere")
    with pytest.raises(OSError):
        ref.open("events.jsonl")


def test_in_a_folder_of_somebody_else_a_run_goes_on_while_its_events_grow(run, monkeypatch):
    ref = found(run.parent)["0/first"]
    (run / ".lock").touch()
    assert not ref.is_busy()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert ref.is_busy()
    os.utime(run / "events.jsonl", (0, 0))
    assert not ref.is_busy()


def test_a_pipe_in_place_of_the_file_blocks_nobody(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    os.mkfifo(tmp_path / "run" / "events.jsonl")
    with pytest.raises(OSError):
        found(tmp_path)["0/run"].open("events.jsonl")


def test_each_line_is_read_once_and_only_new_bytes_are(run, tail, monkeypatch):
    assert kinds(tail)[0] == "start"
    read = []
    plain = files._read_at
    monkeypatch.setattr(files, "_read_at", lambda *given: read.append(plain(*given)) or read[-1])
    assert kinds(tail) == []
    assert read == []
    lines = a_round(2)
    append(run, *lines)
    assert kinds(tail) == ["update", "update", "evaluation", "evaluation", "evaluation", "round"]
    # The 64 bytes by which the file is known again, and what is new.
    assert sum(map(len, read)) == 64 + sum(map(len, lines))


def test_a_cut_last_line_is_read_when_the_rest_of_it_is_there(run, tail):
    kinds(tail)
    whole = end()
    append(run, whole[:20])
    assert kinds(tail) == []
    append(run, whole[20:])
    assert kinds(tail) == ["end"]
    assert tail.num_broken == 0


def test_broken_lines_are_counted_with_their_numbers_and_the_others_are_read(run, tail):
    before = len(kinds(tail))
    append(run, b"{nonsense\n", line("round", round=-3), b"[1, 2]\n", b"\xff\xfe\n", end())
    assert kinds(tail) == ["end"]
    assert tail.num_broken == 4
    assert [number for number, _ in tail.broken] == [before + 1, before + 2, before + 3, before + 4]


def test_a_file_that_was_replaced_or_cut_back_is_read_anew(run, tail):
    first = kinds(tail)
    fresh = run / "events.new"
    fresh.write_bytes(b"".join(opening(9)))
    fresh.replace(run / "events.jsonl")
    assert kinds(tail)[:2] == ["anew", "start"]
    assert tail.offset < 10_000
    with (run / "events.jsonl").open("r+b") as file:
        file.truncate(len(opening(9)[0]))
    assert kinds(tail) == ["anew", "start"]
    assert len(first) > 2


def test_a_file_that_was_written_anew_in_the_same_length_is_noticed(run, tail):
    kinds(tail)
    data = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(data[:-30] + b" " * 29 + b"\n")
    os.utime(run / "events.jsonl", ns=(1, 1))
    assert kinds(tail)[0] == "anew"


def test_a_run_folder_that_disappears_and_comes_again(run, tail):
    kinds(tail)
    away = run.rename(run.parent / "away")
    assert tail.read() == (True, [])
    assert not tail.is_there
    away.rename(run)
    assert kinds(tail)[0] == "start"
    assert tail.is_there


def test_an_endless_line_is_skipped_and_the_next_is_read(run, tail, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 1000)
    monkeypatch.setattr(files, "LONGEST_LINE", 3000)
    kinds(tail)
    append(run, b"x" * 20_000)
    assert kinds(tail) == []
    append(run, b"\n", end())
    assert kinds(tail) == ["end"]
    assert tail.num_broken == 1


def test_a_file_larger_than_any_run_writes_is_not_read(run, tail, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_EVENTS", 100)
    assert kinds(tail) == []
    assert tail.is_too_large
