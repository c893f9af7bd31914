"""The engine on one machine: clients run one after another in worker processes.

All that would cross a network is encoded and decoded here too, so bytes are true and the weights are the
same as with any other engine. What an engine has of a job until its update comes is a small record, and files that are
written again and again: a fresh file would cost all its pages.
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.engines.processes import Answer, Handler, WorkerPool
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.errors import CannotContinue, FedmtlError, WireError
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, State, Traffic, Update
from fedmtl.federation.wire import decode_job, decode_update, encode_job, encode_update, pack, unpack
from fedmtl.federation.wire.codecs import Bytes
from fedmtl.federation.wire.frame import ReusedMemory
from fedmtl.federation.wire.messages import answer_bytes
from fedmtl.model.multitask import BoundModel
from fedmtl.sharing.plan import SharingPlan
from fedmtl.tasks.batches import Shard, join_rows, sorted_batches
from fedmtl.tasks.sequences import Rows
from fedmtl.tasks.task import owner_of_set
from fedmtl.tasks.tokens import open_tokens
from fedmtl.timing import Stopwatch, measuring, part, timed
from fedmtl.training.local import predict

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

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[Rows, float]]:
        """Return the outputs for every validation set of the server, in its order, and the summed loss."""
        shards = self._setup.shared_validation
        weights = self._setup.spool / f"weights-{state.round:04d}"
        write_message(weights, pack({}, state.weights))
        calls = [PredictCall(weights, state.plan, task, chunk, batch_size) for task, chunk in _one_pass(shards)]
        results: dict[int, tuple[Rows, float]] = {}
        for answer in self._pool.map(calls, seconds=UNLIMITED):
            if answer.error is not None:
                raise CannotContinue(f"evaluation failed: {answer.error}")
            results[answer.ticket] = answer.result
        weights.unlink()
        outputs: dict[str, tuple[Rows, float]] = {}
        for task in shards:
            of_task = [(call, results[ticket]) for ticket, call in enumerate(calls) if call.task == task]
            order = np.argsort(np.concatenate([call.indices for call, _ in of_task]), kind="stable")
            joined = join_rows([part for _, (part, _) in of_task])[order]
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
            return predict(bound[call.weights], owner_of_set(call.task), shard, call.batch_size, site.device)
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


MESSAGE = "message-"


@dataclass(frozen=True)
class OpenJob:
    """What an engine remembers of a job that it has sent: little, so that the job's weights can be let go."""

    round: int
    client: ClientId
    bytes_down: int
    most_bytes_up: int

    @classmethod
    def of(cls, job: Job, bytes_down: int) -> OpenJob:
        """Record a job that was sent with so many bytes."""
        return cls(job.round, job.client, bytes_down, answer_bytes(job))

    def take(self, data: np.ndarray, max_bytes: int) -> Update | Failure:
        """Decode the update, with the bytes that crossed and the seconds it took; a Failure where it cannot be read."""
        try:
            update, seconds = decode_update(data, max_bytes, self.most_bytes_up)
        except (WireError, ValueError) as error:
            return self.failed(str(error))
        traffic = Traffic(self.bytes_down, len(data), seconds)
        if update.client != self.client:
            return Failure(self.round, self.client, f"answered as {update.client}", traffic)
        return replace(update, traffic=traffic)

    def failed(self, reason: str) -> Failure:
        return Failure(self.round, self.client, reason, Traffic(self.bytes_down))


class Spool:
    """Hands out files that nobody uses; as many are made as are in use at once.

    Their names are unique to this spool, so that no process of a run that was killed can write to a file that is
    mapped here; what such a run left is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: list[Path] = []
        self._num_made = 0
        self._prefix = f"{MESSAGE}{secrets.token_hex(4)}-"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{MESSAGE}*"):
            path.unlink(missing_ok=True)

    def take(self) -> Path:
        """A file for one message; it may hold an old one."""
        if self._free:
            return self._free.pop()
        self._num_made += 1
        return self._folder / f"{self._prefix}{self._num_made}"

    def give_back(self, path: Path) -> None:
        """Nobody reads the file any more: it may be written over."""
        self._free.append(path)


def write_message(path: Path, message: Bytes) -> None:
    """Write a message over whatever the file holds."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            rest = message.data
            while rest:
                rest = rest[os.write(file, rest) :]
            os.ftruncate(file, len(message))
        finally:
            os.close(file)
    except OSError as error:
        raise FedmtlError(
            f"{path.parent}: cannot be written ({error.strerror}); free its disk, or set `output`"
        ) from error


def map_message(path: Path) -> Bytes:
    """The message in a file, of which a process holds the pages that it reads; writing to it changes no file."""
    return np.memmap(path, dtype=np.uint8, mode="c")
