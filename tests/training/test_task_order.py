import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.training.task_order import alternate


def batches(**counts: int) -> dict[str, list[np.ndarray]]:
    return {task: [np.array([number]) for number in range(count)] for task, count in counts.items()}


def order(**counts: int) -> str:
    return "".join(task for task, _ in alternate(batches(**counts)))


def test_equal_tasks_take_turns():
    assert order(b=3, a=3) == "ababab"
    assert order(a=2, b=2, c=2) == "abcabc"


def test_a_small_task_is_spread_over_the_epoch():
    # Three to one: the one batch of b stands in the middle of every four; 6 to 2 is that twice.
    assert order(a=3, b=1) == "aaba"
    assert order(a=6, b=2) == "aabaaaba"
    assert order(a=1, b=3) == "babb"


def test_a_task_without_batches_is_left_out():
    assert order(a=2, b=0) == "aa"
    assert order() == ""


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20), max_size=5))
def test_every_batch_comes_once_in_its_own_order_and_evenly(counts):
    steps = alternate(batches(**counts))
    for task, count in counts.items():
        places = [place for place, (name, _) in enumerate(steps) if name == task]
        assert [int(batch[0]) for name, batch in steps if name == task] == list(range(count))
        # After any part of the epoch, each task has done that part of its batches, to within one per task.
        for number, place in enumerate(places):
            assert abs((number + 0.5) / count - (place + 0.5) / len(steps)) <= len(counts) / len(steps)
    assert len(steps) == sum(counts.values())
