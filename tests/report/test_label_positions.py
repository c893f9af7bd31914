"""Names beside dots."""

import itertools

from fedmtl.report.variants_plot import Box, Dot, position_labels

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
