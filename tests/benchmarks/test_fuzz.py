"""The fuzz harness finds what is planted, notices hangs, bombs and deaths, and its changes get past the checksum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from fedmtl.errors import FedmtlError, WireError
from fedmtl.federation.wire import decode_update
from fuzz import __main__ as command
from fuzz.formats import Bundle, Frame, Gzip, Json, Protobuf, Raw, Tensors, Text, bundle, mend_digest, unbundle
from fuzz.from_network import Reached
from fuzz.loop import Piece, outcome
from fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from fuzz.results import BEGIN, END, as_record, page_table, save_findings, write_page
from fuzz.targets import MEBIBYTE, Target, all_targets, choose
from fuzz.watch import Figures, run_pieces

ROOT = Path(__file__).parents[2]


class Planted(Target):
    """A target with this corpus and no folder of it."""

    def seeds(self) -> list[bytes]:
        return [b"seed"]

    def corpus(self) -> list[bytes]:
        return [b"seed", b"one", b"two"]


def tried(run, folder, *, stop=3, **limits) -> Figures:
    target = Planted("planted", lambda own: run, "a planted fault", **limits)
    return run_pieces([Piece(target, 0, stop, 60.0, 0)], 1, folder)["planted"]


def test_accepted_and_refused_inputs_are_counted(tmp_path):
    def run(data):
        if data == b"two":
            raise FedmtlError("refused")

    figures = tried(run, tmp_path)
    assert (figures.inputs, figures.accepted, figures.refused, figures.findings) == (3, 2, 1, [])


def test_an_unexpected_exception_is_found_shortened_and_saved(tmp_path):
    def run(data):
        if b"w" in data:
            raise KeyError("planted")

    figures = tried(run, tmp_path / "work")
    (finding,) = figures.findings
    assert (finding.kind, finding.count, finding.data) == ("exception", 1, b"w")
    ((path, _),) = save_findings(tmp_path / "found", {"planted": figures})
    assert path.name.startswith("planted--exception-")
    assert path.read_bytes() == b"w"
    assert "KeyError: 'planted'" in path.with_name(path.name + ".txt").read_text()


def test_only_the_errors_that_a_target_declares_are_expected(tmp_path):
    def run(data):
        raise FedmtlError("of the wrong kind")

    figures = tried(run, tmp_path, expected=(WireError,))
    assert figures.count("exception") == 3


def test_a_hang_is_noticed_and_the_rest_is_tried(tmp_path):
    def run(data):
        while data == b"one":
            time.sleep(0.01)

    figures = tried(run, tmp_path, seconds=1.0)
    assert [(finding.kind, finding.data) for finding in figures.findings] == [("hang", b"one")]
    assert figures.accepted == 2


def test_an_input_that_is_slow_once_is_no_hang(tmp_path):
    mark = tmp_path / "mark"

    def run(data):
        if data == b"one" and not mark.exists():
            mark.touch()
            time.sleep(60)

    assert tried(run, tmp_path / "work", seconds=1.0).findings == []


def test_a_bomb_is_noticed(tmp_path):
    def run(data):
        if data == b"two":
            bytearray(b"x" * (150 * MEBIBYTE))

    figures = tried(run, tmp_path, memory=100 * MEBIBYTE)
    assert [(finding.kind, finding.data) for finding in figures.findings] == [("memory", b"two")]
    assert figures.growth > 100 * MEBIBYTE


def test_a_process_that_dies_is_noticed_and_the_rest_is_tried(tmp_path):
    def run(data):
        if data == b"one":
            os.kill(os.getpid(), signal.SIGKILL)

    figures = tried(run, tmp_path)
    assert [(finding.kind, finding.data) for finding in figures.findings] == [("crash", b"one")]
    assert figures.inputs == 3


def test_mutation_leads_from_the_corpus_to_a_fault_that_is_not_in_it(tmp_path):
    def run(data):
        if data.startswith(b"seed") and len(data) > 40:
            raise ValueError("planted")

    assert tried(run, tmp_path, stop=3000).count("exception") > 0


def test_changed_frames_get_past_the_checksum():
    target = all_targets()["wire-update"]
    random, passed, refused = Random(1), 0, 0
    for _ in range(300):
        data = target.format.mutate(random.choice(target.seeds()), random, target.seeds())
        try:
            decode_update(data, MEBIBYTE, MEBIBYTE)
            passed += 1
        except WireError as error:
            refused += "checksum" in str(error) or "frame says" in str(error)
    assert refused < 60
    assert passed > 20


FORMATS = [
    Raw(),
    Text(),
    Json(),
    Json(lines=True),
    Frame(),
    Tensors(),
    Gzip(),
    Protobuf(),
    Bundle({"a.json": Json(), "b": Raw()}),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("data", [b"", b"{}", b"\0" * 40, b"\xff" * 9, bundle({"a.json": b"{}", "b": b"x"})])
def test_any_bytes_can_be_changed(form, data):
    for seed in range(60):
        assert isinstance(form.mutate(data, Random(seed), [data, b"other"]), bytes)


def test_a_change_depends_on_its_seed_alone():
    for change in (
        lambda random: mutate_bytes(b"some bytes", random, [b"others"]),
        lambda random: mutate_text("some words\nin lines", random),
        lambda random: mutate_json(b'{"a": [1, 2.5, "x", {"b": null}]}', random),
    ):
        assert [change(Random(seed)) for seed in range(200)] == [change(Random(seed)) for seed in range(200)]
        assert len({change(Random(seed)) for seed in range(200)}) > 80


def test_parts_of_an_input_join_to_the_same_input():
    for target in all_targets().values():
        for data in target.seeds():
            parts, join = target.format.take_apart(data)
            try:
                again, _ = target.format.take_apart(join(parts))
            except ValueError as error:
                pytest.fail(f"{target.name}: {error}")
            assert again == parts, target.name


def test_a_checkpoints_digest_is_mended():
    files = unbundle(all_targets()["checkpoint"].seeds()[0])
    before = dict(files)
    name = next(name for name in files if name.endswith(".safetensors"))
    files[name] += b"more"
    mend_digest(files)
    record = next(name for name in files if name.endswith(".json"))
    assert json.loads(files[record])["sha256"] != json.loads(before[record])["sha256"]
    files[name] = before[name]
    mend_digest(files)
    assert files == before


def test_every_target_has_seeds_and_limits():
    for target in all_targets().values():
        assert target.seeds(), f"{target.name}: run python -m fuzz --write-corpus"
        assert 0 < target.seconds <= 30
        assert 0 < target.memory <= 512 * MEBIBYTE
    total = sum(path.stat().st_size for path in (ROOT / "benchmarks/fuzz/corpus").rglob("*") if path.is_file())
    assert total < 500_000


def test_every_target_accepts_one_of_its_seeds(tmp_path):
    """Seeds of another version are all refused, and nothing behind the first check would be tried."""
    for target in all_targets().values():
        if target.name == "http":
            continue  # It needs a logger and a loop of its own; the slow tests run it.
        (tmp_path / target.name).mkdir()
        run = target.open(tmp_path / target.name)
        errors = [outcome(run, data) for data in target.seeds()]
        assert None in errors or any(isinstance(error, Reached) for error in errors), (target.name, errors)


def test_targets_are_chosen_by_name_or_by_their_first_word():
    assert [target.name for target in choose(["wire", "sums"])] == ["wire-job", "wire-update", "sums"]
    with pytest.raises(SystemExit, match="no pickles"):
        choose(["pickles"])


def test_a_total_is_shared_so_that_cheap_targets_take_most():
    asked = command._parser().parse_args(["--total", "2000000"])
    pieces = command.plan(asked, choose([]))
    inputs = {piece.target.name: 0 for piece in pieces}
    for piece in pieces:
        inputs[piece.target.name] += piece.stop - piece.start
    assert sum(inputs.values()) == pytest.approx(2_000_000, abs=30)
    assert inputs["wire-update"] > 100 * inputs["model"] > 0


def test_figures_go_between_the_marks_of_a_page_and_beside_it(tmp_path):
    figures = {"sums": Figures(all_targets()["sums"], 10, 4, 6, 2.0, 0.25, 3 * MEBIBYTE)}
    record = as_record(figures, "make fuzz", 3.0)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, record)
    assert page.read_text() == f"before\n{BEGIN}\n{page_table(record)}\n{END}\nafter\n"
    assert "| sums | 10 | 4 | 6 | 0 | 0 | 0 | 5 | 250.0 | 3.0 |" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["targets"]["sums"]["inputs"] == 10


def fuzz(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_one_input_is_tried_again_by_its_file_name(tmp_path, capsys, monkeypatch):
    # Neither is for this process.
    monkeypatch.setattr(command, "quiet", lambda: None)
    monkeypatch.setattr(command, "limit_memory", lambda: None)
    path = tmp_path / "wire-job--exception-00000000"
    path.write_bytes(b"garbage")
    assert command.main(["--repro", str(path)]) == 0
    assert "refused: WireError: the message is shorter than a frame" in capsys.readouterr().out


@pytest.mark.slow
def test_no_input_of_a_short_run_is_unexpected(tmp_path):
    # A number of inputs and not a time: the same inputs on every machine.
    done = fuzz("--total", "150000", "--json", "figures.json", cwd=tmp_path, timeout=600)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["targets"]) == set(all_targets())
    assert all(each["inputs"] > 0 for each in figures["targets"].values())
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_no_input_of_a_short_run_by_hypothesis_is_unexpected(tmp_path):
    done = fuzz("--seconds", "20", "--engine", "hypothesis", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout
