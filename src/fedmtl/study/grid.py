"""A grid of runs: every cell is a run folder; what is finished is left alone, what was begun goes on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from fedmtl.config import Config
from fedmtl.config.file import config_from
from fedmtl.engines.num_workers import GPU
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.experiment.signals import raised
from fedmtl.runs import RunFolder
from fedmtl.study.cell_process import CellProcess, CellWork, end_cells, last_word, load_once, start_cell
from fedmtl.study.folder import StudyFolder, find_difference, is_done
from fedmtl.study.pace import Paced, seconds_left
from fedmtl.study.record import Keep, settle

Status = Literal["done", "kept", "failed"]
POLL_SECONDS = 1.0
MOST_ON_GPU = 8


@dataclass(frozen=True)
class Cell:
    """One run of a study: its name, its whole config as YAML would give it, and its work in any unit."""

    name: str
    settings: Mapping[str, Any]
    work: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `kept` was finished by an earlier call; `reason` says why one failed."""

    cell: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """How far a grid is; `running` has the share of its rounds that each open cell has done."""

    total: int
    outcomes: tuple[Outcome, ...]
    running: Mapping[str, float]
    seconds_left: float | None

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")


class GridInterrupted(FedmtlError):
    """The user asked the study to end; every open cell has saved its last whole round."""

    def __init__(self, number: int) -> None:
        super().__init__("the study was ended; the same command goes on with it, finished cells stay as they are")
        self.exit_code = 128 + number


class _Stop(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class _Ready:
    cell: Cell
    config: Config


@dataclass(frozen=True)
class _Open:
    ready: _Ready
    cell: CellProcess
    started: float

    @property
    def process(self) -> BaseProcess:
        return self.cell.process


def run_grid(
    folder: StudyFolder,
    cells: Sequence[Cell],
    at_once: int,
    watch: Callable[[Standing], None] = lambda standing: None,
    keep: Keep = "models",
) -> list[Outcome]:
    """Bring every cell to its end, `at_once` processes at a time; a cell that fails costs only itself.

    A cell whose folder was made with other settings is an error before anything runs: its results are the user's.
    """
    grid = _Grid(folder, cells, at_once, watch, keep)
    with _ending_all(grid.open):
        grid.run()
    return [grid.outcomes[cell.name] for cell in cells]


class _Grid:
    """The cells that wait, those that are open, and how the others ended."""

    def __init__(
        self,
        folder: StudyFolder,
        cells: Sequence[Cell],
        at_once: int,
        watch: Callable[[Standing], None],
        keep: Keep,
    ) -> None:
        assert len({cell.name for cell in cells}) == len(cells), "a cell's name is its folder"
        self.folder, self.cells, self.at_once = folder, cells, at_once
        self.watch, self.keep = watch, keep
        self.outcomes: dict[str, Outcome] = {}
        self.open: dict[str, _Open] = {}
        self.waiting: list[_Ready] = []
        for cell in cells:
            self._sort(cell)

    def run(self) -> None:
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        load_once(ready.config for ready in self.waiting)
        self.watch(self.standing())
        while self.waiting or self.open:
            while self.waiting and len(self.open) < self.at_once:
                self._start(self.waiting.pop(0))
            wait([one.process.sentinel for one in self.open.values()], timeout=POLL_SECONDS)
            for one in [one for one in self.open.values() if not one.process.is_alive()]:
                self._close(one)
            self.watch(self.standing())

    def standing(self) -> Standing:
        running = {name: _share(self.folder.cell(name), one.ready.config) for name, one in self.open.items()}
        paced = [self._paced(cell, running.get(cell.name, 0.0)) for cell in self.cells]
        return Standing(len(self.cells), tuple(self.outcomes.values()), running, seconds_left(paced, self.at_once))

    def _paced(self, cell: Cell, share: float) -> Paced:
        ended = self.outcomes.get(cell.name)
        if ended is not None:
            # How soon a cell failed says nothing of how long the others take.
            return Paced(cell.work, 1.0, ended.seconds if ended.status == "done" else 0.0)
        begun = self.open.get(cell.name)
        return Paced(cell.work, share, time.monotonic() - begun.started if begun else 0.0)

    def _sort(self, cell: Cell) -> None:
        run = self.folder.cell(cell.name)
        try:
            config = config_from({**cell.settings, "output": str(self.folder.cells)})
        except ConfigError as error:
            self.outcomes[cell.name] = Outcome(cell.name, "failed", str(error))
            return
        if run.config.exists():
            difference = find_difference(run, config)
            if difference:
                raise ConfigError(
                    f"{run.path}: was made with other settings: {difference}; give the study another --name,"
                    " or remove that folder"
                )
        else:
            shutil.rmtree(run.path, ignore_errors=True)  # Killed before it had begun.
        if is_done(run):
            settle(run, self.at_once, self.keep)
            self.outcomes[cell.name] = Outcome(cell.name, "kept")
        else:
            self.waiting.append(_Ready(cell, _shared_machine(config) if self.at_once > 1 else config))

    def _start(self, ready: _Ready) -> None:
        name = ready.cell.name
        started = start_cell(CellWork(ready.config, name, self.folder.logs / f"{name}.log"))
        self.open[name] = _Open(ready, started, time.monotonic())

    def _close(self, one: _Open) -> None:
        name = one.ready.cell.name
        end_cells([one.cell])
        seconds = time.monotonic() - one.started
        run = self.folder.cell(name)
        if one.process.exitcode == 0 and is_done(run):
            settle(run, self.at_once, self.keep)
            self.outcomes[name] = Outcome(name, "done", seconds=seconds)
        else:
            said = last_word(self.folder.logs / f"{name}.log")
            reason = said or f"its process ended with code {one.process.exitcode}"
            self.outcomes[name] = Outcome(name, "failed", reason, seconds)
        del self.open[name]


def suitable_at_once(clients: int) -> int:
    """How many cells of so many clients suit the machine: a run's own workers use as many cores as it has clients.

    Small models leave a GPU waiting for the next launch, so several cells share one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_ON_GPU, max(1, cores // 2)) if GPU.exists() else max(1, cores // clients)


@contextmanager
def _ending_all(open_cells: Mapping[str, _Open]) -> Iterator[None]:
    """Leave no process behind, however the grid ends."""
    try:
        with raised(_Stop):
            yield
    except _Stop as stop:
        raise GridInterrupted(stop.number) from None
    finally:
        end_cells(one.cell for one in open_cells.values())


def _shared_machine(config: Config) -> Config:
    """One process and one thread a cell: cells beside it use the other cores."""
    return config.model_copy(update={"compute": config.compute.model_copy(update={"workers": 0})})


def _share(run: RunFolder, config: Config) -> float:
    """Which part of its rounds an open cell has behind it, by counting lines: reading all events takes longer."""
    if not run.events.exists() or not config.training.num_rounds:
        return 0.0
    # Round 0 is before training.
    rounds = run.events.read_bytes().count(b'{"event": "round"') - 1
    return min(1.0, max(0, rounds) / config.training.num_rounds)
