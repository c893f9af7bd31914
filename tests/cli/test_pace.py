from __future__ import annotations

from fedmtl.cli.display import Pace
from fedmtl.runs.events import AnswerEvent, RoundEvent, StartEvent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_follow_the_rounds():
    clock = Clock()
    pace = Pace(clock)
    pace.see(StartEvent(num_rounds=5))
    pace.see(RoundEvent(round=0, seconds=9.0, samples=0))
    assert pace.words() == ""
    clock.now = 2.0
    pace.see(AnswerEvent(round=1, client="a", samples=300))
    assert pace.words() == "150 samples/s"
    clock.now = 4.0
    pace.see(RoundEvent(round=1, seconds=4.0, samples=600))
    # Four rounds of four seconds are left.
    assert pace.words() == "150 samples/s, 16.0 s left"
    clock.now = 5.0
    pace.see(AnswerEvent(round=1, client="a", samples=600))
    # A quarter of a round says too little for another rate; a second of it has passed.
    assert pace.words() == "150 samples/s, 15.0 s left"
    clock.now = 7.0
    pace.see(AnswerEvent(round=1, client="a", samples=300))
    assert pace.words() == "300 samples/s, 13.0 s left"


def test_a_late_round_does_not_count_into_the_next():
    clock = Clock()
    pace = Pace(clock)
    pace.see(StartEvent(num_rounds=2))
    pace.see(RoundEvent(round=1, seconds=3.0, samples=30))
    clock.now = 100.0
    assert pace.seconds_left == 0.0
    pace.see(RoundEvent(round=2, seconds=5.0, samples=50))
    assert pace.words() == "10 samples/s"
