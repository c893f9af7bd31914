"""A cell: one run of a study, made of a config or of another cell, in a process that shares nothing with the others.

A cell that is made of another one is a student that it teaches, or what is left of it when weights are taken out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from fedmtl_studies.folder import StudyFolder, first_difference, memory_path, read_memory
from fedmtl_studies.library import (
    ENCODER_CODE,
    ENGINE,
    Config,
    Cut,
    DistillSettings,
    FedmtlError,
    RunFolder,
    load_config,
    printable,
    read_events,
    summarize,
    warm_up,
    worker_imports,
    write_atomic,
    write_report,
)

BROKEN = 70
# What every process of a cell imports: these functions, and the library's code that computes.
SHARED_IMPORTS = (__name__, "fedmtl_studies.computing")
# What a study's process waits for a run to end after its last whole round.
FAREWELL_SECONDS = 60.0


@dataclass(frozen=True)
class Distillation:
    """A student of the run `of`: a cell's name, or any run's whole path; `overrides` change its config."""

    of: str
    settings: DistillSettings
    overrides: tuple[str, ...] = ()

    @property
    def num_rounds(self) -> int:
        return sum(self.settings.epochs.values())

    def to_json(self) -> dict[str, Any]:
        return {"distilled": self.of, "settings": self.settings.to_json(), "overrides": list(self.overrides)}


@dataclass(frozen=True)
class Pruning:
    """The run `of` with weights taken out, trained for so many epochs more."""

    of: str
    cut: Cut
    epochs: int
    overrides: tuple[str, ...] = ()

    @property
    def num_rounds(self) -> int:
        return self.epochs

    def to_json(self) -> dict[str, Any]:
        return {"pruned": self.of, "cut": asdict(self.cut), "epochs": self.epochs, "overrides": list(self.overrides)}


Derivation = Distillation | Pruning


class Tap(Protocol):
    """Somebody between the server and the clients of a cell, who reads along or changes what is sent.

    It goes into the cell's process, so it has to be picklable. The cell's name has to say which tap it is: a folder is
    compared by its config alone.
    """

    def open_engine(self, prepared: Any, run: RunFolder) -> Any:
        """Return the engine of a prepared run, with the tap on it."""


@dataclass(frozen=True)
class Cell:
    """One run of a study: its name, its whole config as YAML would give it, and its work in any unit.

    Instead of a config it may have how it is made of another run. `after` names the cells it needs: they are done when
    it begins, and their weights are there. A run of a config may have a `tap`.
    """

    name: str
    settings: Mapping[str, Any] | Derivation
    work: float = 1.0
    after: tuple[str, ...] = ()
    tap: Tap | None = None


@dataclass(frozen=True)
class Made:
    """A run that is made of another one of the folder `cells`."""

    derivation: Derivation
    cells: Path
    is_alone: bool


@dataclass(frozen=True)
class CellWork:
    """A run to start, or to go on with where its folder exists, and the file that takes what it prints."""

    does: Config | Made
    name: str
    log: Path
    tap: Tap | None = None


@dataclass(frozen=True)
class CellProcess:
    """A cell that runs. `line` carries nothing: when this end of it closes for any reason, the process ends too."""

    process: BaseProcess
    line: Connection


def load_once(works: Iterable[Config | Made]) -> None:
    """Import all that these runs need in one process, from which those of the cells are forked."""
    making = (ENGINE, ENCODER_CODE)
    names = (name for work in works for name in (making if isinstance(work, Made) else worker_imports(work)))
    warm_up((*SHARED_IMPORTS, *dict.fromkeys(names)))


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

    Each gets one signal: a second one would end a run that is still saving.
    """
    ending = list(cells)
    for cell in ending:
        if cell.process.is_alive():
            cell.process.terminate()
    for cell in ending:
        cell.process.join(FAREWELL_SECONDS)
        if cell.process.is_alive():
            cell.process.kill()
            cell.process.join()
        cell.line.close()


def run_cell(work: CellWork, line: Connection) -> None:
    """Run a cell in its process; the exit code is that of `fedmtl run`, and an error is the last line of its log."""
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    _print_into(work.log)
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


def last_line(log: Path) -> str:
    """Return the last line that a process printed, without its `error:`; empty where it printed nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    printed = [line.strip() for line in lines if line.strip()]
    return printed[-1].removeprefix("error: ") if printed else ""


def _end_with(line: Connection) -> None:
    """Wait for the study's end of the line to close: it was killed, and nobody is left to settle this cell."""
    with suppress(EOFError, OSError):
        line.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


def _print_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _run(work: CellWork) -> None:
    import torch

    from fedmtl_studies.computing import open_engine, peak_bytes, resume_run, start_run

    torch.set_num_threads(1)
    if isinstance(work.does, Made):
        derive(work.does.derivation, work.does.cells, work.name, is_alone=work.does.is_alone)
        return
    run = RunFolder(Path(work.does.output) / work.name)
    before = peak_bytes()
    engine = open_engine if work.tap is None else work.tap.open_engine
    if run.config.exists():
        resume_run(run, compares=False, make_engine=engine)
    else:
        start_run(work.does, work.name, compares=False, make_engine=engine)
    if (allocated := torch.cuda.max_memory_allocated()) > 0:
        note_memory(run, allocated)
    elif before is not None and (after := peak_bytes()) is not None:
        # The imports are the same for every cell, and were there before.
        note_memory(run, after - before)


def note_memory(run: RunFolder, peak: int) -> None:
    """Record the most memory that a cell took; of one that was resumed, the most of all its processes that ended."""
    write_atomic(memory_path(run), json.dumps(max(peak, read_memory(run) or 0)).encode())


def source_of(derivation: Derivation, cells: Path) -> RunFolder:
    """Return the run that a cell is made of; a whole path stays what it is."""
    return RunFolder(cells / derivation.of)


def derive(derivation: Derivation, cells: Path, name: str, *, is_alone: bool) -> None:
    """Make the run of that name in the folder of cells, or go on with it where it was begun."""
    run, source = RunFolder(cells / name), source_of(derivation, cells)
    if not run.events.exists():
        shutil.rmtree(run.path, ignore_errors=True)  # Killed before it had begun.
    if isinstance(derivation, Distillation):
        _distill(derivation, source, run, is_alone)
    else:
        _prune(derivation, source, run, is_alone)


class _Log:
    """A listener that prints into the cell's log what a person would see."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def update(self, update: object) -> None:
        pass


def _distill(wanted: Distillation, source: RunFolder, run: RunFolder, is_alone: bool) -> None:
    from fedmtl_studies.computing import distill

    config = load_config(source.config, [*wanted.overrides, *_shared(is_alone)])
    config = config.model_copy(update={"output": str(run.path.parent)})
    distill(source, config, wanted.settings, run.name, _Log(), resume=run.events.exists())
    write_report(run.path)


def _prune(wanted: Pruning, source: RunFolder, run: RunFolder, is_alone: bool) -> None:
    from fedmtl_studies.computing import prune_run, resume_run, start_run

    if run.events.exists():
        resume_run(run, compares=False)
        return
    overrides = [*wanted.overrides, *_shared(is_alone), f"output={run.path.parent}"]
    start_run(prune_run(source, wanted.cut, wanted.epochs, overrides).config, run.name, compares=False)


def _shared(is_alone: bool) -> list[str]:
    """Return the override for one process a cell where cells beside it use the other cores."""
    return [] if is_alone else ["compute.workers=0"]


def write_making(folder: StudyFolder, name: str, derivation: Derivation) -> None:
    """Write down how a cell is made, in the study's folder."""
    write_atomic(_making_path(folder, name), json.dumps(_making(folder, derivation), indent=1).encode())


def find_other_making(folder: StudyFolder, name: str, derivation: Derivation) -> str | None:
    """Return in words how the making of an existing cell differs from the wanted one; None where it does not."""
    path, wanted = _making_path(folder, name), _making(folder, derivation)
    found = json.loads(path.read_text()) if path.exists() else {}
    # A source that was removed says nothing until it is there again.
    return first_difference(found, {**wanted, "source": wanted["source"] or found.get("source")})


def _making_path(folder: StudyFolder, name: str) -> Path:
    return folder.made / f"{name}.json"


def _making(folder: StudyFolder, derivation: Derivation) -> dict[str, Any]:
    # Tuples are lists in a file.
    plain: dict[str, Any] = json.loads(json.dumps(derivation.to_json()))
    source = summarize(read_events(source_of(derivation, folder.cells)))
    return {**plain, "source": source.weights_sha256}
