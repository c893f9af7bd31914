"""Ctrl-C and SIGTERM as exceptions. Loads no numeric library."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
# Until what swallowed an exception has returned.
AGAIN_SECONDS = 0.05


class Signals:
    """The signals of a block: they can wait while something is done that must be whole."""

    def __init__(self) -> None:
        self.is_postponed = False
        self.waiting: BaseException | None = None

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """A first signal inside this block is raised at its end; a second one does what it did before `raised`."""
        self.is_postponed = True
        try:
            yield
        finally:
            self.is_postponed = False
        if self.waiting is not None:
            raise self.waiting


@contextmanager
def raised(make: Callable[[int], BaseException]) -> Iterator[Signals]:
    """Inside the block, Ctrl-C and SIGTERM raise `make(number)`; a second signal does what it did before the block.

    Python drops an exception that is raised while an object is being deleted; then it is raised again soon after.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    given: BaseException | None = None
    timer: threading.Timer | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal given, timer
        for each in ENDING:
            signal.signal(each, before[each])
        given = make(number)
        if signals.is_postponed:
            signals.waiting = given
            return
        timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        raise given

    def dropped(what: Any) -> None:
        if timer is None or what.exc_value is not given:
            hook(what)
            return
        for each in ENDING:
            signal.signal(each, stop)
        timer.start()

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield signals
    finally:
        if timer is not None:
            timer.cancel()
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)
