"""The process that one variant is measured in, which takes requests over a pipe.

Every variant has its process: threads, and the memory that the operating system counts, are then the variant's.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmtl.compress.measure.costs import time_block
from fedmtl.compress.measure.measured import Load, Variant
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.predict.onnx import made_up_ids
from fedmtl.runs.folder import RunFolder
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.metrics import Scores, constant_score
from fedmtl.tasks.task import Task

if TYPE_CHECKING:
    from fedmtl.predict.run import LoadedRun


@dataclass(frozen=True)
class Opened:
    """A loaded model: one pass over the load, and what else is measured of it."""

    make_pass: Callable[[], object]
    parameters: int | None
    flops: Callable[[], int]
    score: Callable[[], Scored]


@dataclass(frozen=True)
class Scored:
    """Every task's scores, its main metric, and what the commonest class would get in it."""

    scores: dict[str, Scores]
    main: dict[str, str]
    floors: dict[str, float]


@dataclass(frozen=True)
class Measuring:
    """A variant's process, as seen from the one that asks."""

    variant: Variant
    process: BaseProcess
    pipe: Connection

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer to `open`, `time`, `peak`, `waiting`, `facts` or `score`; its error, if that comes back."""
        try:
            self.pipe.send((what, arguments))
            error, answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            reason = "was killed, perhaps for want of memory" if code == -signal.SIGKILL else f"ended with code {code}"
            raise ModelError(f"{self.variant.name}: its process {reason}; measure fewer at a time") from None
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start_measuring(variant: Variant, load: Load) -> Measuring:
    """A fresh process: one forked from here would begin with this one's memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(variant, load, theirs), name=variant.name, daemon=True)
    process.start()
    theirs.close()
    return Measuring(variant, process, ours)


def _serve(variant: Variant, load: Load, pipe: Connection) -> None:
    """Answer until the other end closes; an interrupt is for who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    opened: list[Opened] = []
    intervals: list[tuple[int, int]] = []

    def open_with(threads: int | None) -> None:
        opened.clear()
        intervals.clear()
        opened.append(_open(variant, load, threads))

    def time_passes(passes: int) -> list[float]:
        # Within a block: a process that is woken for it waits for a core first, which no pass has to.
        before = core_clock()
        seconds = time_block(opened[0].make_pass, passes)
        after = core_clock()
        if before and after:
            intervals.append((after[0] - before[0], after[1] - before[1]))
        return seconds

    answers: dict[str, Callable[..., Any]] = {
        "open": open_with,
        "time": time_passes,
        "peak": peak_bytes,
        "waiting": lambda: waiting_share(intervals),
        "facts": lambda: (opened[0].parameters, opened[0].flops()),
        "score": lambda: opened[0].score(),
    }
    reply: tuple[FedmtlError | None, Any]
    with suppress(EOFError, OSError):
        while True:
            what, arguments = pipe.recv()
            try:
                reply = (None, answers[what](*arguments))
            except FedmtlError as error:
                reply = (error, None)
            except Exception as error:
                reply = (ModelError(f"{variant.name}: cannot be measured ({_first_line(error)})"), None)
            pipe.send(reply)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__


def peak_bytes() -> int | None:
    """The most memory this process ever had in use, resident."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    # On a Mac this is in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sys.platform == "darwin" else None


def core_clock() -> tuple[int, int] | None:
    """Nanoseconds that this process had a core, and that it stood in line for one; None where nobody counts them."""
    try:
        had, waited, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    except (OSError, ValueError):
        return None
    return had, waited


def waiting_share(intervals: Sequence[tuple[int, int]]) -> float | None:
    """Of the time that a core was wanted, the share in line for it; None where nothing was counted."""
    had, waited = (sum(interval[part] for interval in intervals) for part in (0, 1))
    return waited / (had + waited) if had + waited else None


def timed_task(tasks: dict[str, Task]) -> Task:
    """The first that reads one sequence, so that models with the same tasks are timed alike; otherwise the first."""
    return next((task for task in tasks.values() if not task.is_dual), next(iter(tasks.values())))


def _open(variant: Variant, load: Load, threads: int | None) -> Opened:
    opened = (_open_run if variant.form == "fedmtl" else _open_file)(variant, load, threads)
    try:
        opened.make_pass()
    except Exception as error:  # ONNX Runtime's kinds are not public
        raise ModelError(
            f"{variant.name}: cannot take {load.batch} x {load.length} tokens; give a smaller --length."
            f" [{_first_line(error)}]"
        ) from error
    return opened


def _open_run(variant: Variant, load: Load, threads: int | None) -> Opened:
    # As for ONNX Runtime: threads that spin take the cores from each other, a hundredfold on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from fedmtl.compress.measure.costs import torch_flops
    from fedmtl.model.encoder import most_positions
    from fedmtl.model.multitask import Inputs
    from fedmtl.predict.run import score_examples

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    loaded = _load(variant.path, variant.model)
    limit = most_positions(loaded.saved.encoder.module)
    if limit is not None and load.length > limit:
        raise ModelError(f"--length {load.length}: {variant.name} has {limit} positions; give {limit} or less")
    tasks = {name: loaded.saved.tasks[name] for name in loaded.tasks}
    task = timed_task(tasks)
    vocabulary = min(len(loaded.saved.encoder.tokenizer), loaded.saved.model.vocabulary_size)

    def inputs(batch: int) -> Inputs:
        ids = torch.from_numpy(made_up_ids(batch * (1 + task.is_dual), load.length, vocabulary))
        # Where words are tagged, every token is taken for one.
        places = torch.arange(ids.numel()) if task.kind_of.by_word else None
        return Inputs(ids, torch.ones_like(ids), torch.zeros_like(ids), places)

    whole, model = inputs(load.batch), loaded.bound.use(task.name)

    @torch.inference_mode()
    def make_pass() -> object:
        return model(task.name, whole)

    return Opened(
        make_pass,
        sum(value.numel() for value in loaded.bound.parameters.values()),
        lambda: torch_flops(model, task.name, inputs(1)),
        lambda: _score(RunFolder(variant.path), tasks, lambda task, examples: score_examples(loaded, task, examples)),
    )


@cache
def _load(path: Path, model: Path | None) -> LoadedRun:
    """Loaded once: threads are torch's, not the model's."""
    from fedmtl.predict.run import ValuesAtClients, load_run

    run = RunFolder(path, model)
    try:
        return load_run(run)
    except ValuesAtClients:
        raise FedmtlError(f"{run.name}: values of every task stay at the clients{_remedy(run)}") from None


def _remedy(run: RunFolder) -> str:
    """The commands that measure one client's model, of the round that was named; the run's folder names its data."""
    from fedmtl.predict.rounds import saved_clients

    clients = saved_clients(run)
    if not clients:
        return ", and none is in this folder, so there is no whole model to measure"
    given = f" --round {run.model_folder.name.removeprefix('round-')}" if run.model_folder else ""
    file = run.path / "export" / f"{clients[0]}.onnx"
    written = f"fedmtl export {run.path} --to onnx --client {clients[0]}{given} --out {file}"
    return f"; write a client's model with `{written}` and measure that file with `fedmtl measure {file}`"


def _open_file(variant: Variant, load: Load, threads: int | None) -> Opened:
    from fedmtl.compress.measure.costs import onnx_flops
    from fedmtl.predict.onnx import made_up_feeds, open_onnx, output_name, run, run_of, score_examples

    model = open_onnx(variant.path, threads)
    task = timed_task(model.tasks)

    def feeds(batch: int) -> dict[str, np.ndarray]:
        return made_up_feeds(model, batch * (1 + task.is_dual), load.length)

    whole = feeds(load.batch)
    return Opened(
        lambda: run(model, [task.name], whole),
        model.parameters,
        lambda: onnx_flops(variant.path, output_name(task.name), feeds(1)),
        lambda: _score(run_of(variant.path), model.tasks, lambda task, examples: score_examples(model, task, examples)),
    )


def _score(run: RunFolder, tasks: dict[str, Task], score: Callable[[Task, Any], Scores]) -> Scored:
    data = load_tasks(load_config(run.config), tasks)
    return Scored(
        {name: score(task, data[name].validation) for name, task in tasks.items()},
        {name: task.metric for name, task in tasks.items()},
        {name: constant_score(task, data[name].validation.labels) for name, task in tasks.items()},
    )
