"""What a measuring process knows of itself."""

from fedmtl.compress.measure.process import peak_bytes, timed_task, waiting_share
from model.tiny import make_task


def test_waiting_is_the_share_of_the_time_that_a_core_was_wanted():
    # 9 + 6 had, 1 + 4 waited: 5 of 20.
    assert waiting_share([(9, 1), (6, 4)]) == 0.25
    assert waiting_share([]) is None


def test_memory_at_its_peak_does_not_fall():
    block = bytearray(b"x") * (64 << 20)
    during = peak_bytes()
    assert during > len(block)
    del block
    # The kernel counts in batches, so the last megabyte is not exact.
    assert peak_bytes() > during - (8 << 20)


def test_the_first_task_of_one_sequence_is_timed():
    dual = make_task("dual", text=("a", "b"), pair="dual")
    single = make_task("single")
    assert timed_task({"dual": dual, "single": single}) == single
    assert timed_task({"dual": dual}) == dual
