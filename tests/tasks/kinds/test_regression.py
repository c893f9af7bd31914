"""Regressions: their losses, metrics against scipy, and sums that merge to the whole however the data is split."""

import json
import math
import warnings
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedmtl.errors import ModelError, WireError
from fedmtl.tasks.kinds.regression import RegressionSums
from fedmtl.tasks.metrics import evaluation_event, score, sum_predictions, sums_from_dict
from fedmtl.tasks.task import Task, read_tasks
from fedmtl.training.local import task_loss

from .small_tasks import STSB, quick, regress

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sklearn.metrics as reference


def test_a_regression_is_scored_with_the_squared_error():
    outputs, labels = torch.tensor([[0.5], [1.0]], dtype=torch.float64), torch.tensor([0.0, 0.25])
    assert STSB.kind_of.losses(STSB, outputs, labels).tolist() == [0.25, 0.5625]
    assert task_loss(STSB, outputs, labels).item() == 0.40625


def test_scores_diverge_by_the_squared_difference():
    assert STSB.kind_of.divergences(STSB, torch.tensor([[0.5], [1.0]]), torch.tensor([[0.0], [0.75]])).tolist() == [
        0.25,
        0.0625,
    ]


def test_losses_without_torch_are_the_same():
    outputs, labels = np.array([[0.5], [1.0]]), np.array([0.0, 0.25])
    assert STSB.kind_of.plain_losses(STSB, outputs, labels).tolist() == [0.25, 0.5625]


def test_an_answer_is_a_score_in_its_range():
    answer = STSB.kind_of.answer(STSB, np.array([0.5]))
    assert (answer.label, answer.score, dict(answer.probabilities)) == (None, 2.5, {})


def test_an_answer_beyond_the_range_is_its_end_and_is_scored_as_such():
    task = replace(STSB, score_range=(1.0, 5.0))
    answers = [task.kind_of.answer(task, np.array([output], dtype=np.float32)).score for output in (-0.3, 0.25, 1.4)]
    assert answers == [1.0, 2.0, 5.0]
    sums = sum_predictions(task, np.array([[-0.3], [0.25], [1.4]]), np.array([0.0, 0.25, 0.5]), 0.0)
    # Errors 0, 0 and 5 - 3.
    assert (sums.squared_error, sums.range_prediction) == (4.0, (1.0, 5.0))


def test_scores_have_no_class_weights_and_no_offsets():
    assert STSB.kind_of.class_weights(replace(STSB, class_weights="balanced"), np.array([0.3])) is None
    assert STSB.kind_of.label_offsets(STSB, np.array([0.3]), [1], 1.0) is None


@pytest.mark.parametrize("span", [(5.0, 0.0), (0.0, 1e31)])
def test_a_task_without_a_range_is_refused(span):
    with pytest.raises(ModelError, match="it has no range of scores"):
        read_tasks({"stsb": asdict(replace(STSB, score_range=span))}, "model", ModelError)


class TestMetrics:
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
        predictions = np.clip(np.round(scores + random.normal(0, 1, 200), 1), 0, 5)
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
        outputs = np.clip(labels + random.normal(0, 0.1, 100), 0, 1)
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

    @quick
    @given(st.lists(st.lists(st.tuples(far, units), max_size=12), min_size=1, max_size=3), st.booleans())
    def test_whatever_an_honest_client_merged_comes_back(self, batches, keep_pairs):
        # A model that diverged predicts anything, or nothing that is a number.
        parts = [regress([p for p, _ in pairs], [s for _, s in pairs], keep_pairs) for pairs in batches]
        sums = sum(parts[1:], parts[0])
        again = sums_from_dict(STSB, json.loads(json.dumps(sums.to_dict())))
        assert again.to_dict() == sums.to_dict()
        assert repr(score(STSB, again)) == repr(score(STSB, sums))

    def test_sums_of_nothing_come_back(self):
        assert RegressionSums.from_dict(regress([], []).to_dict()).count == 0

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
