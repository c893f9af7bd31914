"""Cells that need other cells: a student, a pruned model, a run that starts with another's values."""

import json

import pytest

from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl_studies.cells import Cell, Distillation, Pruning
from fedmtl_studies.folder import open_study
from fedmtl_studies.grid import run_grid
from raw_events import raw_events
from studies.small_cells import settings

TAUGHT = DistillSettings("1x32", stages="prediction", epochs_prediction=2)


@pytest.fixture
def folder(tmp_path):
    return open_study(tmp_path, "study")


def teacher():
    return Cell("teacher", settings())


def student(**more):
    made = Distillation("teacher", DistillSettings(**{**vars(TAUGHT), **more}), ("seed=3",))
    return Cell("student", made, after=("teacher",))


def pruned(epochs=1):
    return Cell("pruned", Pruning("teacher", Cut(amount=0.5), epochs), after=("teacher",))


def weights(folder, name):
    return folder.cell(name).model / "weights.safetensors"


def sha(folder, name):
    return summarize(read_events(folder.cell(name)), name).weights_sha256


def test_cells_are_made_of_another_when_it_is_done_and_then_its_weights_go(folder):
    above = str(folder.cells / "teacher")
    going_on = {**settings(), "model": {**settings()["model"], "start_from": above}}
    # the student comes first in the list and waits all the same
    cells = [student(), teacher(), pruned(), Cell("longer", going_on, after=("teacher",))]
    standings = []
    outcomes = run_grid(folder, cells, 2, standings.append, keep="scores", needed={"pruned"})
    assert [(one.cell, one.status) for one in outcomes] == [
        ("student", "done"), ("teacher", "done"), ("pruned", "done"), ("longer", "done"),
    ]  # fmt: skip
    assert standings[-1].outcomes[0].cell == "teacher"
    assert load_config(folder.cell("student").config).seed == 3
    told = next(event for event in raw_events(folder.cell("student")) if event["event"] == "distill")
    assert (told["teacher"], told["settings"]["epochs_prediction"]) == ("teacher", 2)
    zeros = [event for event in raw_events(folder.cell("pruned")) if event["event"] == "pruning"][-1]["linear"]
    assert zeros["zeros"] / zeros["weights"] == pytest.approx(0.5, abs=1e-3)
    # others waited for the teacher's weights; in the end only those that are needed afterwards are there
    assert [weights(folder, cell.name).exists() for cell in cells] == [False, False, True, False]
    assert not (folder.cell("student").path / "encoder").exists()
    again = run_grid(folder, cells, 2)
    assert {one.status for one in again} == {"earlier"}


def test_what_needs_a_failed_cell_fails_with_its_reason(folder):
    broken = Cell("teacher", settings(bogus=1))
    last = Cell("last", Pruning("student", Cut(amount=0.1), 1), after=("student",))
    outcomes = run_grid(folder, [broken, student(), last], 1)
    assert [one.status for one in outcomes] == ["failed"] * 3
    assert outcomes[1].reason.startswith("it needs teacher, which failed: training.bogus: unknown key")
    assert outcomes[2].reason.startswith("it needs student, which failed: it needs teacher")


def test_other_settings_of_a_derived_cell_are_an_error(folder):
    run_grid(folder, [teacher(), student(), pruned()], 2)
    with pytest.raises(ConfigError, match=r"settings.epochs_prediction was 2 and is now 3; .*--name"):
        run_grid(folder, [teacher(), student(epochs_prediction=3)], 1)
    with pytest.raises(ConfigError, match="epochs was 1 and is now 2"):
        run_grid(folder, [teacher(), pruned(2)], 1)
    # the teacher that taught it is another one now
    note = folder.made / "student.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "source": "0"}))
    with pytest.raises(ConfigError, match="source was 0 and is now"):
        run_grid(folder, [teacher(), student()], 1)


def test_a_student_that_was_cut_off_goes_on_with_the_same_weights(folder):
    run_grid(folder, [teacher(), student()], 1)
    whole = sha(folder, "student")
    run = folder.cell("student")
    events = run.events.read_bytes()
    # as if it was killed before its first checkpoint
    run.events.write_bytes(events[: events.index(b'{"event": "round", "round": 1')])
    outcomes = run_grid(folder, [teacher(), student()], 1)
    assert [one.status for one in outcomes] == ["earlier", "done"]
    assert sha(folder, "student") == whole
    assert not (folder.cells / "student-2").exists()


def test_a_cell_without_weights_teaches_nobody(folder):
    run_grid(folder, [teacher()], 1, keep="scores")
    outcomes = run_grid(folder, [teacher(), student()], 1, keep="scores")
    assert outcomes[1].reason.startswith("it needs teacher, whose weights were removed; remove ")
