"""One driver for every study: a study of two small cells, and what the five refuse."""

from dataclasses import replace

import pytest

from fedmtl.errors import CannotContinue, ConfigError
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl_studies import compression, federated, multitask
from fedmtl_studies.cells import Cell
from fedmtl_studies.folder import open_study
from fedmtl_studies.options import StudyOptions
from fedmtl_studies.page import Column, Page, Table
from fedmtl_studies.results import over_seeds
from fedmtl_studies.study import Plan, Silent, Study, run_study
from studies.csv_rows import read_csv
from studies.small_cells import settings


class SmallOptions(StudyOptions):
    steps: tuple[int, ...] = (1, 2)

    @property
    def folder_name(self):
        return "small"


def num_rounds(run):
    return float(summarize(read_events(run)).rounds)


def plan(options, folder):
    names = [f"steps-{steps}" for steps in options.steps]
    columns = (Column("setup", "setup", "words"), Column("rounds", "rounds", "number"))

    def page(results):
        rows = tuple((name, over_seeds(results, name, lambda rounds: rounds)) for name in names)
        return Page("Two cells.", "Rounds are counted.", [Table("table1", "Rounds", columns, rows)], {})

    return Plan(
        [Cell(name, settings(1, local_steps=steps)) for name, steps in zip(names, options.steps, strict=True)],
        {name: {0: folder.cell(name)} for name in names},
        page,
    )


SMALL = Study("small", "small", "Two cells.", SmallOptions, plan, num_rounds)


@pytest.fixture
def folder(tmp_path):
    return open_study(tmp_path, "small")


class Watching(Silent):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def test_a_study_is_its_cells_and_a_page_of_them(folder):
    outcomes = run_study(SMALL, SmallOptions(), folder)
    assert [(one.cell, one.status) for one in outcomes] == [("steps-1", "done"), ("steps-2", "done")]
    assert [row["rounds"] for row in read_csv(folder.path / "table1.csv")] == ["1", "1"]
    assert "Two cells. 2 of 2 cells are finished." in folder.markdown.read_text()
    assert "fedmtl study small" in folder.page.read_text()
    assert "steps: [1, 2]\n" in folder.settings.read_text()
    assert {one.status for one in run_study(SMALL, SmallOptions(), folder)} == {"earlier"}


def test_cells_that_fail_are_named_when_all_others_have_their_numbers(folder):
    with pytest.raises(CannotContinue, match=r"1 of 2 cells failed \(steps-0\); the reason of the first: training\."):
        run_study(SMALL, SmallOptions(steps=(0, 1)), folder)
    assert [row["rounds"] for row in read_csv(folder.path / "table1.csv")] == ["", "1"]
    assert "* steps-0 failed: training." in folder.markdown.read_text()


def test_models_stay_until_they_are_measured(folder):
    weights = folder.cell("steps-1").model / "weights.safetensors"
    seen = []

    def measure(results, say):
        seen.append((results["steps-1"][0], weights.exists(), (folder.cell("steps-2").model / weights.name).exists()))
        say("measured")

    measuring = replace(
        SMALL, plan=lambda options, folder: replace(plan(options, folder), measure=measure, measured=["steps-1"])
    )
    observer = Watching()
    run_study(measuring, SmallOptions(), folder, 1, observer, "scores")
    assert seen == [(1.0, True, False)]
    assert observer.lines == ["measured"]
    assert not weights.exists()


def test_a_study_that_trains_nothing_says_what_the_cells_were_to_be(folder):
    still = replace(SMALL, plan=lambda options, folder: replace(plan(options, folder), trains=False))
    with pytest.raises(ConfigError, match=r"--no-run: .* has no finished cell"):
        run_study(still, SmallOptions(), folder)
    run_study(SMALL, SmallOptions(steps=(1,)), folder)
    run_study(still, SmallOptions(), folder)
    assert "1 of 2 cells are finished." in folder.markdown.read_text()
    assert "steps: [1]\n" in folder.settings.read_text()
    assert "steps: [1]" in folder.page.read_text()


@pytest.mark.parametrize(
    ("study", "given", "words"),
    [
        (multitask.STUDY, {"quick": True, "tables": (8,)}, "--tables: found 8"),
        (multitask.STUDY, {"quick": True, "seeds": ()}, "--seeds"),
        (multitask.STUDY, {"quick": True, "steps": 3, "epochs": 4}, "--steps: found 3"),
        (multitask.STUDY, {}, "--data: missing"),
        (multitask.STUDY, {"quick": True, "rows": "nothing*"}, "--rows: no setup fits nothing"),
        (compression.STUDY, {"quick": True, "tables": (8,)}, "--tables: found 8"),
        (compression.STUDY, {"quick": True, "seeds": ()}, "--seeds"),
        (compression.STUDY, {}, "--data: missing"),
        (compression.STUDY, {"quick": True, "rows": "nothing*"}, "--rows: no setup fits nothing"),
        (compression.STUDY, {"quick": True, "tasks": ("mine",)}, "--tasks: mine is not built in"),
        (compression.STUDY, {"quick": True, "runs": False}, "--no-run: .* has no finished cell"),
        (federated.STUDY, {"quick": True, "seeds": ()}, "--seeds"),
        (federated.STUDY, {}, "--data: missing"),
        (federated.STUDY, {"data": "nowhere"}, "--data: nowhere/sst2 has no train file"),
        (federated.STUDY, {"quick": True, "rows": "nothing*"}, "--rows: no setup fits nothing"),
    ],
)
def test_options_that_cannot_be_are_named(folder, study, given, words):
    with pytest.raises(ConfigError, match=words):
        run_study(study, study.options(**given), folder)
