"""Where seconds go: parts of the work have a label, and are counted while somebody measures.

`@timed("averaging")` marks a function and `with part("encoding"):` a piece of one. What nobody measures costs a
comparison with None. Loads no numeric library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Stopwatch:
    """Seconds by label, every moment counted once: what is timed inside something else is taken from it.

    A part that is `whole` keeps what is timed inside it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._is_whole = False

    @contextmanager
    def part(self, label: str, whole: bool = False) -> Iterator[None]:
        if self._is_whole:
            yield
            return
        self._is_whole = whole
        self._inner.append(0.0)
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            self._is_whole = False
            self._seconds[label] = self._seconds.get(label, 0.0) + spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def take(self) -> dict[str, float]:
        """Return the seconds by label since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


_active: Stopwatch | None = None


@contextmanager
def measuring(watch: Stopwatch) -> Iterator[None]:
    """Count the parts of this process with a stopwatch, until the end of the block; the one before goes on then."""
    global _active
    before, _active = _active, watch
    try:
        yield
    finally:
        _active = before


@contextmanager
def part(label: str, *, whole: bool = False) -> Iterator[None]:
    """A piece of work with a label."""
    if _active is None:
        yield
        return
    with _active.part(label, whole):
        yield


def timed(label: str, *, whole: bool = False) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A function whose calls are a part of the work."""

    def wrap(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*args: Given.args, **options: Given.kwargs) -> Result:
            if _active is None:
                return function(*args, **options)
            with _active.part(label, whole):
                return function(*args, **options)

        return call

    return wrap
