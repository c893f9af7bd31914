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


@contextmanager
def raised(make: Callable[[int], BaseException]) -> Iterator[Callable[[], None]]:
    """Inside the block, Ctrl-C and SIGTERM raise `make(number)`; a second signal does what it did before the block.

    Python drops an exception that is raised while an object is being deleted; then it is raised again soon after.
    Compiled code may make an error of another kind of it: an error that leaves the block after a signal becomes
    `make(number)`, and the function that the block gets raises it where such an error was handled on the way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    given: BaseException | None = None
    timer: threading.Timer | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal given, timer
        for each in ENDING:
            signal.signal(each, before[each])
        given = make(number)
        timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        raise given

    def dropped(what: Any) -> None:
        if timer is None or what.exc_value is not given:
            hook(what)
            return
        for each in ENDING:
            signal.signal(each, stop)
        timer.start()

    def check() -> None:
        if given is not None:
            raise given

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield check
    except Exception as other:
        if given is None:
            raise
        raise given from other
    finally:
        if timer is not None:
            timer.cancel()
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)
