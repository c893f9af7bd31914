"""Data that changed after a run began is refused or named; no score and no weight comes of it in silence."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmtl.api import Run
from fedmtl.cli.app import app
from fedmtl.config.file import load_config
from fedmtl.errors import DataError
from fedmtl.experiment.run import Log, resume_run, start_run
from fedmtl.predict.run import evaluate_validation, load_run
from fedmtl.runs.event_lines import first_of
from fedmtl.runs.events import DataEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import Trackers, read_events
from raw_events import raw_events

ROWS = [f"the {word} number {n},{label}" for n in range(10) for word, label in (("fine film", "good"), ("dull", "bad"))]
PLAIN = ("model.server_model=random-1x32", "training.num_rounds=1", "compute.workers=0", "compute.device=cpu")


def write(path: Path, rows: list[str]) -> None:
    path.write_text("\n".join(["text,label", *rows]) + "\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with mood.csv and a finished run of one round on it."""
    folder = tmp_path_factory.mktemp("changed")
    write(folder / "mood.csv", ROWS)
    task = f"tasks.mood={{kind: classification, text: text, label: label, source: {{train: {folder / 'mood.csv'}}}}}"
    settings = ["defaults=plain", task, "federation.clients_per_task=2", "evaluation.baselines=none", *PLAIN]
    start_run(load_config(None, [*settings, f"output={folder / 'runs'}"]), "mood")
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run; the file that it was trained on is put back afterwards."""
    yield RunFolder(Path(shutil.copytree(made / "runs" / "mood", tmp_path / "runs" / "mood")))
    write(made / "mood.csv", ROWS)


class TestEvaluate:
    def test_a_label_that_the_model_does_not_have_is_refused_by_name(self, made, run):
        write(made / "mood.csv", [row.replace(",good", ",awful") for row in ROWS])
        with pytest.raises(DataError, match=r"mood\.csv, line 2: label 'awful' .* is not one of bad, good"):
            evaluate_validation(load_run(run))

    def test_labels_are_the_models_where_the_file_has_lost_one(self, made, run):
        write(made / "mood.csv", [row for row in ROWS if row.endswith("good")])
        seen = []
        evaluate_validation(load_run(run), None, lambda name, task, found, outputs: seen.extend(found.labels), print)
        # Of the labels bad and good, `good` is the second.
        assert seen == [1]

    def test_a_cut_of_changed_data_is_one_warning_and_the_same_data_none(self, made, run):
        said = []
        evaluate_validation(load_run(run), warn=said.append)
        assert not said
        write(made / "mood.csv", REWRITTEN)
        with pytest.warns(
            UserWarning, match="mood: the data of task mood changed since the run began, so its validation"
        ):
            Run(run.path).evaluate()
        result = CliRunner().invoke(app, ["evaluate", str(run.path), "--json"])
        assert json.loads(result.stdout)["tasks"]["mood"]["examples"] == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("warning: mood: the data of task mood changed")


RENAMED = [row.replace(",good", ",awful") for row in ROWS]
FEWER = ROWS[4:]
REWRITTEN = [ROWS[0].replace("film", "book"), *ROWS[1:]]
SWAPPED = [ROWS[0].replace(",good", ",bad"), ROWS[1].replace(",bad", ",good"), *ROWS[2:]]


class TestResume:
    @pytest.mark.parametrize(
        ("rows", "change"),
        [
            (RENAMED, "labels bad, good before, awful, bad now"),
            (FEWER, "18 training and 2 validation examples before, 14 and 2 now"),
            (REWRITTEN, "other texts, or another order of them"),
            (SWAPPED, "other labels, or another order of them"),
            (ROWS[::-1], "other texts and labels, or another order of them"),
        ],
    )
    def test_changed_data_is_refused_with_what_changed_and_what_helps(self, made, run, rows, change):
        before = run.events.read_bytes()
        write(made / "mood.csv", rows)
        with pytest.raises(DataError) as refused:
            resume_run(run)
        assert str(refused.value) == (
            f"mood: the data of task mood changed since the run began: {change}; put back the files as they were, or"
            f" start a new run with `fedmtl run {run.config} --name NAME`"
        )
        assert run.events.read_bytes() == before

    def test_the_same_data_goes_on(self, run):
        resume_run(run)

    def test_a_run_of_an_earlier_version_is_compared_by_numbers_and_labels(self, made, run):
        lines = raw_events(run)
        run.events.write_text(
            "".join(json.dumps({k: v for k, v in line.items() if k != "fingerprint"}) + "\n" for line in lines)
        )
        for rows in (RENAMED, FEWER):
            write(made / "mood.csv", rows)
            with pytest.raises(DataError, match="the data of task mood changed"):
                resume_run(run)
        write(made / "mood.csv", REWRITTEN)
        resume_run(run)


def test_a_fingerprint_is_in_the_folder_and_goes_to_no_tracker(run, tmp_path, monkeypatch):
    known = first_of(read_events(run), DataEvent)
    assert known.fingerprint is not None
    assert {len(digest) for digest in known.fingerprint.values()} == {64}
    sent = []
    monkeypatch.setattr(Trackers, "event", lambda self, event: sent.append(event))
    log = Log(run, lambda event: None, load_config(run.config))
    log(known)
    log.close()
    assert [event.fingerprint for event in sent] == [None]


def test_a_file_with_semicolons_can_be_scored_and_answered(run, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("id;text;label\n7;fine, or so;good\n8;dull;bad\n")
    scored = CliRunner().invoke(app, ["evaluate", str(run.path), "--task", "mood", "--file", str(path), "--json"])
    assert json.loads(scored.stdout)["tasks"]["mood"]["examples"] == 2
    answered = CliRunner().invoke(app, ["predict", str(run.path), "--file", str(path)])
    assert [line.split("\t")[0] for line in answered.stdout.splitlines()] == ["fine, or so", "dull"]
