"""The engine on one machine: clients run one after another in worker processes.

All that would cross a network is encoded and decoded here too, so bytes are true and the weights are the
same as with any other engine.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.engines.open_jobs import OpenJob, Spool, map_message, write_message
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.engines.worker import Answer, Handler, WorkerPool
from fedmtl.errors import CannotContinue
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, State, Update
from fedmtl.federation.wire import decode_job, encode_job, encode_update, pack, unpack
from fedmtl.federation.wire.frame import ReusedMemory
from fedmtl.model.binding import BoundModel
from fedmtl.sharing.plan import SharingPlan
from fedmtl.tasks.batches import Shard, sorted_batches
from fedmtl.tasks.tokens import open_tokens
from fedmtl.timing import Stopwatch, measuring, part, timed
from fedmtl.training.predict import predict

# Examples per scoring call: fixed, so that what is computed together does not depend on the workers.
CHUNK = 128
# What workers of a profiled run spent, by process.
PROFILES = "profile-*.jsonl"
UNLIMITED = 1e9


@dataclass(frozen=True)
class JobCall:
    """Do the Job in one file, and write the Update to the other."""

    job: Path
    answer: Path


@dataclass(frozen=True)
class PredictCall:
    """Score some examples of a task with the weights in a file."""

    weights: Path
    plan: SharingPlan
    task: str
    indices: np.ndarray
    batch_size: int


class LocalEngine:
    """Runs clients on this machine, in `num_workers` processes, or in this one where that is 0."""

    def __init__(self, setup: SiteSetup, clients: Mapping[ClientId, ClientInfo], num_workers: int) -> None:
        self._setup = setup
        self._clients = clients
        self._spool = Spool(setup.spool)
        self._memory = ReusedMemory()
        self._pool = WorkerPool(start_worker, setup, num_workers)
        # One thread wherever a client trains on a CPU, in this process too: sums then come out the same. Beside workers
        # that keep every core busy, a second thread is one that others wait for.
        self._threads = torch.get_num_threads() if num_workers or setup.device == "cpu" else None
        if self._threads is not None:
            torch.set_num_threads(1)

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        return self._clients

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        open_jobs: list[tuple[JobCall, OpenJob]] = []

        def calls() -> Iterator[JobCall]:
            for job in jobs:
                call = JobCall(self._spool.take(), self._spool.take())
                with part("encoding"):
                    encoded = encode_job(job, self._setup.max_bytes, self._memory)
                write_message(call.job, encoded)
                open_jobs.append((call, OpenJob.of(job, len(encoded))))
                yield call

        for answer in self._pool.map(calls(), deadline):
            call, open_job = open_jobs[answer.ticket]
            self._spool.give_back(call.job)
            yield self._decode(answer, call.answer, open_job)

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        """Return every task's outputs for the server's validation examples, in their order, and the summed loss."""
        shards = self._setup.shared_validation
        weights = self._setup.spool / f"weights-{state.round:04d}"
        write_message(weights, pack({}, state.weights))
        calls = [PredictCall(weights, state.plan, task, chunk, batch_size) for task, chunk in _one_pass(shards)]
        results: dict[int, tuple[np.ndarray, float]] = {}
        for answer in self._pool.map(calls, seconds=UNLIMITED):
            if answer.error is not None:
                raise CannotContinue(f"evaluation failed: {answer.error}")
            results[answer.ticket] = answer.result
        weights.unlink()
        outputs: dict[str, tuple[np.ndarray, float]] = {}
        for task in shards:
            of_task = [(call, results[ticket]) for ticket, call in enumerate(calls) if call.task == task]
            order = np.argsort(np.concatenate([call.indices for call, _ in of_task]), kind="stable")
            joined = np.concatenate([part for _, (part, _) in of_task])[order]
            outputs[task] = joined, float(sum(loss for _, (_, loss) in of_task))
        return outputs

    def close(self) -> None:
        self._pool.close()
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    @timed("decoding")
    def _decode(self, answer: Answer, path: Path, open_job: OpenJob) -> Update | Failure:
        if answer.error is not None:
            self._spool.give_back(path)
            return open_job.failed(answer.error)
        try:
            # A map: the pages stay the file's, so waiting updates cost no memory.
            data = map_message(path)
        except (OSError, ValueError) as error:
            return open_job.failed(str(error))
        # An update's tensors are parts of the map; with the last of them the file is free.
        weakref.finalize(data, self._spool.give_back, path)
        return open_job.take(data, self._setup.max_bytes)


def start_worker(setup: SiteSetup) -> Handler:
    """What a worker does with its calls: Jobs of clients, and scoring for the server."""
    site = open_site(setup)
    memory = ReusedMemory()
    bound: dict[Path, BoundModel] = {}

    def handle(call: Any) -> Any:
        if isinstance(call, PredictCall):
            if call.weights not in bound:
                bound.clear()
                bound[call.weights] = _bind(call, site)
            shard = replace(setup.shared_validation[call.task], indices=call.indices)
            return predict(bound[call.weights], call.task, shard, call.batch_size, site.device)
        bound.clear()
        with part("decoding"):
            job = decode_job(map_message(call.job), setup.max_bytes)
        update = run_job(job, site)
        with part("encoding"):
            encoded = encode_update(update, memory=memory)
        write_message(call.answer, encoded)
        return None

    return _profiled(handle, setup.spool) if setup.profile else handle


def _profiled(handle: Handler, spool: Path) -> Handler:
    """The same work, and what each call spent in a file of the spool, where the server finds it."""
    watch, path = Stopwatch(), spool / PROFILES.replace("*", str(os.getpid()))

    def call(given: Any) -> Any:
        with measuring(watch), watch.part("other work"):
            answer = handle(given)
        with path.open("a") as file:
            file.write(json.dumps(watch.take()) + "\n")
        return answer

    return call


def _bind(call: PredictCall, site: Site) -> BoundModel:
    weights = unpack(map_message(call.weights))[1]
    return BoundModel(site.model, call.plan, list(site.model.tasks), "", weights, device=site.device, read=True)


def _one_pass(shards: Mapping[str, Shard]) -> list[tuple[str, np.ndarray]]:
    """All tasks' examples in calls of one size, the longest texts of all first, so that no worker ends late."""
    calls = [(task, chunk) for task, shard in shards.items() for chunk in sorted_batches(shard, CHUNK)]
    lengths = {task: open_tokens(shard.tokens).lengths() for task, shard in shards.items()}
    longest = [int(lengths[task][chunk].max()) for task, chunk in calls]
    return [calls[i] for i in np.argsort([-length for length in longest], kind="stable")]
