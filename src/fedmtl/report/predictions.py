"""This section shows what the final model gets wrong: confusion matrices, residuals, scores by label and threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmtl.report.charts import Bar, Frame, Line, bar_chart, bar_range, line_chart, padded, svg, x_axis
from fedmtl.report.formats import count, score
from fedmtl.report.markup import Html, join, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run
from fedmtl.report.results import last_evaluation, task_name
from fedmtl.runs.events import Curves, EvaluationEvent, Residuals

MOST_CELLS = 12
WORST_PAIRS = 10

Counts = Sequence[Sequence[int]]
_COUNTS = ("true", "predicted", "right", "other_words")
_HEADS = {"other_words": "other words"}
MOST_LINES = 6
_ERRORS = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}


def confusion(task: str, labels: Sequence[str], counts: Counts) -> Html:
    """Rows are the true labels, columns the predicted ones; labels that do not fit are numbered."""
    names = [str(label) for label in labels] if len(labels) == len(counts) else [str(i) for i in range(len(counts))]
    return _table(task, names, counts) if len(counts) <= MOST_CELLS else _picture(task, names, counts)


def _table(task: str, names: Sequence[str], counts: Counts) -> Html:
    rows = [(name, *_cells(i, row), count(sum(row))) for i, (name, row) in enumerate(zip(names, counts, strict=True))]
    head = ("true", *names, "all")
    return table(f"{task}: confusion matrix", head, rows, class_="matrix")


def _cells(true: int, row: Sequence[int]) -> list[Html]:
    """Counts with their share of the row, shaded by it."""
    total = sum(row)
    cells = []
    for predicted, many in enumerate(row):
        share = many / total if total else 0.0
        look = "cell right" if predicted == true else "cell wrong"
        words = (count(many), tag("small", score(share) if total else ""))
        cells.append(tag("div", *words, class_=look, style=f"--share:{share * 45:.0f}%"))
    return cells


def _picture(task: str, names: Sequence[str], counts: Counts) -> Html:
    size = len(counts)
    frame = Frame(x=(0, size), y=(0, size), width=320, height=320, left=14, right=2, top=2, bottom=14)
    step = (frame.edge - frame.left) / size
    rects = []
    for true, row in enumerate(counts):
        for predicted, many in enumerate(row):
            if many:
                words = f"{names[true]} taken for {names[predicted]}: {count(many)} of {count(sum(row))}"
                shade = f"{max(0.12, many / sum(row)):.2f}"
                position = {"x": frame.left + predicted * step, "y": frame.top + true * step}
                look = "right" if true == predicted else "wrong"
                side = f"{step:.2f}"
                rects.append(
                    tag(
                        "rect",
                        tag("title", words),
                        class_=look,
                        fill_opacity=shade,
                        width=side,
                        height=side,
                        **position,
                    )
                )
    box = tag("rect", class_="box", x=frame.left, y=frame.top, width=step * size, height=step * size)
    axes = (
        tag("text", "predicted", class_="x", x=(frame.left + frame.edge) / 2, y=frame.height - 2.0),
        tag("text", "true", class_="x", transform=f"translate(9 {frame.height / 2:g}) rotate(-90)"),
    )
    title = f"{task}: confusion matrix of {size} labels"
    return join(
        (
            svg(frame, title, "Darker is a larger share of the true label.", *rects, box, *axes),
            _worst(names, counts),
        )
    )


def _worst(names: Sequence[str], counts: Counts) -> Html:
    pairs = [(many, i, j) for i, row in enumerate(counts) for j, many in enumerate(row) if i != j and many]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    rows = [(names[i], names[j], count(many), count(sum(counts[i]))) for many, i, j in pairs[:WORST_PAIRS]]
    return table("Most frequent confusions", ("True", "Predicted", "Times", "of"), rows, words={1})


def residuals(task: str, evaluation: EvaluationEvent) -> Html:
    """The histogram where residuals were recorded, and the errors where they are defined."""
    return join((_histogram(task, evaluation.residuals), _errors(evaluation.metrics)))


def _histogram(task: str, found: Residuals | None) -> Html:
    if found is None or not found.counts or len(found.edges) != len(found.counts) + 1:
        return tag("p", "No residuals were recorded.", class_="guide")
    edges, counts = found.edges, found.counts
    bars = [
        Bar(left, right, ((float(many), "up"),), f"{score(left)} to {score(right)}: {count(many)}")
        for left, right, many in zip(edges, edges[1:], counts, strict=False)
    ]
    frame = Frame(x=(edges[0], edges[-1]), y=bar_range(bars), height=170)
    words = f"{count(sum(counts))} residuals from {score(edges[0])} to {score(edges[-1])}."
    parts = [x_axis(frame, "residual", whole=False)]
    if edges[0] < 0 < edges[-1]:
        zero = frame.across(0)
        parts.append(tag("line", class_="mark", x1=zero, x2=zero, y1=frame.top - 6, y2=frame.floor))
    return bar_chart(frame, bars, title=f"{task}: residuals", description=words, axis=join(parts))


def _errors(metrics: Mapping[str, float | None]) -> Html:
    pairs = (
        tag("div", tag("dt", words), tag("dd", score(metrics[name])))
        for name, words in _ERRORS.items()
        if name in metrics
    )
    return tag("dl", *pairs, class_="facts errors")


def by_label(rows: Mapping[str, Mapping[str, float | None]]) -> Html:
    """Scores and counts of each label, the commonest first."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    ordered = sorted(rows, key=lambda label: -(rows[label].get("true") or 0))
    cells = [
        [label, *((count if name in _COUNTS else score)(rows[label].get(name)) for name in names)] for label in ordered
    ]
    return table("scores by label", ["label", *(_HEADS.get(name, name) for name in names)], cells)


def threshold_curves(task: str, found: Curves, rows: Mapping[str, Mapping[str, float | None]]) -> Html:
    """The F1 by threshold of all labels together, strong, and of the commonest ones, with the best of each."""
    at = [round(100 * threshold) for threshold in found.thresholds]
    commonest = sorted(found.labels, key=lambda label: -(rows.get(label, {}).get("true") or 0))[:MOST_LINES]
    lines = [Line(_short(label), dict(zip(at, found.labels[label], strict=False)), light=True) for label in commonest]
    whole = dict(zip(at, found.together.get("f1", []), strict=False))
    lines = [line for line in (*lines, Line("all", whole)) if any(value is not None for value in line.scores.values())]
    known = [value for line in lines for value in line.scores.values() if value is not None]
    if not known:
        return Html()
    best = max((value, -number) for number, value in whole.items() if value is not None) if whole else (0.0, 0)
    frame = Frame(x=(0, 100), y=padded(known, 0.1), height=200, right=84)
    words = f"All labels together are best at {-best[1]}%, with an F1 of {score(best[0])}."
    title = f"{task}: F1 by threshold"
    ring = (-best[1], best[0])
    return line_chart(frame, lines, title=title, description=words, ring=ring, axis="threshold (%)")


def _short(label: str) -> str:
    return label if len(label) <= 11 else f"{label[:10]}…"


def predictions(run: Run) -> Html:
    panels = [panel for task in run.tasks if (panel := _panel(run, task))]
    guide = "From the last evaluation. Rows: true labels; columns: predicted; small print: share of the row."
    if not panels:
        return section("errors", tag("p", "No predictions were recorded."))
    return section("errors", tag("p", guide, class_="guide"), tag("div", *panels, class_="panels flow"))


def _panel(run: Run, task: str) -> Html | None:
    event = last_evaluation(run, task)
    if event is not None and event.confusion:
        inside = confusion(task, event.confusion_names or run.task(task).labels or (), event.confusion)
        inside = join((inside, by_label(event.by_label))) if event.by_label else inside
    elif event is not None and (event.residuals or event.moments):
        inside = residuals(task, event)
    elif event is not None and event.by_label:
        inside = by_label(event.by_label)
        inside = join((threshold_curves(task, event.curves, event.by_label), inside)) if event.curves else inside
    else:
        return None
    caption = tag("figcaption", tag("b", task_name(run, task)), f"round {event.round}")
    # A table is as wide as its labels need, in a row with others where it fits; a picture takes any width.
    is_table = bool(event.by_label) or (bool(event.confusion) and len(event.confusion or ()) <= MOST_CELLS)
    return tag("figure", caption, inside, class_="natural" if is_table else None)
