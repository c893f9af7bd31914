"""The engine for a GPU: clients of one machine that train several at a time.

As in `engines/local.py`, all that would cross a network is encoded and decoded. Jobs that cannot be stacked, and the
scoring, are that engine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from fedmtl.engines.local import LocalEngine, OpenJob
from fedmtl.engines.processes import too_late
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.errors import FedmtlError
from fedmtl.federation.client_stack import run_stack, stack_label
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, State, Update
from fedmtl.federation.wire import decode_job, encode_job, encode_update
from fedmtl.timing import part
from fedmtl.training.stacked.loop import Stacks

THREADS = 8


class StackedEngine:
    """Runs clients on this machine, `at_once` of them in one computation, in the given dtype."""

    def __init__(
        self, setup: SiteSetup, clients: Mapping[ClientId, ClientInfo], at_once: int, dtype: torch.dtype
    ) -> None:
        self._setup, self._at_once = setup, at_once
        self._alone = LocalEngine(setup, clients, num_workers=0)
        self._site = open_site(replace(setup, device="cpu"))
        self._stacks = Stacks(self._site.model, torch.device(setup.device), dtype)
        self._threads = ThreadPoolExecutor(THREADS)

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        return self._alone.clients()

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        ends = time.monotonic() + deadline
        coming = iter(jobs)
        while group := list(islice(coming, self._at_once)):
            if time.monotonic() >= ends:
                yield from (Failure(job.round, job.client, too_late(deadline)) for job in group)
                continue
            stacks: dict[str, list[Job]] = {}
            alone: list[Job] = []
            for job in group:
                label = stack_label(job, self._site)
                (alone if label is None else stacks.setdefault(label, [])).append(job)
            for stack in stacks.values():
                yield from self._run_stack(stack, alone)
            yield from self._alone.run(alone, max(0.0, ends - time.monotonic()))

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        return self._alone.predict(state, batch_size)

    def close(self) -> None:
        self._threads.shutdown()
        self._alone.close()

    def _run_stack(self, jobs: Sequence[Job], alone: list[Job]) -> Iterator[Update | Failure]:
        """Yield the updates of jobs that fit a stack, and add the others to `alone`."""
        limit = self._setup.max_bytes
        encoded = list(self._threads.map(lambda job: encode_job(job, limit), jobs))
        received = list(self._threads.map(lambda data: decode_job(data, limit), encoded))
        with part("training at once", whole=True):
            answers = run_stack(received, self._site, self._stacks, self._threads)
        for job, data, answer in zip(jobs, encoded, self._threads.map(_sent, answers), strict=True):
            if answer is None:
                alone.append(job)
                continue
            open_job = OpenJob.of(job, len(data))
            yield open_job.failed(str(answer)) if isinstance(answer, FedmtlError) else open_job.take(answer, limit)


def _sent(answer: Update | FedmtlError | None) -> np.ndarray | FedmtlError | None:
    if not isinstance(answer, Update):
        return answer
    try:
        return encode_update(answer)
    except Exception as error:
        # Whatever a filter made of one client's update costs that client alone, as it does in a worker.
        return FedmtlError(str(error) if isinstance(error, FedmtlError) else f"{type(error).__name__}: {error}")
