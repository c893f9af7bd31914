"""A kind of task of another package trains, is scored, answers and is reported as the kinds in the package are."""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmtl.capabilities import _KINDS, _REGISTERED, task_kinds
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError, ModelError
from fedmtl.experiment import run as driver
from fedmtl.predict.run import evaluate_file, load_run, predict_texts
from fedmtl.report.page import write_report
from fedmtl.tasks.metrics import score, sum_predictions
from fedmtl.tasks.task import Task
from raw_events import raw_events

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
LABELS = ("bad", "fair", "good", "great")
WORDS = ("awful boring dull", "passable plain slow", "nice warm funny", "superb moving perfect")
TASK = Task("stars", "ordinal", ("text",), "rating", "accuracy", LABELS)


def start_run(config):
    return driver.start_run(config, "stars")


@pytest.fixture(autouse=True)
def ordinal(monkeypatch):
    """The plug-in, registered for one test."""
    monkeypatch.syspath_prepend(PLUGINS)
    module = __import__("ordinal")
    yield module
    for registry in (_REGISTERED, _KINDS, sys.modules):
        registry.pop("ordinal", None)


@pytest.fixture
def make_config(tmp_path):
    rows = [f"a {WORDS[n % 4].split()[n // 4 % 3]} film number {n}\t{LABELS[n % 4]}" for n in range(72)]
    (tmp_path / "stars.tsv").write_text("\n".join(["text\trating", *rows]) + "\n")

    def make(*overrides):
        task = f"{{kind: ordinal, source: {{train: {tmp_path}/stars.tsv}}, text: [text], label: rating}}"
        return load_config(
            None,
            [
                f"tasks.stars={task}",
                f"tasks.stars.labels=[{', '.join(LABELS)}]",
                "tasks.sentiment={train_samples: 24, val_samples: 16}",
                "model.server_model=random-1x32",
                "model.pool=mean",
                "federation.clients_per_task=2",
                "training.num_rounds=2",
                "training.batch_size=8",
                "training.learning_rate=5e-3",
                "compute.workers=0",
                "compute.device=cpu",
                f"output={tmp_path}/runs",
                *overrides,
            ],
        )

    return make


def test_the_loss_adds_up_the_thresholds():
    # softplus(ln(e - 1)) = 1, so the logits above are 0, -1 and -2; the third label lies above two of three.
    one = math.log(math.e - 1)
    outputs = torch.tensor([[0.0, one, one]], dtype=torch.float64)
    expected = math.log(2) + math.log1p(math.exp(1)) + math.log1p(math.exp(-2))
    assert TASK.kind_of.losses(TASK, outputs, torch.tensor([2])).tolist() == pytest.approx([expected])


def test_probabilities_are_those_between_thresholds_and_never_negative():
    one = math.log(math.e - 1)
    shares = TASK.kind_of.probabilities(TASK, np.array([[0.0, one, one], [3.0, -40.0, 9.0]]))
    sigmoid = [1 / (1 + math.exp(k)) for k in range(3)]
    assert shares[0].tolist() == pytest.approx([0.5, 0.5 - sigmoid[1], sigmoid[1] - sigmoid[2], sigmoid[2]])
    assert (shares >= 0).all()
    assert shares.sum(axis=1).tolist() == pytest.approx([1, 1])


def test_a_near_miss_is_a_smaller_error():
    # All answers are the first label: one is right, the others are off by one, two and three.
    sums = sum_predictions(TASK, np.array([[-9.0, 0.0, 0.0]] * 4), np.arange(4), loss=4.0)
    scores = score(TASK, sums)
    assert (scores.metrics["accuracy"], scores.metrics["mae"]) == (0.25, 1.5)
    assert score(TASK, sum_predictions(TASK, np.zeros((0, 3)), np.arange(0), 0.0)).undefined["mae"] == "no examples"


@pytest.mark.parametrize("stack", [0, 2])
def test_a_run_trains_scores_answers_and_reports(make_config, tmp_path, stack):
    run = start_run(make_config(f"compute.stack={stack}"))
    with run.results.open() as file:
        rounds = list(csv.DictReader(file))
    assert {f"stars.{name}" for name in ("accuracy", "f1", "matthews", "mae", "train_loss")} <= set(rounds[0])
    assert "stars.pearson" not in rounds[0]
    assert [bool(row["stars.mae"]) for row in rounds] == [True] * 3
    assert float(rounds[2]["stars.train_loss"]) < float(rounds[1]["stars.train_loss"])
    start = next(event for event in raw_events(run) if event["event"] == "start")
    assert start["tasks"]["stars"]["metrics"] == ["accuracy", "f1", "matthews", "mae"]
    assert ("metrics" in start["tasks"]["sentiment"], start["stack"]) == (False, stack)
    loaded = load_run(run)
    ((answer,),) = predict_texts(loaded, [("a superb film",)], ["stars"])
    assert (answer.label in LABELS, sum(answer.probabilities.values())) == (True, pytest.approx(1))
    scores = evaluate_file(loaded, "stars", tmp_path / "stars.tsv")["stars"]
    assert set(scores.metrics) == {"accuracy", "f1", "matthews", "mae"}
    page = write_report(run.path).read_text()
    assert "stars: confusion matrix" in page


def test_stacked_clients_come_to_the_weights_of_clients_alone(make_config):
    alone, stacked = (
        load_run(start_run(make_config(f"compute.stack={stack}", "model.head_dropout=0", "model.encoder_dropout=0")))
        for stack in (0, 2)
    )
    for key, value in alone.saved.weights.items():
        torch.testing.assert_close(stacked.saved.weights[key], value, rtol=1e-3, atol=1e-4)


def test_a_worker_process_imports_it(make_config):
    run = start_run(make_config("compute.workers=1", "compute.stack=0", "training.num_rounds=1"))
    assert [event for event in raw_events(run) if event["event"] == "failure"] == []


def test_what_the_kind_does_not_have_is_refused_by_name(make_config):
    with pytest.raises(ConfigError, match=r"training\.logit_adjustment: the outputs of stars cannot be adjusted"):
        start_run(make_config("training.logit_adjustment=1"))
    with pytest.raises(ConfigError, match=r"tasks\.stars\.outputs: found 1 on an ordinal"):
        start_run(make_config("tasks.stars.outputs=1"))


def test_without_the_package_the_kind_is_not_known(make_config):
    config = make_config()
    run = start_run(make_config("training.num_rounds=1"))
    for registry in (_REGISTERED, _KINDS):
        registry.pop("ordinal")
    assert task_kinds() == ["classification", "regression", "tagging", "multilabel"]
    with pytest.raises(ConfigError, match=r"tasks\.stars\.kind: found 'ordinal', no kind of task is called so"):
        start_run(config)
    with pytest.raises(
        ModelError, match=r"its kind 'ordinal' is not known here; there are classification, regression,"
    ):
        load_run(run)
    # The page needs no more than the folder.
    assert "stars: confusion matrix" in write_report(run.path).read_text()
