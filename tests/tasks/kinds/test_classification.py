"""Classifications: their losses and answers, and metrics against scikit-learn."""

import json
import math
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.errors import ModelError, WireError
from fedmtl.tasks.metrics import constant_score, score, sum_predictions, sums_from_dict
from fedmtl.tasks.task import Task, read_tasks
from fedmtl.training.local import task_loss

from .small_tasks import TWO, classes, confusion, predict, quick

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sklearn.metrics as reference

CE = classes("x", "y", "z")
BCE = replace(TWO, outputs=1)


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_cross_entropy_is_the_mean_log_loss():
    # Logits 0, 0, ln 2 give probabilities 1/4, 1/4, 1/2.
    outputs = torch.tensor([[0.0, 0.0, math.log(2)]] * 2)
    assert CE.kind_of.losses(CE, outputs, torch.tensor([0, 2])).tolist() == pytest.approx([math.log(4), math.log(2)])
    assert task_loss(CE, outputs, torch.tensor([0, 2])).item() == pytest.approx(1.5 * math.log(2))


def test_one_output_is_scored_with_binary_cross_entropy():
    # -log sigmoid(-2) = softplus(2) for label 0, -log sigmoid(-1) = softplus(1) for label 1.
    outputs, labels = torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 1])
    assert BCE.kind_of.losses(BCE, outputs, labels).tolist() == pytest.approx([softplus(2), softplus(1)])


def test_balanced_weights_follow_the_clients_own_counts():
    # Counts 4, 1, 1 of 6: 6 / (3 * 4) = 0.5, 6 / (3 * 1) = 2.
    task = classes("x", "y", "z", class_weights="balanced")
    assert task.kind_of.class_weights(task, np.array([0, 0, 1, 0, 2, 0])).tolist() == [0.5, 2.0, 2.0]


def test_balanced_weights_of_a_client_with_one_class_are_finite():
    # Counts 4 and 0: 4 / (2 * 4) for the class it has; the other is never looked up.
    task = replace(TWO, class_weights="balanced")
    weights = task.kind_of.class_weights(task, np.array([0, 0, 0, 0]))
    assert weights.tolist() == [0.5, 2.0]
    outputs, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    assert task_loss(task, outputs, labels, torch.from_numpy(weights)).item() == pytest.approx(softplus(1))


def test_class_weights_are_the_given_ones_or_none():
    given = replace(TWO, class_weights=(1.0, 4.0))
    assert given.kind_of.class_weights(given, np.array([0, 1])).tolist() == [1.0, 4.0]
    assert TWO.kind_of.class_weights(TWO, np.array([0, 1])) is None


def test_the_divergence_of_classes_is_kl_both_ways():
    # P = (1/4, 1/4, 1/2), Q = (1/3, 1/3, 1/3): sum of (p - q) log(p / q).
    first, second = torch.tensor([[0.0, 0.0, math.log(2)]]), torch.zeros(1, 3)
    expected = 2 * (1 / 4 - 1 / 3) * math.log(3 / 4) + (1 / 2 - 1 / 3) * math.log(3 / 2)
    assert CE.kind_of.divergences(CE, first, second).item() == pytest.approx(expected)
    assert CE.kind_of.divergences(CE, second, first).item() == pytest.approx(expected)


def test_one_output_diverges_as_two_classes_of_which_one_has_logit_zero():
    first, second = torch.randn(2, 7, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = [torch.cat([torch.zeros_like(part), part], -1) for part in (first, second)]
    assert torch.allclose(BCE.kind_of.divergences(BCE, first, second), TWO.kind_of.divergences(TWO, *both), rtol=1e-12)


def test_one_output_is_the_difference_of_two():
    one = Task("t", "classification", ("a",), "y", "accuracy", ("no", "yes"), outputs=1)
    two = replace(one, outputs=2)
    assert one.kind_of.in_form_of(one, two, np.array([[1.0, 4.0]])).tolist() == [[3.0]]
    assert two.kind_of.in_form_of(two, one, np.array([[3.0]])).tolist() == [[0.0, 3.0]]
    assert two.kind_of.in_form_of(two, two, np.array([[1.0, 4.0]])).tolist() == [[1.0, 4.0]]


@pytest.mark.parametrize("task", [CE, BCE, TWO])
def test_losses_without_torch_are_the_same(task):
    outputs = np.random.Generator(np.random.PCG64(0)).normal(size=(6, task.kind_of.num_outputs(task)))
    labels = np.arange(6) % len(task.labels)
    expected = task.kind_of.losses(task, torch.from_numpy(outputs), torch.from_numpy(labels)).numpy()
    np.testing.assert_allclose(task.kind_of.plain_losses(task, outputs, labels), expected, rtol=1e-12)


def test_an_answer_is_the_likeliest_label_with_every_probability():
    # Logits 0, 0, ln 2 give probabilities 1/4, 1/4, 1/2; one output of -ln 3 is the second label with 1/4.
    answer = CE.kind_of.answer(CE, np.array([0.0, 0.0, math.log(2)]))
    assert (answer.label, answer.score) == ("z", None)
    assert dict(answer.probabilities) == pytest.approx({"x": 0.25, "y": 0.25, "z": 0.5})
    one = BCE.kind_of.answer(BCE, np.array([-math.log(3)]))
    assert (one.label, one.probabilities["yes"]) == ("no", pytest.approx(0.25))


def test_a_task_of_many_labels_is_read_again_from_a_file():
    # `outputs` is then the number of labels.
    task = classes("a", "b", "c", "d", outputs=4)
    assert read_tasks({"own": asdict(task)}, "model", ModelError)["own"] == task


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (classes("a", "b", "c", outputs=5), "a head has one output or two"),
        (classes("a", "b", "c", outputs=1), "one output is for two labels"),
        (classes("a"), "it has no range of scores, or no labels"),
    ],
)
def test_a_task_that_cannot_be_is_refused(task, problem):
    with pytest.raises(ModelError, match=problem):
        read_tasks({"own": asdict(task)}, "model", ModelError)


class TestMetrics:
    def test_two_classes_worked_by_hand(self):
        # true no: 3 right, 1 wrong; true yes: 2 wrong, 4 right
        scores = confusion(TWO, [[3, 1], [2, 4]], loss=5.0)
        assert scores.metrics["accuracy"] == 7 / 10
        assert scores.metrics["f1"] == 2 * 4 / (6 + 5)
        assert scores.metrics["matthews"] == pytest.approx((4 * 3 - 1 * 2) / math.sqrt(5 * 6 * 4 * 5))
        assert (scores.loss, scores.examples, scores.undefined, scores.marked) == (0.5, 10, {}, None)

    @quick
    @given(st.data(), st.integers(2, 5))
    def test_agrees_with_scikit_learn(self, data, num_labels):
        pair = st.tuples(st.integers(0, num_labels - 1), st.integers(0, num_labels - 1))
        true, predicted = zip(*data.draw(st.lists(pair, min_size=1, max_size=40)), strict=True)
        task = classes(*"abcde"[:num_labels])
        metrics = score(task, predict(task, predicted, true)).metrics
        assert metrics["accuracy"] == pytest.approx(reference.accuracy_score(true, predicted))
        if metrics["f1"] is not None:
            average = "binary" if num_labels == 2 else "macro"
            assert metrics["f1"] == pytest.approx(reference.f1_score(true, predicted, average=average, zero_division=0))
        else:
            assert 1 not in true + predicted
        if metrics["matthews"] is not None:
            assert metrics["matthews"] == pytest.approx(reference.matthews_corrcoef(true, predicted))
        else:
            assert len(set(true)) == 1 or len(set(predicted)) == 1

    def test_one_output_means_the_second_label_where_it_is_positive(self):
        sums = sum_predictions(TWO, np.array([[-1.0], [0.0], [0.5], [2.0]]), np.array([0, 0, 0, 1]), 1.0)
        assert sums.confusion.tolist() == [[2, 1], [0, 1]]

    def test_the_largest_of_several_outputs_wins(self):
        task = classes("a", "b", "c")
        outputs = np.array([[0.1, 0.2, 0.9], [3.0, 1.0, 2.0]], dtype=np.float32)
        assert sum_predictions(task, outputs, np.array([2, 1]), 1.0).confusion.tolist() == [
            [0, 0, 0],
            [1, 0, 0],
            [0, 0, 1],
        ]

    def test_no_examples_is_undefined_and_never_0(self):
        scores = score(TWO, sum_predictions(TWO, np.zeros((0, 2)), np.zeros(0, dtype=int), 0.0))
        assert scores.metrics == {"accuracy": None, "f1": None, "matthews": None}
        assert set(scores.undefined.values()) == {"no examples"}
        assert (scores.loss, scores.examples) == (None, 0)

    def test_constant_predictions_have_no_correlation_and_are_marked(self):
        scores = confusion(TWO, [[6, 0], [4, 0]])
        assert scores.metrics == {"accuracy": 0.6, "f1": 0.0, "matthews": None}
        assert scores.undefined == {"matthews": "all predictions are `no`"}
        assert scores.marked == "equals the majority class"

    def test_constant_labels_have_no_correlation(self):
        assert confusion(TWO, [[0, 0], [1, 3]]).undefined == {"matthews": "all labels are `yes`"}

    def test_f1_without_true_or_predicted_positives_is_undefined(self):
        assert confusion(TWO, [[6, 0], [0, 0]]).undefined["f1"] == "`yes` is neither a label nor a prediction"
        assert confusion(TWO, [[6, 0], [1, 0]]).metrics["f1"] == 0.0

    def test_the_macro_mean_is_over_labels_that_occur(self):
        # a: 2*1/(1+1) = 1, b: 1, c neither true nor predicted
        assert confusion(classes("a", "b", "c"), [[1, 0, 0], [0, 1, 0], [0, 0, 0]]).metrics["f1"] == 1.0

    def test_an_accuracy_equal_to_the_majority_share_is_marked(self):
        # 6 of 10 are no; 4 + 2 are right
        assert confusion(TWO, [[4, 2], [2, 2]]).marked == "equals the majority class"

    def test_one_label_for_all_is_marked_as_that_when_it_is_not_the_majoritys(self):
        # six of ten are `no`, all are called `yes`: .4, below the majority's .6
        assert confusion(TWO, [[0, 6], [0, 4]]).marked == "gives one label to all"
        assert confusion(TWO, [[5, 1], [2, 2]]).marked is None

    def test_outputs_that_are_not_finite_undefine_everything(self):
        sums = sum_predictions(TWO, np.array([[0.0, 1.0], [np.nan, 0.0]]), np.array([1, 1]), float("nan"))
        scores = score(TWO, sums)
        assert scores.metrics == {"accuracy": None, "f1": None, "matthews": None}
        assert scores.undefined["accuracy"] == "1 of 2 predictions are not finite"
        assert scores.examples == 2

    def test_millions_of_examples_do_not_overflow(self):
        # matthews multiplies four counts: (3e9)**4 has 38 digits
        assert confusion(TWO, [[3 * 10**9, 0], [0, 3 * 10**9]]).metrics["matthews"] == 1.0


@quick
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(0, 30))
def test_any_split_of_a_classification_has_the_same_counts(pairs, cut):
    task = classes("a", "b", "c")
    predicted, true = [p for p, _ in pairs], [t for _, t in pairs]
    whole = predict(task, predicted, true)
    merged = predict(task, predicted[:cut], true[:cut]) + predict(task, predicted[cut:], true[cut:])
    assert merged.to_dict() == whole.to_dict()
    assert score(task, merged) == score(task, whole)


@quick
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=9), min_size=3, max_size=3))
def test_counts_come_back_and_merge_in_any_order(batches):
    task = classes("a", "b", "c")
    a, b, c = (predict(task, [p for p, _ in pairs], [t for _, t in pairs]) for pairs in batches)
    again = [sums_from_dict(task, json.loads(json.dumps(part.to_dict()))) for part in (a, b, c)]
    assert [part.to_dict() for part in again] == [part.to_dict() for part in (a, b, c)]
    assert ((a + b) + c).to_dict() == (again[0] + (again[1] + again[2])).to_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"confusion": [[1, 2]], "loss": 0, "broken": 0},
        {"confusion": [[1, -2], [0, 0]], "loss": 0, "broken": 0},
        {"confusion": [[1, 2], [3]], "loss": 0, "broken": 0},
        {"confusion": "many", "loss": 0, "broken": 0},
        {"confusion": [[1, 0, 0], [0, 1, 0], [0, 0, 1]], "loss": 0, "broken": 0},
    ],
)
def test_a_wrong_confusion_is_refused(wrong):
    with pytest.raises(WireError):
        sums_from_dict(TWO, wrong)


@pytest.mark.parametrize(
    ("metric", "expected"),
    # Three of four are the second label: accuracy 3/4, F1 2 * 3 / (3 + 4), and no correlation.
    [("accuracy", 0.75), ("f1", 6 / 7), ("matthews", 0.0)],
)
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_commonest_class_has_a_score_in_every_metric(metric, expected, outputs):
    task = replace(TWO, metric=metric, outputs=outputs)
    assert constant_score(task, np.array([1, 1, 0, 1])) == pytest.approx(expected)
