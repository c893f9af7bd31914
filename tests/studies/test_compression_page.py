"""Numbers of tables, worked out by hand."""

import pytest

from fedmtl.compress.distill.settings import DistillSettings
from fedmtl_studies.compression_page import Known, make_table
from fedmtl_studies.compression_results import GLUE, Result, Size, Sizes, glue_average, slips
from fedmtl_studies.compression_setups import Shape, Shapes, setups

SHAPES = Shapes(Shape(6, 384))
METRICS = {"sst2": "accuracy", "cola": "matthews"}


def result(cell, sst2, cola, marked=(), zeros=None):
    return Result(
        cell, {"sst2": sst2, "cola": cola}, {}, dict.fromkeys(marked, "equals the majority class"), 100, 400, 1000, 0,
        2.0, "cpu", 1, f"sha-{cell}", zeros,
    )  # fmt: skip


def known(results):
    return Known(setups(SHAPES, list(METRICS), DistillSettings("")), METRICS, SHAPES, results)


def found(table):
    keys = [column.key for column in table.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in table.rows}


def test_retention_is_of_the_teacher_of_the_same_seed():
    results = {
        "teacher": {0: result("t0", 0.8, 0.5), 1: result("t1", 0.9, 0.4)},
        "2x128-top": {0: result("a", 0.6, 0.1), 1: result("b", 0.9, 0.1, ["cola"])},
    }
    rows = found(make_table(1, ["teacher", "2x128-top"], known(results), Sizes()))
    student = rows["2x128, top"]
    # .6 / .8 = .75 and .9 / .9 = 1; their mean .875, their sample deviation .25 / sqrt 2
    assert student["sst2_retention"].mean == pytest.approx(0.875)
    assert student["sst2_retention"].deviation == pytest.approx(0.25 / 2**0.5)
    # cola: .2 and .25; means over tasks .475 and .625
    assert student["mean_retention"].mean == pytest.approx(0.55)
    assert student["marked"] == "cola"
    assert rows["teacher"]["sst2_retention"] is None
    # theirs is recomputed: .906 / .924, .331 / .557
    assert rows["slides: TinyBERT4, no augmentation"]["sst2_retention"].mean == pytest.approx(0.98052, abs=1e-5)
    assert rows["slides: TinyBERT4, no augmentation"]["cola_retention"].mean == pytest.approx(0.59425, abs=1e-5)
    assert rows["paper: TinyBERT4"]["cola_matthews"].mean == 0.441


def test_the_glue_average_is_over_the_tasks_that_are_there():
    results = {
        "teacher": {0: result("t0", 0.8, 0.5), 1: result("t1", 0.9, 0.2)},
        "2x128-top": {0: result("a", 0.6, None)},
    }
    table = make_table(1, ["teacher", "2x128-top"], known(results), Sizes())
    assert "GLUE average of 2" in [column.name for column in table.columns]
    rows = found(table)
    # (.8 + .5) / 2 = .65 and (.9 + .2) / 2 = .55
    assert rows["teacher"]["glue_average"].mean == pytest.approx(0.6)
    assert rows["2x128, top"]["glue_average"] is None
    # of the same two tasks: (.926 + .441) / 2
    assert rows["paper: TinyBERT4"]["glue_average"].mean == pytest.approx(0.6835)
    assert rows["slides: TinyBERT4, no augmentation"]["glue_average"].mean == pytest.approx((0.906 + 0.331) / 2)


def test_all_eight_and_no_other_task_count():
    scores = {task: number / 10 for number, task in enumerate(GLUE)} | {"wnli": 1.0, "imdb": 1.0}
    # (0 + .1 + ... + .7) / 8
    assert glue_average(scores, [*GLUE, "wnli", "imdb"]) == pytest.approx(0.35)
    assert glue_average(scores, ["imdb", "sst2"]) is None


def test_a_teacher_that_scores_nothing_leaves_nothing():
    results = {"teacher": {0: result("t", 0.8, 0.0)}, "2x128-top": {0: result("a", 0.6, 0.1)}, "tiny": {0: None}}
    rows = found(make_table(1, ["2x128-top", "tiny"], known(results), Sizes()))
    assert rows["2x128, top"]["cola_retention"] is None
    assert rows["2x128, top"]["mean_retention"] is None
    assert rows["tiny, prediction alone"]["sst2_accuracy"] is None


def test_sparsity_is_shown_of_linear_layers_and_of_all_weights():
    results = {"teacher": {0: result("t", 0.8, 0.5)}, "prune-20": {0: result("p", 0.8, 0.5, zeros=(0.2, 0.06))}}
    row = found(make_table(5, ["prune-20"], known(results), Sizes()))["20% of linear weights"]
    assert (row["zeros_linear"].mean, row["zeros_all"].mean) == (0.2, 0.06)


def test_speed_is_beside_the_teacher_in_the_same_form():
    def size(setup, form, megabytes, seconds, cola):
        scores = {"sst2": 0.8, "cola": cola}
        return Size(setup, form, megabytes, megabytes, 100, 10, 5, seconds, seconds, 1 / seconds, scores)

    sizes = Sizes((
        size("teacher", "fedmtl", 100, 0.040, 0.5), size("teacher", "onnx", 80, 0.020, 0.5),
        size("teacher", "int8", 20, 0.010, 0.4), size("2x128-top", "onnx", 8, 0.001, 0.25),
    ))  # fmt: skip
    table = make_table(2, [], known({}), sizes)
    keys = [column.key for column in table.columns]
    rows = {(row[0], row[1]): dict(zip(keys, row, strict=True)) for row in table.rows}
    assert rows["2x128, top", "ONNX"]["speedup"].mean == pytest.approx(20)
    assert rows["2x128, top", "ONNX"]["size_share"].mean == pytest.approx(0.1)
    # sst2 1, cola .5
    assert rows["2x128, top", "ONNX"]["mean_retention"].mean == pytest.approx(0.75)
    # beside the float file: 20 / 80 and 20 / 10
    assert rows["teacher", "INT8 ONNX"]["size_share"].mean == pytest.approx(0.25)
    assert rows["teacher", "INT8 ONNX"]["speedup"].mean == pytest.approx(2)
    # the slides': 105.23 / 417.85, 2814.70 / 3436.46
    qdq = rows["slides: BERT-base, QDQ", "ONNX"]
    assert qdq["size_share"].mean == pytest.approx(0.2518, abs=1e-4)
    assert qdq["speedup"].mean == pytest.approx(0.819, abs=1e-3)


def test_the_slides_slips_are_named():
    # 83.9 + 71.1 + 90.9 + 93.4 + 52.8 + 85.2 + 87.5 + 67.0 = 631.8, the student's 611.6
    assert slips(1) == [
        "rte: the slides print a retention of 89.3%, their scores give 88.7%.",
        "BERT-base: the slides print a mean of 79.5%, the eight scores beside it give 78.97%.",
        "TinyBERT4: the slides print a mean of 77.0%, the eight scores beside it give 76.45%.",
    ]
    assert [line.partition(":")[0] for line in slips(2)] == ["BERT-base, QDQ", "BERT-base, QOperator"]
    assert "64.63%" in slips(2)[0]
    assert "is 25.2%" in slips(2)[0]
    assert slips(3) == []
