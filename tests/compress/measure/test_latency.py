"""Turns, blocks, and what seconds come to."""

import pytest

from fedmtl.compress.measure.costs import interleave, time_block, timing


def test_all_blocks_alternate_and_make_as_many_passes():
    asked = []

    def block(name):
        return lambda passes: asked.append((name, passes)) or [1.0] * passes

    *_, taken = interleave([block("a"), block("b")], 5, block=2)
    assert [len(own) for own in taken] == [5, 5]
    # Two to warm up, then 2, 2 and 1 in turns.
    assert asked == [("a", 2), ("b", 2), ("a", 2), ("b", 2), ("a", 2), ("b", 2), ("a", 1), ("b", 1)]


def test_the_first_pass_of_a_block_is_not_counted():
    calls = []
    assert len(time_block(lambda: calls.append(0), 3)) == 3
    assert len(calls) == 4


def test_a_timing_is_median_percentile_and_throughput():
    made = timing(2, [0.1, 0.2, 0.3, 0.4, 1.0], batch=8)
    assert (made.threads, made.median) == (2, 0.3)
    # Between the fourth and the fifth of five, at 0.95 * 4 = 3.8: 0.4 + 0.8 * 0.6.
    assert made.p95 == pytest.approx(0.88)
    # 5 passes of 8 in 2 seconds.
    assert made.per_second == pytest.approx(20)
