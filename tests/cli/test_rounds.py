"""`--round` of every command that opens a run's model."""

import csv
import json
import shutil

import pytest

from fedmtl.config.file import load_config
from fedmtl.experiment.run import start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.model.saved import load_model
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import best_overall
from fedmtl.sharing.plan import weights_sha256
from small_config import SMALL

TASKS = ("sentiment", "paraphrase", "similarity")
UNSTEADY = ("training.num_rounds=5", "training.learning_rate=3e-2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unsteady") / "runs"
    start_run(load_config(None, [*SMALL, *UNSTEADY, f"output={folder}"]), "up")
    return folder


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path / "runs")
    return RunFolder(tmp_path / "runs" / "up")


@pytest.fixture
def best(run):
    number = best_overall(read_events(run)).round
    assert 0 < number < 4
    return number


def table(run):
    with run.results.open() as file:
        return {int(row["round"]): row for row in csv.DictReader(file)}


def digest(folder):
    return weights_sha256(load_model(folder).weights)


def test_evaluate_prints_the_scores_of_the_round(cli, run, best):
    printed = json.loads(cli("evaluate", "up", "--round", "best", "--json").out)["metrics"]
    row = table(run)[best]
    for task, metrics in printed.items():
        for name, value in metrics.items():
            assert row[f"{task}.{name}"] == ("" if value is None else str(value))
    by_number, by_name = (cli("evaluate", "up", "--round", at).out for at in (str(best), "best"))
    assert f"after round {best}" in by_name
    assert by_number == by_name.replace("(--round best)", f"(--round {best})")
    last, plain = (cli("evaluate", "up", *given).out for given in (["--round", "last"], []))
    assert last.startswith(plain)


def test_evaluate_says_which_round_the_model_of_a_run_that_keeps_the_best_is_of(cli, tmp_path):
    folder = tmp_path / "runs"
    kept = start_run(load_config(None, [*SMALL, *UNSTEADY, "training.keep=best", f"output={folder}"]), "kept")
    number = best_overall(read_events(kept)).round
    assert cli("evaluate", "kept").out.endswith(f"the model after round {number} (training.keep: best)\n")
    assert json.loads(cli("evaluate", "kept", "--json").out)["rounds"] == dict.fromkeys(TASKS, number)
    assert cli("evaluate", "kept", "--round", "last").out.endswith("the model after round 5 (--round last)\n")


def test_predict_answers_with_the_round(cli, run, best):
    shown = [cli("predict", "up", "a fine film", "--json", "--round", at).out for at in ("best", str(best), "last")]
    assert shown[0] == shown[1] != shown[2]


def test_a_round_that_cannot_be_opened_is_one_line(cli, run, best):
    gone = next(number for number in range(1, 5) if number not in (best, 4))
    assert cli("evaluate", "up", "--round", str(gone)).error.startswith(
        f"--round {gone}: up has no checkpoint of round {gone}; it has those of rounds {best}, 4, 5;"
    )
    assert cli("export", "up", "--round", "x").error.startswith("--round x: is no round; write best, last, or")
    assert cli("predict", "a.onnx", "text", "--round", "best").error == (
        "--round best: an ONNX file has one set of values; export it with --round"
    )


def test_compare_puts_the_scores_of_each_runs_round_side_by_side(cli, run, best):
    record = json.loads(cli("compare", "up", "up", "--round", "best", "--json").out)["runs"][0]
    row = table(run)[best]
    assert {f"{task}.{name}" for task, metrics in record["metrics"].items() for name in metrics} <= set(row)
    assert str(record["metrics"]["similarity"]["pearson"]) == row["similarity.pearson"]
    assert f"{float(row['overall']):.3f}" in cli("compare", "up", "up", "--round", "best").out
    assert cli("compare", "up", "up", "--round", "7").error.startswith("--round 7: up was not scored after round 7")


def test_prune_starts_from_the_round(cli, run, best):
    done = cli("prune", "up", "--amount", "0.2", "--epochs", "0", "--round", "best", "--out", "less")
    assert done.code == 0, done.err
    weights = load_checkpoint(run.checkpoints, best).weights
    assert digest(run.path / "models" / "best") == weights_sha256(weights)
    assert load_config(run.path.parent / "less" / "config.yaml").model.start_from == str(run.path / "models" / "best")


def test_a_student_learns_from_the_round(cli, run, best):
    done = cli(
        "distill", "up", "--student", "1x32", "--stages", "prediction", "--epochs-prediction", "1", "--name", "student",
        "--round", str(best),
    )  # fmt: skip
    assert done.code == 0, done.err
    events = read_events(RunFolder(run.path.parent / "student"))
    (found,) = [event for event in events if event.kind == "distill"]
    row = table(run)[best]
    assert found.teacher_metrics["sentiment"] == float(row["sentiment.accuracy"])


@pytest.mark.slow
def test_exports_and_what_is_made_of_them_are_of_the_round(cli, run, best):
    pytest.importorskip("onnxruntime")
    assert "export/onnx-best: " in cli("export", "up", "--to", "onnx", "--round", "best").out
    file = run.path / "export" / "onnx-best"
    printed = json.loads(cli("evaluate", str(file), "--json").out)["metrics"]
    assert printed["sentiment"]["accuracy"] == float(table(run)[best]["sentiment.accuracy"])
    quantized = cli("quantize", "up", "--round", "best", "--samples", "4", "--threads", "1")
    assert quantized.out.startswith("runs/up/export/onnx-best/model.dynamic.onnx")
    measured = cli("measure", "up", "--round", "best", "--repeats", "2", "--length", "16")
    assert "up@best" in measured.out
