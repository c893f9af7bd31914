"""What a profiled run says of every round: the seconds of the server and of its workers, by what they were spent on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmtl.engines.local import PROFILES
from fedmtl.runs.events import ProfileEvent
from fedmtl.timing import Stopwatch, measuring

ELSEWHERE = "elsewhere"


class Profile:
    """What the server and its workers spent, round by round."""

    def __init__(self, watch: Stopwatch, spool: Path) -> None:
        self._watch, self._spool = watch, spool
        self._last = time.perf_counter()

    def take(self, round_number: int) -> ProfileEvent:
        """The `profile` event of a round, from the one before to now; `clients` is summed over all workers."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        server = self._watch.take()
        server[ELSEWHERE] = max(0.0, seconds - sum(server.values()))
        clients: dict[str, float] = {}
        for path in self._spool.glob(PROFILES):
            for line in path.read_text().splitlines():
                for label, spent in json.loads(line).items():
                    clients[label] = clients.get(label, 0.0) + spent
            path.unlink()
        return ProfileEvent(round=round_number, seconds=seconds, server=server, clients=clients)


@contextmanager
def profiling(spool: Path) -> Iterator[Profile]:
    """Count what this process does; workers count what they do where their setup says so."""
    watch = Stopwatch()
    with measuring(watch):
        yield Profile(watch, spool)
