"""Scores and losses over rounds are drawn in a panel per task, and sparsity in one where weights were pruned."""

from __future__ import annotations

from fedmtl.report.charts import Frame, Line, Mark, line_chart, padded
from fedmtl.report.formats import percent, score
from fedmtl.report.markup import Html, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run, Series, average, main_metric, series, summarize
from fedmtl.report.results import task_name
from fedmtl.report.sharing import task_weights
from fedmtl.runs.events import Zeros

SMALLEST_SPAN = 0.05
_SPARSITY_RIGHT = 62.0
# These lie in -1..1 as the main metrics do; r2 may start at -20 and would flatten every other line.
_BOUNDED = ("accuracy", "f1", "matthews", "pearson", "spearman")
SMALLEST_SCORE_SPAN = 0.1
SMALLEST_LOSS_SPAN = 0.02
_RIGHT = 66.0
MOST_LINES = 8


def sparsity(run: Run) -> Html:
    """The share of zeros by round, in linear layers and in all weights; nothing where none were pruned."""
    if not run.pruned:
        return Html()
    by_round = sorted(run.pruned.items())
    lines = [
        Line("all", {at: _share(event.all) for at, event in by_round}, light=True),
        Line("linear", {at: _share(event.linear) for at, event in by_round}, light=False),
    ]
    last = run.pruned[max(run.pruned)]
    ends = f"{percent(_share(last.linear))} of the linear layers, {percent(_share(last.all))} of all weights"
    known = [value for line in lines for value in line.scores.values() if value is not None]
    frame = Frame(x=(0, max(run.last_round, 1)), y=padded(known, SMALLEST_SPAN), height=200, right=_SPARSITY_RIGHT)
    caption = tag("figcaption", tag("b", "Sparsity"), f"zero: {ends}")
    words = f"At the end: {ends}."
    return tag(
        "figure", caption, line_chart(frame, lines, title="Share of zeros by round", description=words, axis="round")
    )


def _share(counts: Zeros) -> float:
    return counts.zeros / counts.weights if counts.weights else 0.0


def curves(run: Run) -> Html:
    if not run.last_round:
        return section("curves", tag("p", "No round was finished, so there is nothing to draw."))
    panels = [_panel(run, task) for task in run.tasks]
    panels += [task_weights(run), sparsity(run)]
    words = (
        "The strong line is the main metric, the light ones are other metrics on the same scale; the ring is "
        "the best round. Below, the loss in training (strong) and validation (light). Each panel has its own "
        "scale."
    )
    return section("curves", tag("p", words, class_="guide"), tag("div", *panels, class_="panels"))


def _panel(run: Run, task: str) -> Html:
    metric = main_metric(run, task)
    final = summarize(series(run, task, metric)).final
    caption = tag("figcaption", tag("b", task_name(run, task)), f"{metric} {score(final)}")
    return tag("figure", caption, _scores(run, task, metric), _losses(run, task))


def overview(run: Run) -> Html:
    """Every task's main metric and their mean by round in one picture; nothing for one task or without rounds."""
    if not run.last_round or len(run.tasks) < 2:
        return Html()
    # Of many tasks the names at the lines' ends would cover each other.
    lines = [Line(_short(task), series(run, task, main_metric(run, task)), light=True) for task in run.tasks]
    if len(lines) > MOST_LINES:
        lines = [Line("classific.", average(run, "classification"), light=True)]
    lines.append(Line("overall", average(run, "overall")))
    final = summarize(lines[-1].scores).final
    caption = tag("figcaption", tag("b", "All tasks by round"), f"overall {score(final)}")
    return tag("figure", caption, _score_chart(run, lines, "Main metrics of all tasks", [], "round"))


def _short(task: str) -> str:
    return task if len(task) <= 10 else f"{task[:9]}…"


def _scores(run: Run, task: str, metric: str) -> Html:
    evaluated = {name for event in run.evaluations.get(task, {}).values() for name in event.metrics}
    others = [name for name in _BOUNDED if name in evaluated and name != metric]
    lines = [Line(name, series(run, task, name), light=True) for name in others]
    lines.append(Line(metric, series(run, task, metric)))
    return _score_chart(run, lines, f"{task}: {metric} by round", _marks(run, task))


def _score_chart(run: Run, lines: list[Line], title: str, marks: list[Mark], axis: str = "") -> Html:
    ring = _best(lines[-1].scores)
    if not (lines := _drawable(lines)):
        return tag("p", f"{title}: never defined, so there is no curve.", class_="guide")
    y = padded(_values(lines), SMALLEST_SCORE_SPAN)
    frame = Frame(
        x=(0, run.last_round),
        y=y,
        height=200,
        right=_RIGHT,
        top=26 if marks else 12,
        bottom=30 if axis else 18,
    )
    words = _describe(lines[-1])
    return line_chart(frame, lines, title=title, description=words, marks=marks, ring=ring, axis=axis)


def _losses(run: Run, task: str) -> Html:
    training = {at: event.losses.get(task) for at, event in run.rounds.items() if at > 0}
    validation = {at: event.loss for at, event in run.evaluations.get(task, {}).items()}
    title = f"{task}: loss by round"
    if not (lines := _drawable([Line("validation", validation, light=True), Line("training", training)])):
        return tag("p", f"{title}: not recorded.", class_="guide")
    y = padded(_values(lines), SMALLEST_LOSS_SPAN)
    frame = Frame(x=(0, run.last_round), y=y, height=112, right=_RIGHT, top=8, bottom=30)
    return line_chart(frame, lines, title=title, description=_describe(lines[-1]), axis="round")


def _drawable(lines: list[Line]) -> list[Line]:
    return [line for line in lines if any(value is not None for value in line.scores.values())]


def _values(lines: list[Line]) -> list[float]:
    return [value for line in lines for value in line.scores.values() if value is not None]


def _best(scores: Series) -> tuple[int, float] | None:
    summary = summarize(scores)
    return None if summary.best_round is None or summary.best is None else (summary.best_round, summary.best)


def _describe(line: Line) -> str:
    known = {at: value for at, value in line.scores.items() if value is not None}
    first, last = min(known), max(known)
    return f"{line.name} is {score(known[first])} at round {first} and {score(known[last])} at round {last}."


def _marks(run: Run, task: str) -> list[Mark]:
    marks = []
    trained = [at for at, event in run.rounds.items() if event.tasks.get(task)]
    if trained and min(trained) > 1:
        marks.append(Mark(min(trained), "joins"))
    if task in run.stops:
        marks.append(Mark(run.stops[task].round, f"stopped, best round {run.stops[task].best_round}"))
    return marks
