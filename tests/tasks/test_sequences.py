"""Lists of rows are indexed by example as arrays are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.tasks.batches import join_rows
from fedmtl.tasks.metrics import _finite
from fedmtl.tasks.sequences import Sequences
from tasks.kinds.small_tasks import quick

lists = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


def unpacked(rows):
    return [row.tolist() for row in rows]


@quick
@given(lists, st.data())
def test_rows_are_picked_as_a_list_of_lists_would_be(given_lists, data):
    rows = Sequences.of(given_lists, np.int64)
    assert unpacked(rows) == given_lists
    assert len(rows) == len(given_lists)
    at = data.draw(st.lists(st.sampled_from(range(len(given_lists))), max_size=8)) if given_lists else []
    assert unpacked(rows[np.array(at, dtype=np.int64)]) == [given_lists[n] for n in at]
    assert unpacked(rows[1:3]) == given_lists[1:3]
    mask = np.array([len(each) > 1 for each in given_lists], dtype=bool)
    assert unpacked(rows[mask]) == [each for each in given_lists if len(each) > 1]
    for n in range(len(given_lists)):
        assert rows[n].tolist() == given_lists[n]


@quick
@given(st.lists(lists, min_size=1, max_size=3))
def test_joined_parts_are_one_after_the_other(parts):
    joined = join_rows([Sequences.of(part, np.int64) for part in parts])
    assert unpacked(joined) == [each for part in parts for each in part]
    assert joined.owners().tolist() == [n for n, each in enumerate(unpacked(joined)) for _ in each]


def test_two_sets_with_the_same_values_in_other_lists_have_other_bytes():
    assert Sequences.of([[1], [2, 3]], np.int64).tobytes() != Sequences.of([[1, 2], [3]], np.int64).tobytes()


def test_examples_are_finite_where_all_of_their_rows_are():
    rows = Sequences(np.array([[0.0], [np.nan], [1.0]]), np.array([0, 2, 2, 3]))
    assert _finite(rows).tolist() == [False, True, True]
    assert _finite(np.array([[0.0], [np.inf]])).tolist() == [True, False]


def test_other_rows_must_be_as_many():
    with pytest.raises(AssertionError, match="one row for each"):
        Sequences.of([[1]], np.int64).with_values(np.zeros(2))
