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
    """The signals of a block. They can wait while something is done that must be whole."""

    def __init__(self) -> None:
        self.given: BaseException | None = None
        self.is_postponed = False

    def check(self) -> None:
        """Raise what a signal has raised already, where code on the way may have made another error of it."""
        if self.given is not None:
            raise self.given

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """A first signal inside this block is raised at its end; a second one does what it did before `raised`."""
        self.is_postponed = True
        try:
            yield
        finally:
            self.is_postponed = False
        self.check()


@contextmanager
def raised(make: Callable[[int], BaseException]) -> Iterator[Signals]:
    """Inside the block, Ctrl-C and SIGTERM raise `make(number)`; a second signal does what it did before the block.

    Python drops an exception that is raised while an object is being deleted; then it is raised again soon after.
    Compiled code may make an error of another kind of it: an error that leaves the block after a signal becomes
    `make(number)`, and `check` raises it where such an error was handled on the way.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    timer: threading.Timer | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal timer
        for each in ENDING:
            signal.signal(each, before[each])
        signals.given = make(number)
        if not signals.is_postponed:
            timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
            raise signals.given

    def dropped(what: Any) -> None:
        if timer is None or what.exc_value is not signals.given:
            hook(what)
            return
        for each in ENDING:
            signal.signal(each, stop)
        timer.start()

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield signals
    except Exception as other:
        if signals.given is None:
            raise
        raise signals.given from other
    finally:
        if timer is not None:
            timer.cancel()
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)
