import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.model.vocabulary import compact_ids, put_rows, take_rows, used_rows


def test_a_slice_holds_the_used_the_lowest_and_the_padding_row():
    rows = used_rows([np.array([40, 12, 40]), np.array([9])], pad_id=50)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 40, 50]
    assert rows.dtype == np.int64


def test_a_token_outside_the_slice_points_past_its_end():
    index = compact_ids(np.array([0, 1, 4]), 6)
    assert index.tolist() == [0, 1, 3, 3, 2, 3]
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(torch.tensor([index[2]]), torch.ones(3, 2))


@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_taking_rows_and_putting_them_back_is_the_identity(drawn):
    size, chosen = drawn
    rows = np.array(sorted(chosen), dtype=np.int64)
    table = torch.arange(3.0 * size).reshape(size, 3)
    taken = take_rows(table, rows)
    assert torch.equal(put_rows(rows, taken, table), table)
    # Into another table, the slice's rows arrive and only those.
    other = put_rows(rows, taken, torch.zeros(size, 3) - 1)
    assert torch.equal(other[rows], table[rows])
    assert (other == -1).all(1).sum() == size - len(rows)
    # A token's row in the slice is its row in the table.
    index = compact_ids(rows, size)
    assert all(torch.equal(taken[index[row]], table[row]) for row in rows)


def test_putting_rows_leaves_the_given_table_alone():
    table = torch.zeros(3, 1)
    put_rows(np.array([1]), torch.ones(1, 1), table)
    assert table.sum() == 0
