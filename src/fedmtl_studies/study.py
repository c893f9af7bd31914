"""A study: options, the cells that they ask for, and a page of what the cells came to. One driver runs them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from fedmtl_studies.cells import Cell
from fedmtl_studies.folder import StudyFolder, is_done, is_settled, settle, write_settings
from fedmtl_studies.grid import Outcome, Standing, run_grid
from fedmtl_studies.library import EVERY, CannotContinue, ConfigError, Honours, RunFolder, duration, parse_yaml
from fedmtl_studies.options import Keep, StudyOptions
from fedmtl_studies.page import Page, with_chance, write_pages
from fedmtl_studies.results import Results, Runs, chance_levels, read_results

OptionsT = TypeVar("OptionsT", bound=StudyOptions)
ResultT = TypeVar("ResultT")
Say = Callable[[str], None]
EVERYTHING = Honours("study", EVERY)


@dataclass(frozen=True)
class Plan(Generic[ResultT]):
    """What a study does with some options: the cells to run, the runs that each setup shows, and the page of them.

    `measure` is called when no cell runs any more, and the models of the cells `measured` stay until then. With
    `trains` False the cells that are finished are shown as they are.
    """

    cells: Sequence[Cell]
    runs: Runs
    page: Callable[[Results[ResultT]], Page]
    measure: Callable[[Results[ResultT], Say], None] | None = None
    measured: Sequence[str] = ()
    trains: bool = True


@dataclass(frozen=True)
class Study(Generic[OptionsT, ResultT]):
    """A grid of runs under a name: its options, its plan for them, and how a finished cell is read.

    `honours` says what `--set` may change; a setting that all cells replace is refused.
    """

    name: str
    title: str
    help: str
    options: type[OptionsT]
    plan: Callable[[OptionsT, StudyFolder], Plan[ResultT]]
    read: Callable[[RunFolder], ResultT]
    honours: Honours = EVERYTHING


class Observer(Protocol):
    """Somebody who follows a study, such as the terminal."""

    def __call__(self, standing: Standing, /) -> None:
        """Take note of how far the grid is: at its start, whenever a cell ends, and about once a second."""

    def say(self, line: str, /) -> None:
        """Take note of what is measured when no cell runs any more."""


class Silent:
    """An observer that shows nothing."""

    def __call__(self, standing: Standing, /) -> None:
        pass

    def say(self, line: str, /) -> None:
        pass


SILENT = Silent()


def run_study(
    study: Study[OptionsT, ResultT],
    options: OptionsT,
    folder: StudyFolder,
    at_once: int = 1,
    observe: Observer = SILENT,
    keep: Keep = "models",
) -> list[Outcome]:
    """Run every cell that the options ask for, or go on with it; all pages are written after each cell.

    Cells that failed are an error at the end, when all others have their numbers.
    """
    # Not every study has `--set`.
    study.honours.check(getattr(options, "overrides", ()))
    plan = study.plan(options, folder)
    about = _about(folder, study.name, options, plan, at_once)

    def write(standing: Standing) -> None:
        page = plan.page(read_results(folder, plan.runs, study.read))
        page = with_chance(page, chance_levels(folder, plan.runs))
        write_pages(folder, study.name, study.title, _with_standing(page, standing), about)

    if plan.trains:
        outcomes = run_grid(folder, plan.cells, at_once, _writing(write, observe), keep, plan.measured)
    else:
        outcomes = _finished(folder, plan.cells)
    if plan.measure is not None:
        plan.measure(read_results(folder, plan.runs, study.read), observe.say)
    write(Standing(len(plan.cells), tuple(outcomes), {}, None))
    if keep == "scores" and plan.trains:
        for run in filter(is_settled, map(folder.cell, plan.measured)):
            settle(run, at_once, keep)
    refuse_failed(folder, outcomes)
    return outcomes


def read_about(folder: StudyFolder) -> dict[str, Any] | None:
    """Return what the study in this folder was to do; None where there is none yet."""
    if not folder.settings.exists():
        return None
    found: dict[str, Any] = parse_yaml(folder.settings.read_text(), str(folder.settings))
    return found


def _about(
    folder: StudyFolder, name: str, options: StudyOptions, plan: Plan[ResultT], at_once: int
) -> Mapping[str, Any]:
    """Return what the cells are to be: now, or, where nothing is trained now, when they were."""
    earlier = None if plan.trains else read_about(folder)
    return earlier or write_settings(folder, name, options.model_dump(), at_once)


def _writing(write: Callable[[Standing], None], observe: Observer) -> Callable[[Standing], None]:
    """Return an observer of a grid that writes when a cell has ended, before it lets the other observe."""
    ended = -1

    def follow(standing: Standing) -> None:
        nonlocal ended
        if len(standing.outcomes) > ended:
            ended = len(standing.outcomes)
            write(standing)
        observe(standing)

    return follow


def _with_standing(page: Page, standing: Standing) -> Page:
    failures = [f"{outcome.cell} failed: {outcome.reason}" for outcome in standing.failed]
    return replace(page, opening=f"{page.opening} {_words(standing)}", remarks=[*page.remarks, *failures])


def _words(standing: Standing) -> str:
    """Return how many cells are finished and failed, and the time left."""
    ended = len(standing.outcomes) - len(standing.failed)
    left = f", about {duration(standing.seconds_left)} left" if standing.seconds_left else ""
    failed = f", {len(standing.failed)} failed" if standing.failed else ""
    return f"{ended} of {standing.total} cells are finished{failed}{left}."


def _finished(folder: StudyFolder, cells: Sequence[Cell]) -> list[Outcome]:
    """Return the outcomes of the cells that are finished, wherever they were trained."""
    outcomes = [Outcome(cell.name, "earlier") for cell in cells if is_done(folder.cell(cell.name))]
    if not outcomes:
        raise ConfigError(f"--no-run: {folder.path} has no finished cell; run the study first, or give its --name")
    return outcomes


def refuse_failed(folder: StudyFolder, outcomes: Sequence[Outcome]) -> None:
    """Raise where cells failed, when all others have their numbers."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        names = ", ".join(outcome.cell for outcome in failed[:5]) + (", ..." if len(failed) > 5 else "")
        raise CannotContinue(
            f"{len(failed)} of {len(outcomes)} cells failed ({names}); the reason of the first: {failed[0].reason};"
            f" {folder.page} names all, the same command tries them again"
        )
