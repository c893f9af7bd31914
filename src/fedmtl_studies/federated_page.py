"""The study of federated against centralized, shown: modes compared, gains of clients, printed scores, and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import mean

from fedmtl_studies.federated_results import (
    BASE,
    CENTRALIZED,
    FEDERATED,
    LOCAL,
    LONG,
    MODES,
    ORIGINAL,
    PRINTED,
    PRINTED_NOTES,
    VARIANTS,
    WHY,
    WORDS,
    Gain,
    Known,
    Point,
    Result,
    Setup,
    difference,
    gains,
    overall,
    points_above,
    shared_setups,
)
from fedmtl_studies.figures import Figures, colour, curves
from fedmtl_studies.library import Frame, Html, padded, score, svg, tag, y_axis
from fedmtl_studies.page import Column, Page, Table, Value, cells_csv, csv_text, metric_columns
from fedmtl_studies.results import Spread, finished, over_seeds, seconds_notes, single

GUIDE = (
    "Scores are of the dev sets, after the last round. Every mode trains on the same examples, as often: rounds times"
    " local epochs. The points are a base (all samples, iid, three clients per task) and lines through it, not their"
    " whole product; all five modes stand at each. Distances are in points, hundredths of a score, to centralized"
    " multi-task training with the same seed. Deviations are over seeds. Each mode may have a learning rate of its own,"
    " chosen on a split cut from train (`--choose`)."
)
CHOOSING = (
    "Every mode with every learning rate, on a tenth cut from train, at the base point: all samples, iid, three clients"
    " per task. Nothing here has seen a dev set, but for --quick, whose texts are made up."
)
CONFIG_GUIDE = (
    "The config's tasks, sources and clients in five modes. Scores are of its validation examples after the last round."
    " Every mode trains on the same examples, as often: rounds times local epochs. Distances are in points, hundredths"
    " of a score, to centralized multi-task training with the same seed. Deviations are over seeds. All modes have the"
    " config's learning rate; one place usually wants a smaller one than a federation (`--rate centralized*=X`)."
)
TITLES = {
    1: "Table 1: all samples, iid, three clients per task",
    2: "Table 2: skewed labels",
    3: "Table 3: samples per client",
    4: "Table 4: one or three clients per task",
    6: "Table 6: other federations",
}
NOTES = {
    1: (
        "Examples are those seen by all clients together: every mode sees the same ones as often. Steps are those of"
        " all clients; in a row are those of the client that makes most.",
        "Local is the mean of the clients' own models, each scored on all validation examples of its task.",
        "Where nothing is averaged, the optimizer is kept from round to round.",
    ),
    2: ("In one place it does not matter how examples were dealt: centralized rows are those of the base.",),
    3: ("A task has three clients; 300 samples a client are 900 examples of each task.",),
    4: (
        "Local with one client per task is a model for each task on all its examples, as centralized single-task.",
        "Centralized rows of one client per task are those of the base.",
    ),
    6: ("Each as the federation of its point but for what is named; rates are in the table of cells.",),
}
GAIN_NOTES = (
    "A client's own model and the shared one are scored on the same validation examples of its task, after the last"
    " round. Above is of all clients of all finished seeds; gains are in points. A client whose own score is undefined"
    " is not counted. The last column: yes is with every seed, else the mean of a client's seeds decides; what a"
    " client has is dealt anew with every seed.",
    "With one client per task, local is trained on all examples of the task.",
)
# Scores go from 0 to 5; what the comparison printed is of scores divided by 5.
SQUARED_RANGE = 25.0
STYLE = """
.seen { fill: var(--c); fill-opacity: .55 } .mean { stroke: var(--c); stroke-width: 2.5 }
.nought { stroke: var(--quiet); stroke-dasharray: 3 3 } svg text.turned { text-anchor: end }
"""
# Names that fit beside a curve and under a column.
SHORT = {"federated-single-task": "fed. single", "centralized-single-task": "centr. single"}


def show(opening: str, guide: str, points: Mapping[int, Sequence[str]], known: Known) -> Page:
    """Return everything that can be shown of the cells that are finished; `points` are those of each table."""
    return Page(
        opening=opening,
        guide=guide,
        tables=make_tables(points, known),
        figures=make_figures(known),
        sheets={"cells": _cells(known), "clients": clients_csv(known)},
        style=STYLE,
        answer=answer(known),
    )


def answer(known: Known) -> str:
    """Return in a sentence how far a federation is from one place and from each client alone, at the first point."""
    point = next((setup.point for setup in known.setups if setup.kind == FEDERATED), None)
    reached = None if point is None else _mean_at(known, point, FEDERATED)
    if point is None or reached is None or point.rate is not None:
        return ""
    seeds = "one seed" if reached.count == 1 else f"means over {reached.count} seeds"
    words = (
        f"One federated model has a mean score of {score(reached.mean)} over {', '.join(known.tasks)}"
        f" ({point.words}; {seeds})"
    )
    others = {
        CENTRALIZED: "the same data in one place",
        "federated-single-task": "federations of one task each",
        LOCAL: "the clients alone",
    }
    distances = [
        f"{_distance(reached.mean - other.mean)} {name} ({score(other.mean)})"
        for kind, name in others.items()
        if (other := _mean_at(known, point, kind)) is not None
    ]
    return f"{words}: {', '.join(distances)}." if distances else f"{words}."


def _mean_at(known: Known, point: Point, kind: str) -> Spread | None:
    setup = known.named(point.name, kind)
    return None if setup is None else _overall(setup, known)


def _distance(value: float) -> str:
    """Return a difference of scores in points, in words that stand before what it is compared with."""
    points = f"{abs(100 * value):.1f}"
    return "level with" if points == "0.0" else f"{points} points {'above' if value > 0 else 'below'}"


def make_tables(points: Mapping[int, Sequence[str]], known: Known) -> list[Table]:
    """Return the tables that have a row, in the order of their numbers; without points that of learning rates."""
    if not points:
        return [rates_table(known)]
    compared = {number: compared_table(number, names, known) for number, names in points.items()}
    numbered = {**compared, 5: gain_table(known)}
    if not any(setup.point.is_given for setup in known.setups):
        numbered |= {7: printed_table(known), 8: ends_table(known)}
    return [table for _, table in sorted(numbered.items()) if table is not None]


def _cells(known: Known) -> str:
    """Return a row for every finished cell, with all metrics of its tasks; where clients are alone, of all answers."""
    # Several setups may show one cell.
    cells = list({cell.cell: cell for cell in finished(known.results)}.values())
    costs = ("learning_rate", "examples", "steps", "steps_in_a_row", "seconds", "computed", "cells_at_once")
    columns: dict[str, Callable[[Result], object]] = {"cell": lambda cell: cell.cell}
    for task in known.tasks:
        columns |= _end_columns(task)
    columns |= metric_columns(cells, known.tasks)
    return cells_csv(cells, columns | {name: attrgetter(f"budget.{name}") for name in costs})


def _end_columns(task: str) -> dict[str, Callable[[Result], object]]:
    return {
        f"{task}_score": lambda cell: cell.score(task),
        f"{task}_best": lambda cell: best[1] if (best := cell.best(task)) else None,
        f"{task}_best_round": lambda cell: best[0] if (best := cell.best(task)) else None,
    }


def compared_table(number: int, points: Sequence[str], known: Known) -> Table | None:
    """Return every mode at these points, with its distance to centralized; None where no row is wanted."""
    kinds = MODES if number != 6 else ("federated", *VARIANTS)
    rows = [setup for name in points for kind in kinds if (setup := known.named(name, kind)) is not None]
    if not rows or (number == 6 and not any(setup.kind in VARIANTS for setup in rows)):
        return None
    columns = [
        Column("point", "point", "words"), Column("mode", "kind", "words"),
        *(column for task, metric in known.metrics.items() for column in _score_columns(task, metric)),
        Column("mean", "mean"), Column("examples", "examples", "count"), Column("steps", "steps", "count"),
        Column("in a row", "steps_in_a_row", "count"), Column("training", "seconds", "seconds"),
        Column("computed", "computed", "words"),
    ]  # fmt: skip
    made = tuple(_row(setup, known) for setup in rows)
    title = f"Table {number}: {rows[0].point.words}" if rows[0].point.is_given else TITLES[number]
    return Table(f"table{number}", title, tuple(columns), made, (*NOTES[number], *_seconds(rows, known)))


def _score_columns(task: str, metric: str) -> tuple[Column, Column]:
    return (
        Column(f"{task} {metric}", f"{task}_{metric}"),
        Column(f"{task}, points to centralized", f"{task}_to_centralized", "number"),
    )


def _row(setup: Setup, known: Known) -> tuple[Value, ...]:
    results, tasks = known.results, known.tasks
    other = f"{setup.point.name}-{CENTRALIZED}"
    words = WORDS.get(setup.kind)
    values: list[Value] = [setup.point.words, f"{setup.kind}: {words}" if words else setup.kind]
    for task in tasks:
        values.append(over_seeds(results, setup.name, known.score_of(task)))
        is_same = setup.kind == CENTRALIZED
        values.append(None if is_same else points_above(results, setup.name, other, known.score_of(task)))
    budget = [
        over_seeds(results, setup.name, measure)
        for measure in (
            lambda one: float(one.budget.examples),
            lambda one: float(one.budget.steps),
            lambda one: float(one.budget.steps_in_a_row),
            lambda one: one.budget.seconds,
        )
    ]
    first = next((one for one in results.get(setup.name, {}).values() if one is not None), None)
    whole = over_seeds(results, setup.name, lambda one: overall(one, tasks))
    return (*values, whole, *budget, first.budget.computed if first else None)


def _seconds(rows: Sequence[Setup], known: Known) -> list[str]:
    cells = finished(known.results, [setup.name for setup in rows])
    return seconds_notes(cell.budget.cells_at_once for cell in cells)


def rates_table(known: Known) -> Table:
    """Return every kind with every rate it was tried with, and the line that says which to take."""
    columns = (
        Column("mode", "kind", "words"), Column("learning rate", "learning_rate", "words"),
        *(Column(f"{task} {metric}", f"{task}_{metric}") for task, metric in known.metrics.items()),
        Column("mean", "mean"), Column("", "is_best", "words"),
    )  # fmt: skip
    best = best_rates(known)
    made = [
        (
            setup.kind, f"{setup.point.rate:g}",
            *(over_seeds(known.results, setup.name, known.score_of(task)) for task in known.tasks),
            _overall(setup, known), "best" if best.get(setup.kind) == setup.point.rate else None,
        )
        for kind in dict.fromkeys(setup.kind for setup in known.setups)
        for setup in known.setups
        if setup.kind == kind
    ]  # fmt: skip
    notes = ["Scores are of a tenth cut from train; dev was not looked at."]
    if best:
        notes.append(f"Then: --rate {','.join(f'{kind}={rate:g}' for kind, rate in best.items())}")
    edges = [kind for kind, rate in best.items() if rate in _tried_ends(known)]
    notes += [f"At an end of what was tried: {', '.join(edges)}."] if edges else []
    return Table("rates", "Learning rates", columns, tuple(made), tuple(notes))


def _overall(setup: Setup, known: Known) -> Spread | None:
    return over_seeds(known.results, setup.name, lambda one: overall(one, known.tasks))


def _tried_ends(known: Known) -> tuple[float, ...]:
    tried = [setup.point.rate for setup in known.setups if setup.point.rate is not None]
    return (min(tried), max(tried)) if tried else ()


def best_rates(known: Known) -> dict[str, float]:
    """Return by kind the rate with the best mean of all tasks so far; of equal ones the smallest."""
    found: dict[str, dict[float, float]] = {}
    for setup in known.setups:
        reached = _overall(setup, known)
        if setup.point.rate is not None and reached is not None:
            found.setdefault(setup.kind, {})[setup.point.rate] = reached.mean
    return {kind: max(reached.items(), key=lambda one: (one[1], -one[0]))[0] for kind, reached in found.items()}


def gain_table(known: Known) -> Table | None:
    """Return for every shared model how many clients it is better for, and the least and the mean gain."""
    rows = shared_setups(known)
    if not rows:
        return None
    columns = [Column("point", "point", "words"), Column("mode", "kind", "words")]
    for task in known.tasks:
        columns += [
            Column(f"{task}: above", f"{task}_above", "words"),
            Column("smallest", f"{task}_smallest", "number"),
            Column("mean", f"{task}_mean", "number"),
        ]
    columns.append(Column("for every client", "every", "words"))
    made = tuple(_gain_row(setup, known) for setup in rows)
    return Table("table5", "Table 5: gain over local, by client", tuple(columns), made, GAIN_NOTES)


def _gain_row(setup: Setup, known: Known) -> tuple[Value, ...]:
    found = list(gains(known, setup))
    values: list[Value] = [setup.point.words, setup.kind]
    for task in known.tasks:
        points = [gain.points for gain in found if gain.task == task and gain.points is not None]
        above = f"{sum(one > 0 for one in points)} of {len(points)}"
        values += [above, single(min(points)), single(mean(points))] if points else [None, None, None]
    return (*values, _every(found))


def _every(found: Sequence[Gain]) -> str | None:
    """Say whether each client gains: with every seed, or on the mean of its seeds."""
    by_client: dict[tuple[str, str], list[float]] = {}
    for gain in found:
        if gain.points is not None:
            by_client.setdefault((gain.task, gain.client), []).append(gain.points)
    if not by_client:
        return None
    if all(min(points) > 0 for points in by_client.values()):
        return "yes"
    return "on the mean of seeds" if all(mean(points) > 0 for points in by_client.values()) else "no"


def clients_csv(known: Known) -> str:
    """Return a row for every client, seed and shared model."""
    return csv_text(
        ["point", "kind", "seed", "task", "client", "examples", "local", "shared", "points"],
        (
            [
                setup.point.name,
                setup.kind,
                gain.seed,
                gain.task,
                gain.client,
                gain.examples,
                gain.alone,
                gain.shared,
                gain.points,
            ]
            for setup in shared_setups(known)
            for gain in gains(known, setup)
        ),
    )


def printed_table(known: Known) -> Table | None:
    """Return what was printed and what is ours, each with what was scored and how."""
    sentiment, paraphrase, similarity = known.tasks
    columns = (
        Column("model", "model", "words"), Column("scored on", "scored_on", "words"),
        Column(f"{sentiment} accuracy", "sentiment_accuracy"), Column(f"{paraphrase} accuracy", "paraphrase_accuracy"),
        Column(f"{similarity} Pearson", "similarity_pearson"),
        Column(f"{similarity} max(0, 1 − MSE), scores/5", "similarity_closeness"),
    )  # fmt: skip
    printed: list[tuple[Value, ...]] = [
        (row.words, row.how, *map(single, (row.sentiment, row.paraphrase, row.pearson, row.closeness)))
        for row in PRINTED
    ]
    ours = _ours(known)
    return (
        Table("table7", "Table 7: the printed scores, and ours", columns, (*printed, *ours), PRINTED_NOTES)
        if ours
        else None
    )


def _ours(known: Known) -> list[tuple[Value, ...]]:
    named = [(ORIGINAL, FEDERATED), (ORIGINAL, CENTRALIZED), (LONG, FEDERATED), (BASE, FEDERATED), (BASE, CENTRALIZED)]
    rows: list[tuple[Value, ...]] = []
    for setup in (found for point, kind in named if (found := known.named(point, kind)) is not None):
        words = f"ours: {setup.kind}, {setup.point.words}"
        if setup.point.name == ORIGINAL:
            rows.append(_printed_row(f"{words}, best", "dev, best round of each", setup.name, known, _best_of))
        rows.append(_printed_row(words, "dev, last round", setup.name, known, known.score_of))
    constant = _constant(known)
    if rows and constant is not None:
        rows.append(("the mean score for every pair", "dev", None, None, None, single(constant)))
    return rows


def _printed_row(
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
    """Return max(0, 1 - MSE) of scores divided by 5, after the last round."""
    mse = result.metrics.get(task, {}).get("mse")
    return None if mse is None else max(0.0, 1 - mse / SQUARED_RANGE)


def _constant(known: Known) -> float | None:
    """Return the same for the mean of the validation examples: R² says how much of their variance the MSE is."""
    cells = [one for one in finished(known.results) if not one.clients]
    for cell in cells:
        metrics = cell.metrics.get(known.tasks[-1], {})
        mse, r2 = metrics.get("mse"), metrics.get("r2")
        if mse is not None and r2 is not None and r2 < 1:
            return 1 - mse / (1 - r2) / SQUARED_RANGE
    return None


def ends_table(known: Known) -> Table | None:
    """Return for every run of many rounds similarity after the last round beside its highest of any."""
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
            points = single(difference(final, best[1]))
            ends = (str(best[0]), str(max(cell.curves[task])))
            made.append((cell.cell, task, single(final), single(best[1]), *ends, points))
    return made


def make_figures(known: Known) -> Figures:
    """Return the figures, as far as cells are finished."""
    drawn = _of("modes", "Mean score of all tasks by mode, at the base; a dot is a seed", "mean", _mean_modes(known))
    for task, metric in known.metrics.items():
        drawn |= _of("modes", f"{task} {metric} by mode, at the base; a dot is a seed", task, _modes(task, known))
        drawn |= _rounds(task, metric, known)
        found = _client_gains(task, known)
        drawn |= _of("gains", f"{task}: points above local; a dot is a client", task, found, has_zero=True)
    return drawn


def _of(kind: str, title: str, task: str, columns: Mapping[str, Sequence[float]], *, has_zero: bool = False) -> Figures:
    return {f"{kind}-{task}": (title, dots(title, columns, has_zero=has_zero))} if columns else {}


def dots(title: str, columns: Mapping[str, Sequence[float]], *, has_zero: bool = False) -> Html:
    """Draw a column of dots for each name, a bar at their mean."""
    values = [value for listed in columns.values() for value in listed]
    span = padded([*values, 0.0], 2.0) if has_zero else padded(values, 0.02)
    wide = max(420.0, 46.0 * len(columns) + 60)
    frame = Frame((0, len(columns)), span, width=wide, height=300, left=76, bottom=100)
    drawn = [_column(frame, n, name, listed) for n, (name, listed) in enumerate(columns.items())]
    zero = tag("line", class_="nought", x1=frame.left, x2=frame.edge, y1=frame.up(0), y2=frame.up(0))
    words = "; ".join(f"{name}: mean {_words(mean(listed), has_zero)}" for name, listed in columns.items())
    return svg(frame, title, words, y_axis(frame, target=5), zero if has_zero else "", *drawn)


def _words(value: float, is_points: bool) -> str:
    return f"{value:.2f} points" if is_points else score(value)


def _column(frame: Frame, n: int, name: str, values: Sequence[float]) -> Html:
    x, middle, beside = frame.across(n + 0.5), frame.up(mean(values)), min(5, len(values))
    spots = [
        # Beside each other, so that equal ones are seen.
        tag("circle", class_="seen", cx=x + 5 * (number % beside - (beside - 1) / 2), cy=frame.up(value), r=3.2)
        for number, value in enumerate(values)
    ]
    bar = tag("line", class_="mean", x1=x - 14, x2=x + 14, y1=middle, y2=middle)
    low = frame.floor + 12
    label = tag("text", name, class_="turned", x=x, y=low, transform=f"rotate(-40 {x:.1f} {low:.1f})")
    return tag("g", *spots, bar, label, class_=colour(n))


def short(kind: str) -> str:
    return SHORT.get(kind, kind.removeprefix("federated-"))


def _finished_of(known: Known, setup: str) -> list[Result]:
    return finished(known.results, [setup])


def _modes(task: str, known: Known) -> dict[str, list[float]]:
    scores = {
        short(setup.kind): [value for one in _finished_of(known, setup.name) if (value := one.score(task)) is not None]
        for setup in known.at(BASE)
        if setup.kind in MODES
    }
    return {kind: values for kind, values in scores.items() if values}


def _mean_modes(known: Known) -> dict[str, list[float]]:
    scores = {
        short(setup.kind): [
            value for one in _finished_of(known, setup.name) if (value := overall(one, known.tasks)) is not None
        ]
        for setup in known.at(BASE)
        if setup.kind in MODES
    }
    return {kind: values for kind, values in scores.items() if values}


def _rounds(task: str, metric: str, known: Known) -> Figures:
    """Draw means over finished seeds by round, from round 1: before it a head is as it was made."""
    drawn: Figures = {}
    for point in (BASE, LONG, ORIGINAL):
        shown = [setup for setup in known.at(point) if setup.kind in MODES or point == LONG]
        lines = {short(setup.kind): _curve(_finished_of(known, setup.name), task) for setup in shown}
        title = f"{task} {metric} over rounds, {point}"
        picture = curves(title, lines, "round")
        if picture:
            drawn[f"rounds-{point}-{task}"] = (title, picture)
    return drawn


def _curve(cells: Sequence[Result], task: str) -> dict[int, float]:
    curves_ = [cell.curves.get(task, {}) for cell in cells]
    rounds = sorted({number for curve in curves_ for number in curve if number})
    found: dict[int, float] = {}
    for number in rounds:
        values = [curve.get(number) for curve in curves_]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[number] = mean(known)
    return found


def _client_gains(task: str, known: Known) -> dict[str, list[float]]:
    rows = [setup for setup in shared_setups(known) if setup.kind == FEDERATED]
    found = {
        setup.point.name: [gain.points for gain in gains(known, setup) if gain.task == task and gain.points is not None]
        for setup in rows
    }
    return {name: values for name, values in found.items() if values}
