"""Data that changed after a run began is refused or named; no score and no weight comes of it in silence."""

import shutil
from pathlib import Path

import pytest

from fedmtl.config.file import load_config
from fedmtl.errors import DataError
from fedmtl.experiment.run import start_run
from fedmtl.predict.run import evaluate_validation, load_run
from fedmtl.runs.folder import RunFolder

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
        evaluate_validation(load_run(run), sink=lambda name, task, examples, outputs: seen.extend(examples.labels))
        # Of the labels bad and good, `good` is the second.
        assert seen == [1]
