from __future__ import annotations

from fedmtl import timing
from fedmtl.timing import Stopwatch, measuring, part, timed


def watch_of(*times: float) -> Stopwatch:
    given = iter(times)
    return Stopwatch(lambda: next(given))


@timed("inner")
def inner() -> str:
    return "done"


def test_every_moment_is_counted_once():
    watch = watch_of(0.0, 1.0, 4.0, 10.0)
    with measuring(watch), part("outer"):
        assert inner() == "done"
    # outer from 0 to 10, inner from 1 to 4.
    assert watch.take() == {"inner": 3.0, "outer": 7.0}
    assert watch.take() == {}


def test_a_whole_one_keeps_what_is_inside():
    watch = watch_of(0.0, 10.0)
    with measuring(watch), part("outer", whole=True):
        inner()
    assert watch.take() == {"outer": 10.0}


def test_nothing_is_counted_where_nobody_measures():
    with part("outer"):
        assert inner() == "done"
    assert timing._active is None


def test_a_stopwatch_inside_another_counts_alone_and_gives_back():
    first, second = watch_of(0.0, 8.0), watch_of(1.0, 3.0)
    with measuring(first), part("server"):
        with measuring(second):
            inner()
        assert timing._active is first
    assert (first.take(), second.take()) == ({"server": 8.0}, {"inner": 2.0})
