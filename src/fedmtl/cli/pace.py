"""How fast a run goes, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from fedmtl.cli.tables import duration

# The last rounds tell most: early ones start workers, and clients may join.
RECENT = 5


class Pace:
    """Follows a run's events; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_rounds = 0
        self._number = 0
        self._samples = 0
        self._opened = clock()
        self._seconds: list[float] = []
        self._rate: float | None = None

    def see(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._num_rounds = event.get("num_rounds", 0)
        elif kind == "answer":
            self._samples += event.get("samples", 0)
            spent = self._clock() - self._opened
            # A few answers say little: until half a round has passed, the last round's rate stands.
            if self._samples and spent > (self._seconds[-1] / 2 if self._seconds else 0):
                self._rate = self._samples / spent
        elif kind == "round":
            self._number = event["round"]
            if event.get("samples"):
                seconds = event.get("seconds", 0.0)
                self._seconds = [*self._seconds, seconds][-RECENT:]
                self._rate = event["samples"] / seconds if seconds > 0 else self._rate
            self._opened, self._samples = self._clock(), 0

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second of the round, with all that belongs to a round."""
        return self._rate

    @property
    def seconds_left(self) -> float | None:
        """None until a round of training has shown how long one takes."""
        if not self._seconds:
            return None
        one, left = median(self._seconds), self._num_rounds - self._number
        return max(0.0, one * left - min(one, self._clock() - self._opened))

    def words(self) -> str:
        """Both in words, as far as they are known."""
        parts = [] if self._rate is None else [f"{self._rate:,.0f} samples/s"]
        left = self.seconds_left
        if left is not None and self._number < self._num_rounds:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)
