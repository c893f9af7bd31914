"""What holds of the metrics of every kind of task."""

import json

import pytest

from fedmtl.capabilities import TASK_KINDS, task_kind
from fedmtl.runs.event_lines import to_json, to_line
from fedmtl.runs.log import METRICS
from fedmtl.tasks.metrics import Scores, averages, evaluation_event, score
from fedmtl.tasks.task import Task

from .kinds.small_tasks import STSB, TWO, predict, regress


def test_the_metrics_are_the_columns_of_the_results():
    # Those of any other kind stand in a run's `start`.
    assert {name: task_kind(name).metrics for name in METRICS} == METRICS
    assert set(METRICS) < set(TASK_KINDS)
    assert tuple(score(TWO, predict(TWO, [0, 1], [0, 1])).metrics) == METRICS["classification"]
    assert tuple(score(STSB, regress([1, 2], [1, 2])).metrics) == METRICS["regression"]
    assert tuple(score(STSB, regress([], [])).metrics) == METRICS["regression"]


def test_an_evaluation_event_holds_what_its_numbers_come_from():
    event = evaluation_event(3, TWO, predict(TWO, [0, 1, 1], [0, 0, 1]))
    assert (event.round, event.task, event.clients) == (3, TWO.name, None)
    assert event.confusion == [[1, 1], [0, 1]]
    assert event.metrics["accuracy"] == pytest.approx(2 / 3)
    regression = json.loads(to_line(evaluation_event(3, STSB, regress([1, 2, 3], [1, 3, 4]), {"a": 0.5})))
    assert regression["moments"]["squared_error"] == pytest.approx(2.0)
    assert set(to_json(event)) | {"moments", "residuals", "clients"} == set(regression) | {"confusion"}


class TestAverages:
    def scores(self, **metrics):
        return Scores(metrics, {}, None, 0.0, 1)

    def test_auxiliary_tasks_do_not_count(self):
        f1_task = Task("qqp", "classification", ("a", "b"), "label", "f1", labels=("no", "yes"))
        extra = Task("extra", "classification", ("a",), "label", "accuracy", labels=("no", "yes"), auxiliary=True)
        scores = {
            "own": self.scores(accuracy=0.9, f1=0.1),
            "qqp": self.scores(accuracy=0.5, f1=0.6),
            "stsb": self.scores(pearson=0.3),
            "extra": self.scores(accuracy=0.0),
        }
        # main metrics 0.9, 0.6, 0.3; accuracies 0.9, 0.5
        overall, classification = averages([TWO, f1_task, STSB, extra], scores)
        assert overall == pytest.approx(0.6)
        assert classification == pytest.approx(0.7)

    def test_one_that_is_undefined_or_missing_undefines_the_mean(self):
        scores = {"own": self.scores(accuracy=0.9), "stsb": self.scores(pearson=None)}
        assert averages([TWO, STSB], scores) == (None, 0.9)
        assert averages([TWO, STSB], {"stsb": self.scores(pearson=0.5)}) == (None, None)

    def test_without_classifications_there_is_no_classification_mean(self):
        assert averages([STSB], {"stsb": self.scores(pearson=0.5)}) == (0.5, None)
        assert averages([], {}) == (None, None)
