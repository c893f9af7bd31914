"""Ctrl-C and SIGTERM as exceptions. Loads no numeric library."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raised(make: Callable[[int], BaseException]) -> Iterator[None]:
    """Raise what `make` makes of the signal's number, between two instructions; a second signal is the system's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, before[each])
        raise make(number)

    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
