"""Pictures of a study of compression: what is left of each score, and what a model costs beside what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from fedmtl.compress.measure.measured import Measured, Teacher, Timing, Variant
from fedmtl.report.charts import Bar, Frame, bar_chart, bar_range
from fedmtl.report.formats import percent
from fedmtl.report.markup import Html, join, tag
from fedmtl.report.variants_plot import PLOT_STYLE, variants_plot
from fedmtl.study.compression.cells import AUGMENTED, TEACHER
from fedmtl.study.compression.report import SLIDES
from fedmtl.study.compression.results import beside, retained, retention
from fedmtl.study.compression.sizes import LOAD, Size, Sizes
from fedmtl.study.compression.tables import Known
from fedmtl.tasks.metrics import Scores

STYLE = " ".join(f".bar .class{n} {{ fill: var(--c) }}" for n in range(7)) + PLOT_STYLE


def make_figures(rows: Mapping[int, Sequence[str]], known: Known, sizes: Sizes) -> dict[str, tuple[str, Html]]:
    """By file name a title and a picture, as far as cells are finished."""
    pictures: dict[str, tuple[str, Html]] = {}
    series = _series(rows, known)
    if series:
        title = "What is left of the teacher's score, by task"
        pictures["retention"] = (title, _retention(title, series, known.tasks))
    variants = [_variant(row, known) for row in sizes.rows]
    above = next((one for one in variants if one.variant.name == TEACHER), None)
    teacher = Teacher(TEACHER, above.main_scores) if above else None
    picture = variants_plot(variants, LOAD, teacher) if variants else Html()
    if picture:
        pictures["size-latency-accuracy"] = ("Size, latency and what is left of the scores", picture)
    return pictures


def _variant(row: Size, known: Known) -> Measured:
    """What was measured, with the scores of the model's cell."""
    named = row.setup if row.form == "fedmtl" else f"{row.setup}/{row.form}"
    variant = Variant(named, Path(), "fedmtl" if row.form == "fedmtl" else "onnx")
    timing = Timing(LOAD.threads[0], row.median, row.p95, row.per_second)
    scores = {
        task: Scores({known.metrics[task]: value}, {}, None, None, 0)
        for task, value in row.scores.items()
        if task in known.metrics
    }
    return Measured(
        variant, row.bytes, row.compressed_bytes, row.parameters, row.flops, row.peak_bytes, (timing,), scores,
        dict(known.metrics),
    )  # fmt: skip


def _series(rows: Mapping[int, Sequence[str]], known: Known) -> dict[str, dict[str, float]]:
    """The best student of each shape, the one that had only labels, and the slides'."""
    large, small = str(known.shapes.large), str(known.shapes.small)
    students = [name for own in rows.values() for name in own if name != TEACHER]
    kinds = {
        f"best {large}": [name for name in students if name.startswith(f"{large}-") and _is_taught(name)],
        f"best {small}": [name for name in students if name.startswith(f"{small}-")],
        f"{large}, labels alone": [name for name in students if name == f"{large}-labels-long"],
    }
    found = {words: _left(best, known) for words, names in kinds.items() if (best := _best(names, known))}
    theirs = {task: retention(SLIDES.student.get(task), SLIDES.teacher.get(task)) for task in known.tasks}
    shown = {task: left for task, left in theirs.items() if left is not None}
    return {**found, "slides": shown} if found and shown else found


def _is_taught(name: str) -> bool:
    return name.removesuffix(AUGMENTED).endswith(("-teacher", "-random"))


def _best(names: Sequence[str], known: Known) -> str | None:
    """The setup with the best mean retention, over the tasks on which the teacher has any score to lose."""
    left = {name: list(_left(name, known).values()) for name in dict.fromkeys(names)}
    return max((name for name in left if left[name]), key=lambda name: (mean(left[name]), name), default=None)


def _left(name: str, known: Known) -> dict[str, float]:
    found = {
        task: beside(known.results, name, TEACHER, lambda one, over, task=task: retained(one, over, [task]))  # type: ignore[misc]
        for task in known.tasks
    }
    return {task: left.mean for task, left in found.items() if left is not None}


def _retention(title: str, series: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> Html:
    wide = 0.8 / len(series)
    bars = [
        Bar(
            at + 0.1 + n * wide,
            at + 0.1 + (n + 0.9) * wide,
            ((own[task], f"class{n}"),),
            f"{name}: {percent(own[task])}",
        )
        for at, task in enumerate(tasks)
        for n, (name, own) in enumerate(series.items())
        if task in own
    ]
    frame = Frame((0, len(tasks)), bar_range(bars), width=max(420, 90 * len(tasks) + 60), height=280, bottom=58)
    names = (
        tag("text", task, class_="x", x=frame.across(at + 0.5), y=frame.floor + 14) for at, task in enumerate(tasks)
    )
    legend = (
        tag(
            "text",
            name,
            class_=f"named class{n}",
            x=frame.left + n * (frame.width - 60) / len(series),
            y=frame.height - 10,
        )
        for n, name in enumerate(series)
    )
    words = "; ".join(
        f"{name}: {', '.join(f'{task} {percent(value)}' for task, value in own.items())}"
        for name, own in series.items()
    )
    return bar_chart(
        frame, bars, title=title, description=words, axis=join((*names, *legend)), label=lambda value: f"{value:.0%}"
    )
