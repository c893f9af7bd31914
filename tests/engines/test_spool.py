import numpy as np
import pytest

from fedmtl.engines.local import Spool, map_message, write_message
from fedmtl.errors import FedmtlError


def message(text):
    return np.frombuffer(text, dtype=np.uint8)


def test_a_file_is_used_again_once_it_was_given_back_and_not_before(tmp_path):
    spool = Spool(tmp_path / "spool")
    first, second = spool.take(), spool.take()
    assert first != second
    spool.give_back(first)
    assert spool.take() == first
    assert spool.take() not in (first, second)


def test_a_message_is_whole_after_a_longer_one(tmp_path):
    path = tmp_path / "message"
    for text in (b"a long message", b"short", b"a longer message than both"):
        write_message(path, message(text))
        assert map_message(path).tobytes() == text


def test_writing_to_a_mapped_message_changes_no_file(tmp_path):
    write_message(tmp_path / "message", message(b"abc"))
    mapped = map_message(tmp_path / "message")
    mapped[0] = 0
    assert (tmp_path / "message").read_bytes() == b"abc"


def test_a_spool_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(FedmtlError, match="cannot be written"):
        write_message(tmp_path / "gone" / "message", message(b"abc"))


def test_a_spool_shares_no_file_with_that_of_a_run_that_was_killed(tmp_path):
    old = Spool(tmp_path).take()
    write_message(old, message(b"half an answ"))
    spool = Spool(tmp_path)
    assert not old.exists()
    assert spool.take() != old
