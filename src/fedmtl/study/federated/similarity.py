"""The printed scores beside ours under their true names, and whether similarity ends at its best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedmtl.study.federated.cells import BASE, CENTRALIZED, FEDERATED, LONG, ORIGINAL
from fedmtl.study.federated.report import NOTES, PRINTED, WHY
from fedmtl.study.federated.results import Result, difference, over_seeds
from fedmtl.study.federated.tables import Known
from fedmtl.study.measures import Spread
from fedmtl.study.tables import Column, Table, Value

# Scores go from 0 to 5; what the comparison printed is of scores divided by 5.
SQUARED_RANGE = 25.0


def printed_table(known: Known) -> Table | None:
    """What was printed and what is ours, each with what was scored and how."""
    sentiment, paraphrase, similarity = known.tasks
    columns = (
        Column("model", "model", "words"), Column("scored on", "scored_on", "words"),
        Column(f"{sentiment} accuracy", "sentiment_accuracy"), Column(f"{paraphrase} accuracy", "paraphrase_accuracy"),
        Column(f"{similarity} Pearson", "similarity_pearson"),
        Column(f"{similarity} max(0, 1 − MSE), scores/5", "similarity_closeness"),
    )  # fmt: skip
    printed: list[tuple[Value, ...]] = [
        (row.words, row.how, *map(_plain, (row.sentiment, row.paraphrase, row.pearson, row.closeness)))
        for row in PRINTED
    ]
    ours = _ours(known)
    return Table("table7", "Table 7: the printed scores, and ours", columns, (*printed, *ours), NOTES) if ours else None


def _ours(known: Known) -> list[tuple[Value, ...]]:
    named = [(ORIGINAL, FEDERATED), (ORIGINAL, CENTRALIZED), (LONG, FEDERATED), (BASE, FEDERATED), (BASE, CENTRALIZED)]
    rows: list[tuple[Value, ...]] = []
    for setup in (found for point, kind in named if (found := known.named(point, kind)) is not None):
        words = f"ours: {setup.kind}, {setup.point.words}"
        if setup.point.name == ORIGINAL:
            rows.append(_row(f"{words}, best", "dev, best round of each", setup.name, known, _best_of))
        rows.append(_row(words, "dev, last round", setup.name, known, known.score_of))
    constant = _constant(known)
    if rows and constant is not None:
        rows.append(("the mean score for every pair", "dev", None, None, None, _plain(constant)))
    return rows


def _row(
    words: str, how: str, name: str, known: Known, measure: Callable[[str], Callable[[Result], float | None]]
) -> tuple[Value, ...]:
    scores = [over_seeds(known.results, name, measure(task)) for task in known.tasks]
    is_best = measure is _best_of
    closeness = None if is_best else over_seeds(known.results, name, lambda one: closeness_of(one, known.tasks[-1]))
    return (words, how, *scores, closeness)


def _best_of(task: str) -> Callable[[Result], float | None]:
    def best(result: Result) -> float | None:
        found = result.best(task)
        return None if found is None else found[1]

    return best


def closeness_of(result: Result, task: str) -> float | None:
    """max(0, 1 - MSE) of scores divided by 5, after the last round."""
    mse = result.metrics.get(task, {}).get("mse")
    return None if mse is None else max(0.0, 1 - mse / SQUARED_RANGE)


def _constant(known: Known) -> float | None:
    """The same of the validation examples' own mean: R² says how much of their variance the MSE is."""
    cells = [one for own in known.results.values() for one in own.values() if one is not None and not one.clients]
    for cell in cells:
        told = cell.metrics.get(known.tasks[-1], {})
        mse, r2 = told.get("mse"), told.get("r2")
        if mse is not None and r2 is not None and r2 < 1:
            return 1 - mse / (1 - r2) / SQUARED_RANGE
    return None


def ends_table(known: Known) -> Table | None:
    """Every run of many rounds: similarity after the last round beside its highest of any."""
    columns = (
        Column("run", "cell", "words"), Column("task", "task", "words"), Column("final", "final"),
        Column("best", "best"), Column("best round", "best_round", "words"), Column("rounds", "rounds", "words"),
        Column("final − best, points", "points", "number"),
    )  # fmt: skip
    rows = [row for setup in known.setups if setup.point.name in (LONG, ORIGINAL)
            for row in _ends(list(known.results.get(setup.name, {}).values()), known.regressions)]  # fmt: skip
    return Table("table8", "Table 8: does similarity end at its best?", columns, tuple(rows), WHY) if rows else None


def _ends(cells: Sequence[Result | None], tasks: Sequence[str]) -> list[tuple[Value, ...]]:
    made: list[tuple[Value, ...]] = []
    for cell in (cell for cell in cells if cell is not None):
        for task in tasks:
            final, best = cell.score(task), cell.best(task)
            if final is None or best is None:
                continue
            points = _plain(difference(final, best[1]))
            ends = (str(best[0]), str(max(cell.curves[task])))
            made.append((cell.cell, task, _plain(final), _plain(best[1]), *ends, points))
    return made


def _plain(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, None, 1)
