"""How a contestant tells the harness what it did: lines on stdout that begin with a mark."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType

MARK = "@bench "
FIRST = "FEDMTL_BENCH_FIRST"


def tell(what: str, **fields: object) -> None:
    print(MARK + json.dumps({"what": what, **fields}), flush=True)


def tell_first_batch() -> None:
    """Note when the first batch was made, in whichever process; later ones change nothing."""
    path = os.environ.pop(FIRST, None)
    if path is not None:
        try:
            with Path(path).open("x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return


class Round:
    """Times one round and tells of it; `samples` and `megabytes` (both ways, of all clients) are set inside."""

    def __init__(self, number: int) -> None:
        self.number, self.samples = number, 0
        self.megabytes: float | None = None

    def __enter__(self) -> Round:
        if self.number == 1:
            tell("begin")
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            seconds = time.perf_counter() - self._started
            tell("round", round=self.number, seconds=seconds, samples=self.samples, megabytes=self.megabytes)
