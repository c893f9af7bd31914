import pytest

from fedmtl.study.pace import Paced, seconds_left

WAITING = Paced(work=2.0, share=0.0, seconds=0.0)


def test_nothing_is_known_before_something_was_measured():
    assert seconds_left([WAITING, WAITING], at_once=1) is None
    # begun a moment ago, and finished by an earlier call: neither tells a pace
    assert seconds_left([Paced(2.0, 0.05, 9.0), Paced(2.0, 1.0, 0.0), WAITING], at_once=1) is None


def test_work_that_is_left_goes_at_the_pace_of_what_was_measured():
    # 2 + 4 units in 5 + 13 s: 3 s a unit; left are 2 + 2
    cells = [Paced(2.0, 1.0, 5.0), Paced(4.0, 1.0, 13.0), WAITING, WAITING]
    assert seconds_left(cells, at_once=1) == pytest.approx(12.0)
    assert seconds_left(cells, at_once=2) == pytest.approx(6.0)


def test_an_open_cell_counts_by_its_share():
    # half of 4 units in 6 s: 3 s a unit; its other half and 2 units wait
    assert seconds_left([Paced(4.0, 0.5, 6.0), WAITING], at_once=1) == pytest.approx(12.0)


def test_many_processes_do_not_make_one_cell_faster():
    # 1 unit in 1 s; 6 units are left in one cell
    assert seconds_left([Paced(1.0, 1.0, 1.0), Paced(6.0, 0.0, 0.0)], at_once=8) == pytest.approx(6.0)


def test_when_all_is_done_nothing_is_left():
    assert seconds_left([Paced(1.0, 1.0, 1.0)], at_once=2) == 0.0
