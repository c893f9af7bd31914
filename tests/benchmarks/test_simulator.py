"""The harness of `make bench`: what it measures is what it says; contestants themselves are not run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from simulator import results
from simulator.commands import CommandFailed, Outcome, run
from simulator.comparison import Contest, Plan, compare
from simulator.contestants.examples import BATCH, SAMPLES, Tokens
from simulator.contestants.telling import MARK
from simulator.environments import Environment
from simulator.processes import marked
from simulator.systems import Case, Measured, System, read_measured
from simulator.workload import LENGTHS, Texts, owners, pieces

HOST = {"processor": "p", "cores": 2, "python": "3", "torch": "2"}


def measured(seconds: float, samples: int = 3 * SAMPLES, mb: float = 100.0) -> Measured:
    return Measured((seconds,), 1.0, 1.5, 2.0 + seconds, mb, samples, 7, 1, 0.0)


def test_lengths_are_those_of_the_reference_workload():
    examples = Texts(pieces()).draw("singles", 4_000, seed=0)
    words = np.array([len(text.split()) for text in examples.texts[0]])
    assert np.median(words) == pytest.approx(LENGTHS["singles"].median, abs=1)
    assert words.min() >= 2
    assert words.max() <= LENGTHS["singles"].most
    again = Texts(pieces()).draw("singles", 4_000, seed=0)
    assert again == examples


def test_clients_take_tasks_in_turn():
    assert owners(5, "singles") == [0, 3]
    assert [len(owners(32, task)) for task in LENGTHS] == [11, 11, 10]


def test_an_epoch_has_every_example_once_however_it_is_cut(tmp_path):
    lengths = np.random.default_rng(0).integers(3, 30, 2 * SAMPLES)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(offsets[-1], dtype=np.int32) % 1000 + 1
    np.savez(tmp_path / "t.npz", ids=ids, segments=np.zeros_like(ids), offsets=offsets, labels=np.zeros(2 * SAMPLES))
    tokens = Tokens(tmp_path / "t.npz")
    for cut in (tokens.shuffled, tokens.bucketed):
        batches = cut(1, np.random.default_rng(1))
        assert sorted(np.concatenate(batches)) == list(range(SAMPLES, 2 * SAMPLES))
        assert sorted(map(len, batches))[1:] == [BATCH] * (SAMPLES // BATCH)
    batch = tokens.batch(np.array([0, 1]), "singles")
    assert batch.mask.sum(1).tolist() == lengths[:2].tolist()
    assert batch.ids[1, : lengths[1]].tolist() == ids[offsets[1] : offsets[2]].tolist()
    assert tokens.take_count() == 2


def test_memory_and_lines_of_a_command_are_measured_and_nothing_is_left():
    # A child in a session of its own, which outlives its parent: as Ray's processes do.
    child = "import time; held = bytearray(b'x') * 80_000_000; time.sleep(60)"
    script = (
        "import subprocess, sys, time; print('begun', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(1.2)"
    )
    outcome = run([sys.executable, "-c", script], {})
    assert [text for _, text in outcome.lines] == ["begun"]
    assert 80 < outcome.peak_mb < 200
    assert outcome.processes == 2
    assert outcome.seconds < 20
    commands = [_command(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not any(b"held = bytearray" in command for command in commands)
    assert marked("no such run") == []


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_command_that_fails_says_why():
    with pytest.raises(CommandFailed, match="no such luck"):
        run([sys.executable, "-c", "raise SystemExit('no such luck')"], {})


def test_start_up_ends_with_the_first_batch_not_with_the_word_that_a_round_begins():
    told = [
        (1.0, {"what": "model", "parameters": 7}),
        (2.0, {"what": "begin"}),
        (9.0, {"what": "round", "round": 1, "seconds": 7.0, "samples": 900, "megabytes": 30.0}),
        (12.0, {"what": "round", "round": 2, "seconds": 3.0, "samples": 900, "megabytes": 30.0}),
    ]
    lines = tuple((at, MARK + json.dumps(fields)) for at, fields in told)
    found = read_measured(Case(Path(), 3, 2, Path()), Outcome(lines, 12.0, 5.0, 1, 0.0, first_batch=6.0))
    assert (found.round, found.begun, found.start_up, found.megabytes) == (3.0, 2.0, 6.0, 10.0)


def test_the_first_batch_of_any_process_is_noted_once():
    first = (
        "from simulator.contestants.telling import tell_first_batch; import time; time.sleep({}); tell_first_batch()"
    )
    script = (
        f"import subprocess, sys; children = [subprocess.Popen([sys.executable, '-c', {first!r}.format(wait)])"
        " for wait in (0.5, 3)]; [child.wait() for child in children]"
    )
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    outcome = run([sys.executable, "-c", script], {"PYTHONPATH": str(benchmarks)})
    assert outcome.first_batch is not None
    assert 0.5 < outcome.first_batch < outcome.seconds - 1


def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path, [3], {3: 2}, 2, tmp_path / "envs", None)


def test_systems_take_turns_and_the_faster_variant_goes_on(tmp_path):
    asked = []

    def variant(name: str, seconds: float):
        return lambda case: asked.append(name) or measured(seconds)

    systems = [
        System("fedmtl", "ours", {"one": variant("ours", 1.0)}),
        System("naive", "loop", {"slow": variant("slow", 9.0), "fast": variant("fast", 4.0)}),
    ]
    skipped: dict[str, str] = {}
    contests = compare(systems, plan(tmp_path), skipped, lambda line: None)
    assert asked == ["ours", "slow", "fast", "ours", "fast"]
    assert skipped == {}
    assert results.ratio_of(contests, "naive") == 4.0
    text = results.markdown(contests, {}, skipped, HOST)
    assert "| loop; fast | 4.00 (4.00 to 4.00) |" in text
    assert results.picture(contests).startswith("<svg ")


def test_what_cannot_be_installed_is_skipped_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "envs").write_text("a file, where a folder should be")
    lines: list[str] = []
    skipped: dict[str, str] = {}
    systems = [System("pfl", "p", {"one": lambda case: measured(1.0)}, Environment("pfl", ("pfl",), "import pfl"))]
    assert compare(systems, plan(tmp_path), skipped, lines.append) == []
    assert len(skipped["pfl"].splitlines()) == 1
    assert lines == [f"pfl is skipped: {skipped['pfl']}"]


def test_other_samples_than_the_rest_end_the_run(tmp_path):
    systems = [System("fedmtl", "ours", {"one": lambda case: measured(1.0, samples=899)})]
    with pytest.raises(SystemExit, match="trained 899 samples a round, not 900"):
        compare(systems, plan(tmp_path), {}, lambda line: None)


def test_results_are_written_whole(tmp_path):
    contest = Contest("fedmtl", "ours", 3, "one", {"one": 1.0}, [measured(1.0)])
    results.write(tmp_path, [contest], {}, {"pfl": "no network"}, HOST)
    assert json.loads((tmp_path / "simulator.json").read_text())["contests"][0]["runs"][0]["round"] == 1.0
    assert "Skipped: pfl (no network)." in (tmp_path / "simulator.md").read_text()
