import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.federation.wire.codecs import BITMAP, GAPS, decode_indices, encode_indices


@given(st.sets(st.integers(0, 2**34)), st.sets(st.integers(0, 400)))
def test_indices_come_back(far, near):
    for chosen in (far, near, far | near):
        indices = np.array(sorted(chosen), dtype=np.int64)
        assert decode_indices(encode_indices(indices), len(indices)).tolist() == indices.tolist()


def test_the_shorter_form_is_taken():
    # every second of 800 indices: 400 gaps of one byte, or 100 bytes of bits
    dense = encode_indices(np.arange(0, 800, 2))
    assert (dense[0], len(dense)) == (BITMAP, 101)
    # every hundredth: gaps of 99 fit seven bits, so 8 bytes
    sparse = encode_indices(np.arange(0, 800, 100))
    assert (sparse[0], len(sparse)) == (GAPS, 9)
    # 300 - 1 = 0b10_0101011: the lower seven bits with a mark that more follow, then 2
    assert encode_indices(np.array([0, 300])).tolist() == [GAPS, 0, 0b10101011, 2]


@given(st.binary(max_size=40), st.integers(0, 400), st.integers(0, 400))
def test_other_bytes_give_valid_indices_or_a_value_error(data, count, end):
    try:
        indices = decode_indices(np.frombuffer(data, dtype=np.uint8), count, end)
    except ValueError:
        return
    assert len(indices) == count
    assert count == 0 or (np.diff(indices, prepend=-1) > 0).all()
    assert count == 0 or indices[-1] < end


@pytest.mark.parametrize(
    ("data", "count", "reason"),
    [
        ([], 0, "cannot hold"),
        ([GAPS], 10**15, "cannot hold"),
        ([BITMAP] + [0] * 1000, 1, "cannot hold"),
        ([BITMAP, 0b11000000], 1, "2 indices came"),
        ([GAPS, 0x80], 1, "cut off"),
        ([GAPS, 0x80, 0x80, 0x80, 0x80, 0x80, 1], 2, "too many bytes"),
        ([GAPS, 50], 1, "past the end"),
        ([7, 1], 1, "unknown kind"),
    ],
)
def test_bad_bytes_are_named(data, count, reason):
    with pytest.raises(ValueError, match=reason):
        decode_indices(np.array(data, dtype=np.uint8), count, 50)
