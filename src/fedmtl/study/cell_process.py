"""A cell in a process of its own: its memory, its threads and its end are nobody else's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedmtl.config import Config
from fedmtl.engines.start_up import ENCODER_CODE, ENGINE, worker_imports
from fedmtl.engines.worker import warm_up
from fedmtl.errors import FedmtlError
from fedmtl.foreign import printable
from fedmtl.runs.folder import RunFolder
from fedmtl.study.derived import Derivation, derive

BROKEN = 70
MAKING = (ENGINE, ENCODER_CODE, "fedmtl.compress.distill.run", "fedmtl.compress.prune")
# What a study's process is given to end its run after the last whole round.
FAREWELL_SECONDS = 60.0


@dataclass(frozen=True)
class Made:
    """A run that is made of another one of the folder `cells`."""

    derivation: Derivation
    cells: Path
    is_alone: bool


@dataclass(frozen=True)
class CellWork:
    """A run to be started, or gone on with where its folder is there, and the file that takes what it says."""

    does: Config | Made
    name: str
    log: Path


def load_once(works: Iterable[Config | Made]) -> None:
    """Let all that these runs import be imported in one process, from which those of the cells are forked."""
    names = (name for work in works for name in (MAKING if isinstance(work, Made) else worker_imports(work)))
    warm_up(("fedmtl.experiment.run", *dict.fromkeys(names)))


@dataclass(frozen=True)
class CellProcess:
    """A cell that runs. `line` carries nothing: when this end of it closes, however, the process ends too."""

    process: BaseProcess
    line: Connection


def start_cell(work: CellWork) -> CellProcess:
    """Begin in a new process, forked where the system can from one that has loaded everything."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=run_cell, args=(work, theirs), name=work.name)
    process.start()
    theirs.close()
    return CellProcess(process, ours)


def end_cells(cells: Iterable[CellProcess]) -> None:
    """Let processes save their last whole round and end, all at the same time; one that does not is killed.

    Each is asked once: a second signal would end a run that is still saving.
    """
    asked = list(cells)
    for cell in asked:
        if cell.process.is_alive():
            cell.process.terminate()
    for cell in asked:
        cell.process.join(FAREWELL_SECONDS)
        if cell.process.is_alive():
            cell.process.kill()
            cell.process.join()
        cell.line.close()


def run_cell(work: CellWork, line: Connection) -> None:
    """The life of such a process; its exit code is that of `fedmtl run`, and an error is the last line of its log."""
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    _speak_into(work.log)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _run(work)
    except FedmtlError as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        sys.exit(BROKEN)


def last_word(log: Path) -> str:
    """The last line a process said, without its `error:`; empty where it said nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else ""


def _end_with(line: Connection) -> None:
    """Wait for the study's end of the line to close: it was killed, and nobody is left to settle this cell."""
    with suppress(EOFError, OSError):
        line.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(work: CellWork) -> None:
    import torch

    from fedmtl.experiment.run import resume_run, start_run

    torch.set_num_threads(1)
    if isinstance(work.does, Made):
        derive(work.does.derivation, work.does.cells, work.name, is_alone=work.does.is_alone)
        return
    run = RunFolder(Path(work.does.output) / work.name)
    if run.config.exists():
        resume_run(run)
    else:
        start_run(work.does, work.name)


def _speak_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
