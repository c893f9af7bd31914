"""What the final model gets wrong, task by task."""

from __future__ import annotations

from .confusion import WIDE_TABLES, confusion
from .contents import section
from .markup import Html, tag
from .record import Run
from .residuals import residuals
from .results import last_evaluation, task_name


def predictions(run: Run) -> Html:
    panels = [panel for task in run.tasks if (panel := _panel(run, task))]
    guide = "From the last evaluation. Rows: true labels; columns: predicted; small print: share of the row."
    if not panels:
        return section("errors", tag("p", "No predictions were recorded."))
    return section("errors", tag("p", guide, class_="guide"), tag("div", *panels, class_="panels"))


def _panel(run: Run, task: str) -> Html | None:
    event = last_evaluation(run, task)
    if event.get("confusion"):
        inside = confusion(task, run.task(task).get("labels") or (), event["confusion"])
    elif event.get("residuals") or event.get("moments"):
        inside = residuals(task, event)
    else:
        return None
    caption = tag("figcaption", tag("b", task_name(run, task)), f"round {event['round']}")
    width = "wide" if len(event.get("confusion") or ()) in WIDE_TABLES else None
    return tag("figure", caption, inside, class_=width)
