"""Where a round's seconds go: timers put around functions from outside, so that a run without them pays nothing."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from fedmtl.engines import local
from fedmtl.engines.local import start_worker
from fedmtl.engines.site import SiteSetup
from fedmtl.engines.worker import Handler
from fedmtl.runs.events import ProfileEvent

ELSEWHERE = "elsewhere"
FILES = "profile-*.jsonl"


@dataclass(frozen=True)
class Probe:
    """A function to time, under a label; a `whole` one keeps what is timed inside it for itself."""

    label: str
    module: str
    name: str
    whole: bool = False


SERVER = (
    Probe("cutting slices", "fedmtl.federation.dispatch", "Dispatch.job"),
    Probe("encoding", "fedmtl.engines.local", "encode_job"),
    Probe("sending", "fedmtl.engines.worker", "WorkerPool._feed"),
    Probe("waiting for clients", "fedmtl.engines.worker", "wait"),
    Probe("waiting for clients", "fedmtl.engines.worker", "_call"),
    Probe("receiving", "fedmtl.engines.worker", "WorkerPool._receive"),
    Probe("decoding", "fedmtl.engines.local", "LocalEngine._decode"),
    Probe("training at once", "fedmtl.engines.stacked", "run_stack"),
    Probe("checking", "fedmtl.federation.server", "refusal"),
    Probe("averaging", "fedmtl.federation.combine", "StreamingMean.add"),
    Probe("averaging", "fedmtl.federation.combine", "StreamingMean.result"),
    Probe("server optimizer", "fedmtl.federation.server", "server_step"),
    Probe("teaching", "fedmtl.experiment.server_distillation", "ServerDistillation.__call__", whole=True),
    Probe("evaluating", "fedmtl.federation.server", "_evaluated", whole=True),
    Probe("writing", "fedmtl.experiment.run", "_record", whole=True),
)

CLIENT = (
    Probe("decoding", "fedmtl.engines.local", "decode_job"),
    Probe("binding", "fedmtl.model.binding", "BoundModel.__init__"),
    Probe("batches", "fedmtl.training.local", "training_batches"),
    Probe("batches", "fedmtl.training.objective", "collate"),
    Probe("batches", "fedmtl.training.objective", "to_tensors"),
    Probe("forward and backward", "fedmtl.federation.client", "train"),
    Probe("optimizer", "fedmtl.training.optimizer", "FlatOptimizer.step"),
    Probe("optimizer", "fedmtl.training.optimizer", "FlatOptimizer.keep"),
    Probe("optimizer", "fedmtl.training.optimizer", "FlatOptimizer.join"),
    Probe("scoring", "fedmtl.federation.client", "predict", whole=True),
    Probe("scoring", "fedmtl.engines.local", "predict", whole=True),
    Probe("encoding", "fedmtl.engines.local", "encode_update"),
)


class Stopwatch:
    """Seconds by label, every moment counted once: what is timed inside something else is taken from it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._is_whole = False

    def around(self, label: str, function: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if self._is_whole:
                return function(*args, **options)
            self._is_whole = whole
            self._inner.append(0.0)
            started = self._clock()
            try:
                return function(*args, **options)
            finally:
                spent = self._clock() - started
                self._is_whole = False
                self._seconds[label] = self._seconds.get(label, 0.0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed

    def take(self) -> dict[str, float]:
        """What was counted since this was asked last."""
        taken, self._seconds = self._seconds, {}
        return taken


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
        for path in self._spool.glob(FILES):
            for line in path.read_text().splitlines():
                for label, spent in json.loads(line).items():
                    clients[label] = clients.get(label, 0.0) + spent
            path.unlink()
        return ProfileEvent(round=round_number, seconds=seconds, server=server, clients=clients)


@contextmanager
def profiling(spool: Path) -> Iterator[Profile]:
    """Time this process and the workers that an engine starts meanwhile."""
    watch = Stopwatch()
    with probing(SERVER, watch), _replaced(local, "start_worker", start_profiled_worker):
        yield Profile(watch, spool)


def start_profiled_worker(setup: SiteSetup) -> Handler:
    """A worker that writes what each call spent into the spool, where the server finds it."""
    watch, handle = Stopwatch(), start_worker(setup)
    timed = watch.around("other work", handle)
    path = setup.spool / FILES.replace("*", str(os.getpid()))

    def call(given: Any) -> Any:
        with probing(CLIENT, watch):
            answer = timed(given)
        with path.open("a") as file:
            file.write(json.dumps(watch.take()) + "\n")
        return answer

    return call


@contextmanager
def probing(probes: Sequence[Probe], watch: Stopwatch) -> Iterator[None]:
    """Time these functions until the end of the block."""
    with ExitStack() as stack:
        for probe in probes:
            owner, _, leaf = probe.name.rpartition(".")
            holder: Any = importlib.import_module(probe.module)
            holder = getattr(holder, owner) if owner else holder
            function = watch.around(probe.label, getattr(holder, leaf), probe.whole)
            stack.enter_context(_replaced(holder, leaf, function))
        yield


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
