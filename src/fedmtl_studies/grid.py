"""A grid of runs: every cell is a run folder; what is finished is left alone, what was begun goes on.

A cell may need others: one that it is made of, or whose folder its config names. It waits for them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Literal

from fedmtl_studies.cells import (
    Cell,
    CellProcess,
    CellWork,
    Distillation,
    Made,
    Pruning,
    end_cells,
    find_other_making,
    last_line,
    load_once,
    start_cell,
    write_making,
)
from fedmtl_studies.folder import StudyFolder, find_difference, has_weights, is_done, settle
from fedmtl_studies.library import GPU, Config, ConfigError, FedmtlError, RunFolder, config_from, raised
from fedmtl_studies.options import Keep

Status = Literal["done", "earlier", "failed"]
POLL_SECONDS = 1.0
MOST_ON_GPU = 8
# A cell that has just begun says more of its start than of its pace.
LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `earlier` was finished by an earlier call; `reason` says why one failed."""

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
    """The user ended the study; every open cell has saved its last whole round."""

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
    does: Config | Made
    num_rounds: int


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
    observe: Callable[[Standing], None] = lambda standing: None,
    keep: Keep = "models",
    needed: Collection[str] = (),
) -> list[Outcome]:
    """Bring every cell to its end, `at_once` processes at a time; one that fails costs itself and what needs it.

    A cell whose folder was made with other settings is an error before anything runs: its results are the user's.
    Whatever `keep` says, the models of the cells that are `needed` afterwards stay.
    """
    grid = _Grid(folder, cells, at_once, observe, keep, needed)
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
        observe: Callable[[Standing], None],
        keep: Keep,
        needed: Collection[str],
    ) -> None:
        names = {cell.name for cell in cells}
        assert len(names) == len(cells), "a cell's name is its folder"
        assert all(set(cell.after) <= names for cell in cells), "a cell waits for cells of its grid"
        self.folder, self.cells, self.at_once = folder, cells, at_once
        self.observe, self.keep, self.needed = observe, keep, needed
        self.outcomes: dict[str, Outcome] = {}
        self.open: dict[str, _Open] = {}
        self.waiting: list[_Ready] = []
        for cell in cells:
            self._sort(cell)
        for cell in cells:
            self._settle(cell.name)

    def run(self) -> None:
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        load_once(ready.does for ready in self.waiting)
        self.observe(self.standing())
        while self.waiting or self.open:
            self._start_ready()
            if not self.open:
                continue
            wait([one.process.sentinel for one in self.open.values()], timeout=POLL_SECONDS)
            for one in [one for one in self.open.values() if not one.process.is_alive()]:
                self._close(one)
            self.observe(self.standing())

    def standing(self) -> Standing:
        running = {name: _share(self.folder.cell(name), one.ready.num_rounds) for name, one in self.open.items()}
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
            ready = self._ready(cell)
        except ConfigError as error:
            self.outcomes[cell.name] = Outcome(cell.name, "failed", str(error))
            return
        if run.config.exists():
            difference = self._difference(run, ready)
            if difference:
                raise ConfigError(
                    f"{run.path}: was made with other settings: {difference}; give the study another --name,"
                    " or remove that folder"
                )
        else:
            shutil.rmtree(run.path, ignore_errors=True)  # Killed before it had begun.
        if is_done(run):
            self.outcomes[cell.name] = Outcome(cell.name, "earlier")
        else:
            self.waiting.append(ready)

    def _ready(self, cell: Cell) -> _Ready:
        if isinstance(cell.settings, Distillation | Pruning):
            made = Made(cell.settings, self.folder.cells, is_alone=self.at_once == 1)
            return _Ready(cell, made, cell.settings.num_rounds)
        config = config_from({**cell.settings, "output": str(self.folder.cells)})
        return _Ready(cell, _shared_machine(config) if self.at_once > 1 else config, config.training.num_rounds)

    def _difference(self, run: RunFolder, ready: _Ready) -> str | None:
        if isinstance(ready.does, Made):
            return find_other_making(self.folder, run.name, ready.does.derivation)
        return find_difference(run, ready.does)

    def _start_ready(self) -> None:
        """Begin cells that wait for nothing, in their order; those that need a failed one fail with it."""
        for ready in list(self.waiting):
            ends = [self.outcomes.get(name) for name in ready.cell.after]
            lack = next((words for end in ends if end is not None and (words := self._lack(end))), None)
            if lack is not None:
                self.waiting.remove(ready)
                self.outcomes[ready.cell.name] = Outcome(ready.cell.name, "failed", lack)
                for name in ready.cell.after:
                    self._settle(name)
            elif None not in ends and len(self.open) < self.at_once:
                self.waiting.remove(ready)
                self._start(ready)

    def _lack(self, needed: Outcome) -> str | None:
        """Return in words why nothing can be made of an ended cell; None where something can."""
        if needed.status == "failed":
            return f"it needs {needed.cell}, which failed: {needed.reason}"
        run = self.folder.cell(needed.cell)
        if not has_weights(run):
            return f"it needs {needed.cell}, whose weights were removed; remove {run.path} to train it again"
        return None

    def _start(self, ready: _Ready) -> None:
        name = ready.cell.name
        if isinstance(ready.does, Made):
            # Before its folder is there: a folder without this file would be one of unknown settings.
            write_making(self.folder, name, ready.does.derivation)
        started = start_cell(CellWork(ready.does, name, self.folder.logs / f"{name}.log", ready.cell.tap))
        self.open[name] = _Open(ready, started, time.monotonic())

    def _close(self, one: _Open) -> None:
        name = one.ready.cell.name
        end_cells([one.cell])
        seconds = time.monotonic() - one.started
        run = self.folder.cell(name)
        if one.process.exitcode == 0 and is_done(run):
            self.outcomes[name] = Outcome(name, "done", seconds=seconds)
        else:
            printed = last_line(self.folder.logs / f"{name}.log")
            reason = printed or f"its process ended with code {one.process.exitcode}"
            self.outcomes[name] = Outcome(name, "failed", reason, seconds)
        del self.open[name]
        for settled in (name, *one.ready.cell.after):
            self._settle(settled)

    def _settle(self, name: str) -> None:
        """Remove of a finished cell what nobody wants; its model stays while others wait for it."""
        ended = self.outcomes.get(name)
        if ended is None or ended.status == "failed":
            return
        left = (*self.waiting, *(one.ready for one in self.open.values()))
        is_needed = name in self.needed or any(name in ready.cell.after for ready in left)
        settle(self.folder.cell(name), self.at_once, "models" if is_needed and self.keep == "scores" else self.keep)


def suitable_at_once(clients: int) -> int:
    """Return how many cells of so many clients suit the machine: a run's workers use as many cores as it has clients.

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
    """Return the config with one process and one thread, as cells beside it use the other cores."""
    return config.model_copy(update={"compute": config.compute.model_copy(update={"workers": 0})})


def _share(run: RunFolder, num_rounds: int) -> float:
    """Return the share of its rounds that an open cell has done, by counting lines: reading events takes longer."""
    if not run.events.exists() or not num_rounds:
        return 0.0
    # Round 0 is before training.
    rounds = run.events.read_bytes().count(b'{"event": "round"') - 1
    return min(1.0, max(0, rounds) / num_rounds)


@dataclass(frozen=True)
class Paced:
    """A cell's work in any unit, the share of it that is done, and the seconds that took here."""

    work: float
    share: float
    seconds: float


def seconds_left(cells: Sequence[Paced], at_once: int) -> float | None:
    """Return the seconds for the work that is left at the measured pace, shared by as many cells as run at once.

    They are never less than the slowest open cell needs by itself; None until something was measured. Cells that an
    earlier call finished have no seconds here and do not count.
    """
    measured = [cell for cell in cells if cell.seconds > 0 and cell.share >= LEAST_SHARE]
    done = sum(cell.work * cell.share for cell in measured)
    if not done:
        return None
    pace = sum(cell.seconds for cell in measured) / done
    left = [cell.work * (1 - cell.share) * pace for cell in cells if cell.share < 1]
    return max(sum(left) / at_once, max(left, default=0.0))
