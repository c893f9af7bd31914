"""Where each task's examples come from, and how many there are."""

from __future__ import annotations

from fedmtl.run_summary import passes

from .contents import section
from .formats import MISSING, count, number, percent, tick
from .labels import spell
from .markup import Html, join, table, tag
from .record import Event, Run
from .results import task_name


def datasets(run: Run) -> Html:
    if not run.data:
        return section("data", tag("p", "The run recorded no data."))
    rows = [(task_name(run, task), *_row(run, task, event)) for task, event in run.data.items()]
    head = ("Task", "Kind", "Source", "Train", "Passes", "Cut short", "Validation", "Labels in train")
    guide = (
        "“Passes” is how often the training examples, those of all clients together, were trained on."
        " “Cut short” counts training texts longer than the encoder reads."
    )
    return section(
        "data",
        table("Examples per task", head, rows, words={1, 2, 7}, class_="data"),
        tag("p", guide, class_="guide"),
    )


def _row(run: Run, task: str, event: Event) -> list[object]:
    about = run.task(task)
    validation: object = count(event.get("validation"))
    if event.get("validation_cut"):
        validation = join((validation, tag("small", "cut from train")), " ")
    return [
        about.get("kind", MISSING),
        event.get("source", MISSING),
        count(event.get("train")),
        _passes(run, task, event),
        _truncated(event),
        validation,
        _labels(about, event),
    ]


def _passes(run: Run, task: str, event: Event) -> str:
    found = passes(number(event.get("train")), run.rounds.values(), task)
    return MISSING if found is None else f"{found:.2f}"


def _truncated(event: Event) -> Html:
    cut, train = number(event.get("truncated")), number(event.get("train"))
    share = percent(cut / train) if cut and train else ""
    return join((count(cut), tag("small", share)), " ")


def _labels(about: Event, event: Event) -> str:
    if event.get("labels"):
        return spell(event["labels"])
    found = event.get("quantiles") or ()
    values = [number(value) for value in (found.values() if isinstance(found, dict) else found)]
    if not values:
        return MISSING
    span = about.get("score_range")
    within = f" on a scale of {span[0]:g} to {span[1]:g}" if span else ""
    words = ", ".join(MISSING if value is None else tick(value, 0.01) for value in values)
    return f"quantiles {words}{within}"
