import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.sharing.plan import compact_ids, take_rows, used_rows


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
def test_a_tokens_row_in_the_slice_is_its_row_in_the_table(drawn):
    size, chosen = drawn
    rows = np.array(sorted(chosen), dtype=np.int64)
    table = torch.arange(3.0 * size).reshape(size, 3)
    taken = take_rows(table, rows)
    assert len(taken) == len(rows)
    index = compact_ids(rows, size)
    assert all(torch.equal(taken[index[row]], table[row]) for row in rows)
