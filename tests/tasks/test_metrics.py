"""Metrics against scikit-learn and scipy, and sums that merge to the whole however the data is split."""

import json
import math
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmtl.errors import WireError
from fedmtl.runs.event_lines import to_json, to_line
from fedmtl.runs.results import METRICS
from fedmtl.tasks.metrics import (
    ClassificationSums,
    RegressionSums,
    Scores,
    averages,
    constant_score,
    evaluation_event,
    score,
    sum_predictions,
    sums_from_dict,
)
from fedmtl.tasks.task import Task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sklearn.metrics as reference

quick = settings(deadline=None, max_examples=60)


def classes(*labels, **fields):
    return Task("own", "classification", ("text",), "label", "accuracy", labels=labels, **fields)


TWO = classes("no", "yes")
STSB = Task("stsb", "regression", ("a", "b"), "score", "pearson", score_range=(0.0, 5.0), outputs=1)


def confusion(task, table, loss=0.0):
    return score(task, ClassificationSums(np.array(table, dtype=np.int64), loss))


def predict(task, predicted, true):
    """Sums of a classifier that was sure of every prediction."""
    logits = np.eye(len(task.labels))[np.array(predicted, dtype=int)]
    return sum_predictions(task, logits, np.array(true, dtype=int), loss=float(len(true)))


def regress(predictions, scores, keep_pairs=True, task=STSB):
    """Sums of predictions and scores given in the score's own units."""
    low, high = task.score_range
    scaled = [(np.array(values, dtype=float) - low) / (high - low) for values in (predictions, scores)]
    return sum_predictions(task, scaled[0][:, None], scaled[1], loss=0.0, keep_pairs=keep_pairs)


class TestClassification:
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


class TestRegression:
    def test_worked_by_hand_in_the_scores_units(self):
        # residuals 1, 0, -1: squares 2, absolutes 2; labels 1, 2, 3 spread 2 about their mean
        scores = score(STSB, regress([2, 2, 2.0], [1, 2, 3]))
        assert scores.metrics["mse"] == pytest.approx(2 / 3)
        assert scores.metrics["rmse"] == pytest.approx(math.sqrt(2 / 3))
        assert scores.metrics["mae"] == pytest.approx(2 / 3)
        assert scores.metrics["r2"] == pytest.approx(0.0)
        assert scores.undefined["pearson"] == "all predictions are equal"
        assert scores.marked == "no better than the mean prediction"

    def test_agrees_with_scipy_and_scikit_learn(self):
        random = np.random.default_rng(0)
        scores = random.integers(0, 26, 200) / 5
        predictions = np.round(scores + random.normal(0, 1, 200), 1)
        metrics = score(STSB, regress(predictions, scores)).metrics
        assert metrics["pearson"] == pytest.approx(stats.pearsonr(predictions, scores).statistic)
        assert metrics["spearman"] == pytest.approx(stats.spearmanr(predictions, scores).statistic)
        assert metrics["mse"] == pytest.approx(reference.mean_squared_error(scores, predictions))
        assert metrics["rmse"] == pytest.approx(reference.root_mean_squared_error(scores, predictions))
        assert metrics["mae"] == pytest.approx(reference.mean_absolute_error(scores, predictions))
        assert metrics["r2"] == pytest.approx(reference.r2_score(scores, predictions))

    def test_a_range_far_from_zero_keeps_its_digits(self):
        # Raw sums of squares of 1e9 leave nothing of a spread of 1.
        task = Task("year", "regression", ("a",), "score", "pearson", score_range=(1e9, 1e9 + 1))
        random = np.random.default_rng(0)
        labels = random.random(100)
        outputs = labels + random.normal(0, 0.1, 100)
        expected = stats.pearsonr(outputs, labels).statistic
        parts = [sum_predictions(task, outputs[i : i + 10, None], labels[i : i + 10], 0.0) for i in range(0, 100, 10)]
        assert score(task, sum(parts[1:], parts[0])).metrics["pearson"] == pytest.approx(expected, abs=1e-6)

    def test_spearman_without_pairs_says_what_to_set(self):
        scores = score(STSB, regress([1, 2, 3], [1, 3, 4], keep_pairs=False))
        assert scores.metrics["spearman"] is None
        assert scores.undefined["spearman"] == ("needs pairs of prediction and label; set evaluation.share_pairs")
        assert scores.metrics["pearson"] is not None

    def test_predictions_that_differ_by_rounding_are_constant(self):
        noise = np.array([0, 1e-7, 2e-7])
        assert score(STSB, regress(2.5 + noise, [1, 2, 3])).metrics["pearson"] is None

    def test_constant_labels_are_undefined_where_they_divide(self):
        scores = score(STSB, regress([1, 2, 3], [2, 2, 2]))
        assert set(scores.undefined) == {"pearson", "spearman", "r2"}
        assert set(scores.undefined.values()) == {"all labels are equal"}

    def test_no_examples_is_undefined_and_never_0(self):
        scores = score(STSB, regress([], []))
        assert set(scores.metrics.values()) == {None}
        assert set(scores.undefined.values()) == {"no examples"}

    def test_predictions_off_in_scale_alone_are_not_called_no_better_than_the_mean(self):
        scores = score(STSB, regress([4.0, 4.2, 4.4, 4.6], [0, 1, 2, 3]))
        # perfectly in order, but three points too high: r2 says so, Pearson does not
        assert scores.metrics["pearson"] == pytest.approx(1.0)
        assert scores.metrics["r2"] < 0
        assert scores.marked is None

    def test_a_good_model_is_not_marked(self):
        assert score(STSB, regress([1.1, 2, 2.9], [1, 2, 3])).marked is None
        assert score(STSB, regress([3, 2, 1], [1, 2, 3])).marked == "no better than the mean prediction"

    def test_residuals_are_counted_in_21_edges_over_the_range_both_ways(self):
        residuals = evaluation_event(1, STSB, regress([5, 0, 2.6, 20], [0, 5, 2.5, 0])).residuals
        edges, counts = residuals.edges, residuals.counts
        assert (len(edges), edges[0], edges[10], edges[-1]) == (21, -5.0, 0.0, 5.0)
        # -5 is in the first bin, 0.1 in the one from 0 to 0.5, 5 and 20 in the last
        assert [counts[0], counts[10], counts[-1], sum(counts)] == [1, 1, 2, 4]

    def test_predictions_that_are_not_finite_undefine_everything(self):
        scores = score(STSB, regress([1, np.inf, 3], [1, 2, 3]))
        assert set(scores.metrics.values()) == {None}
        assert scores.undefined["mse"] == "1 of 3 predictions are not finite"
        assert scores.examples == 3


# Scores to two decimals, as people give them; predictions of any kind, also outside the range.
units = st.integers(0, 500).map(lambda hundredths: hundredths / 100)
# A little, far off, and no number at all.
far = st.floats(-5, 10) | st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf])
examples = st.lists(st.tuples(st.floats(-5, 10), units), min_size=0, max_size=30)


def assert_near(one, other):
    """Equal within 1e-9, undefined values exactly."""
    assert set(one) == set(other)
    for name, value in one.items():
        assert value == other[name] or value == pytest.approx(other[name], rel=1e-9, abs=1e-9), name


class TestMerging:
    @quick
    @given(examples, st.lists(st.integers(0, 30), max_size=4))
    def test_any_split_of_a_regression_equals_the_whole(self, pairs, cuts):
        predictions, scores = np.array([p for p, _ in pairs]), np.array([s for _, s in pairs])
        whole = regress(predictions, scores)
        edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]
        parts = [regress(predictions[a:b], scores[a:b]) for a, b in pairwise(edges)]
        merged = sum(parts[1:], parts[0])
        assert merged.residuals.tolist() == whole.residuals.tolist()
        assert (merged.count, merged.range_prediction, merged.range_score) == (
            whole.count,
            whole.range_prediction,
            whole.range_score,
        )
        assert [part.tolist() for part in merged.pairs] == [part.tolist() for part in whole.pairs]
        assert_near(merged.moments(), whole.moments())
        one, other = score(STSB, whole), score(STSB, merged)
        assert one.undefined == other.undefined
        assert_near(one.metrics, other.metrics)

    @quick
    @given(st.tuples(examples, examples, examples))
    def test_the_order_of_merging_does_not_matter(self, parts):
        a, b, c = (regress([p for p, _ in pairs], [s for _, s in pairs]) for pairs in parts)
        left, right = (a + b) + c, a + (b + c)
        assert left.residuals.tolist() == right.residuals.tolist()
        assert_near(left.moments(), right.moments())

    @quick
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(0, 30))
    def test_any_split_of_a_classification_has_the_same_counts(self, pairs, cut):
        task = classes("a", "b", "c")
        predicted, true = [p for p, _ in pairs], [t for _, t in pairs]
        whole = predict(task, predicted, true)
        merged = predict(task, predicted[:cut], true[:cut]) + predict(task, predicted[cut:], true[cut:])
        assert merged.to_dict() == whole.to_dict()
        assert score(task, merged) == score(task, whole)

    def test_pairs_are_kept_only_if_every_part_has_them(self):
        with_pairs, without = regress([1, 2], [1, 2]), regress([3, 4], [3, 4], keep_pairs=False)
        nothing = regress([], [], keep_pairs=False)
        assert (with_pairs + without).pairs is None
        assert (nothing + with_pairs + nothing).pairs[0].tolist() == [1, 2]


class TestDictionaries:
    @pytest.mark.parametrize("keep_pairs", [True, False])
    def test_sums_come_back_bit_for_bit(self, keep_pairs):
        sums = regress([0.1, 2.7, 4.9], [0.3, 2, 5], keep_pairs)
        again = sums_from_dict(STSB, json.loads(json.dumps(sums.to_dict())))
        assert again.to_dict() == sums.to_dict()
        assert score(STSB, again) == score(STSB, sums)
        counts = predict(TWO, [0, 1, 1], [0, 0, 1])
        assert sums_from_dict(TWO, json.loads(json.dumps(counts.to_dict()))).to_dict() == counts.to_dict()

    @quick
    @given(st.lists(st.lists(st.tuples(far, units), max_size=12), min_size=1, max_size=3), st.booleans())
    def test_whatever_an_honest_client_merged_comes_back(self, batches, keep_pairs):
        # A model that diverged predicts anything, or nothing that is a number.
        parts = [regress([p for p, _ in pairs], [s for _, s in pairs], keep_pairs) for pairs in batches]
        sums = sum(parts[1:], parts[0])
        again = sums_from_dict(STSB, json.loads(json.dumps(sums.to_dict())))
        assert again.to_dict() == sums.to_dict()
        assert repr(score(STSB, again)) == repr(score(STSB, sums))

    @quick
    @given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=9), min_size=3, max_size=3))
    def test_counts_come_back_and_merge_in_any_order(self, batches):
        task = classes("a", "b", "c")
        a, b, c = (predict(task, [p for p, _ in pairs], [t for _, t in pairs]) for pairs in batches)
        again = [sums_from_dict(task, json.loads(json.dumps(part.to_dict()))) for part in (a, b, c)]
        assert [part.to_dict() for part in again] == [part.to_dict() for part in (a, b, c)]
        assert ((a + b) + c).to_dict() == (again[0] + (again[1] + again[2])).to_dict()

    def test_sums_of_nothing_come_back(self):
        assert RegressionSums.from_dict(regress([], []).to_dict()).count == 0

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
    def test_a_wrong_confusion_is_refused(self, wrong):
        with pytest.raises(WireError):
            sums_from_dict(TWO, wrong)

    @pytest.mark.parametrize(
        "change",
        [
            {"count": 2},
            {"residuals": [3]},
            {"pairs": [[1.0]]},
            {"range_score": None},
            {"spread_score": 0.0},
            {"mean_score": float("nan")},
            {"loss": None},
        ],
    )
    def test_wrong_moments_are_refused(self, change):
        with pytest.raises(WireError):
            sums_from_dict(STSB, regress([1, 2, 3], [1, 2, 4]).to_dict() | change)


def test_the_metrics_are_the_columns_of_the_results():
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


@pytest.mark.parametrize(
    ("metric", "expected"),
    # Three of four are the second label: accuracy 3/4, F1 2 * 3 / (3 + 4), and no correlation.
    [("accuracy", 0.75), ("f1", 6 / 7), ("matthews", 0.0)],
)
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_commonest_class_has_a_score_in_every_metric(metric, expected, outputs):
    task = replace(TWO, metric=metric, outputs=outputs)
    assert constant_score(task, np.array([1, 1, 0, 1])) == pytest.approx(expected)
