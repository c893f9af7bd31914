"""How far a grid is: in words, for whoever writes as cells end, and at the end where cells failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedmtl.errors import CannotContinue
from fedmtl.report.formats import duration
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Cell, Outcome, Standing, run_grid
from fedmtl.study.record import Keep


def standing_words(standing: Standing) -> str:
    """How many cells are finished and failed, and the time left."""
    ended = len(standing.outcomes) - len(standing.failed)
    left = f", about {duration(standing.seconds_left)} left" if standing.seconds_left else ""
    failed = f", {len(standing.failed)} failed" if standing.failed else ""
    return f"{ended} of {standing.total} cells are finished{failed}{left}."


def failure_words(standing: Standing) -> list[str]:
    """A line for every cell that failed."""
    return [f"{outcome.cell} failed: {outcome.reason}" for outcome in standing.failed]


def as_cells_end(write: Callable[[Standing], None], watch: Callable[[Standing], None]) -> Callable[[Standing], None]:
    """A watcher of a grid that writes when there is something new, before it lets others watch."""
    ended = -1

    def follow(standing: Standing) -> None:
        nonlocal ended
        if len(standing.outcomes) > ended:
            ended = len(standing.outcomes)
            write(standing)
        watch(standing)

    return follow


def run_written(
    folder: StudyFolder,
    cells: Sequence[Cell],
    at_once: int,
    write: Callable[[Standing], None],
    watch: Callable[[Standing], None],
    keep: Keep,
) -> list[Outcome]:
    """Run a grid and write after each cell; cells that failed are an error when all others have their numbers."""
    outcomes = run_grid(folder, cells, at_once, as_cells_end(write, watch), keep)
    refuse_failed(folder, outcomes)
    return outcomes


def refuse_failed(folder: StudyFolder, outcomes: Sequence[Outcome]) -> None:
    """Raise where cells failed, when all others have their numbers."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        names = ", ".join(outcome.cell for outcome in failed[:5]) + (", ..." if len(failed) > 5 else "")
        raise CannotContinue(
            f"{len(failed)} of {len(outcomes)} cells failed ({names}), the first thus: {failed[0].reason};"
            f" {folder.page} names all, the same command tries them again"
        )
