import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.federation.wire.frame import WIDTH, checksum

ROW = 8 * WIDTH
BODY = np.random.Generator(np.random.PCG64(0)).bytes(3 * ROW + 20)


def test_a_small_message_is_summed_byte_for_byte():
    assert checksum(b"head", BODY[:100]) == zlib.crc32(b"head" + BODY[:100])


def test_the_sums_of_columns_come_before_those_of_rows():
    # Two rows: the first of ones, the second of twos. Columns sum to 3, rows to 1024 and 2048.
    body = np.repeat(np.array([1, 2], dtype="<u8"), WIDTH).tobytes() + b"rest"
    sums = np.array([3] * WIDTH + [WIDTH, 2 * WIDTH], dtype="<u8").tobytes()
    assert checksum(b"head", body) == zlib.crc32(b"head" + sums + b"rest")


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(place, change):
    spoiled = bytearray(BODY)
    spoiled[place] ^= change
    assert checksum(b"", bytes(spoiled)) != checksum(b"", BODY)


@pytest.mark.parametrize("size", [8, 512, ROW])
def test_parts_that_changed_places_are_found(size):
    swapped = BODY[size : 2 * size] + BODY[:size] + BODY[2 * size :]
    assert checksum(b"", swapped) != checksum(b"", BODY)


def test_head_and_length_count():
    assert checksum(b"a", BODY) != checksum(b"b", BODY)
    assert checksum(b"", bytes(ROW)) != checksum(b"", bytes(2 * ROW))
