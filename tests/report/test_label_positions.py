"""Names beside dots."""

import itertools
import math

import pytest

from fedmtl.report.charts import Frame
from fedmtl.report.variants_plot import Box, Dot, log_marks, position_labels

INSIDE = Box(40, 10, 700, 360)


def boxes_of(dots):
    return [Box(dot.x - dot.radius, dot.y - dot.radius, dot.x + dot.radius, dot.y + dot.radius) for dot in dots]


def test_a_lone_name_stands_to_the_right_unless_the_edge_is_there():
    (box,) = position_labels([Dot(100, 100, 5, "name")], INSIDE)
    assert box.left == 109
    (box,) = position_labels([Dot(690, 100, 5, "name")], INSIDE)
    assert box.right == 681


def test_names_of_a_crowd_lie_on_no_name_and_on_no_dot():
    dots = [Dot(300 + 12 * n, 200 + 3 * (n % 3), 6, f"teacher-2x128/kind{n}") for n in range(8)]
    labels = position_labels(dots, INSIDE)
    for one, other in itertools.combinations(labels, 2):
        assert one.overlap(other) == 0
    for label in labels:
        assert all(label.overlap(dot) == 0 for dot in boxes_of(dots))
        assert label.overlap(INSIDE) == label.area


@pytest.mark.parametrize("slowest", [1.02, 1.3, 1.9, 3.0, 40.0, 900.0])
@pytest.mark.parametrize("fastest", [0.031, 0.9, 2.2, 5.6])
def test_the_axis_of_latencies_has_several_marks_whatever_its_range(fastest, slowest):
    low, high = math.log10(fastest), math.log10(fastest * slowest)
    frame = Frame((low - 0.15, high + 0.15), (0.0, 1.0), 720, 400, 44, 24, 34, 38)
    marks = log_marks(frame)
    assert len(marks) >= 3
    assert marks == sorted(marks)
    assert all(low - 0.15 <= math.log10(at) <= high + 0.15 for at in marks)
    assert len({f"{at:.4g}" for at in marks}) == len(marks)
