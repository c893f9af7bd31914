"""results.csv has one row a round, and all of it can be recomputed from events.jsonl."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.runs.event_lines import Event, first_of, plain, round_of
from fedmtl.runs.events import EndEvent, EvaluationEvent, RoundEvent, StartEvent, TaskFacts
from fedmtl.runs.files import append_bytes, write_atomic
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import Line, read_events, read_lines, write_lines

METRICS = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman", "mse", "rmse", "mae", "r2"),
}
_ROUND_COLUMNS = (
    "round",
    "overall",
    "classification",
    "clients",
    "failures",
    "bytes_up",
    "bytes_down",
    "seconds",
)


def cut_back(run: RunFolder, round: int) -> None:
    """Drop what events.jsonl and results.csv say of later rounds and of the end, as if they never were."""
    lines = [line for line in read_lines(run) if _is_before(line, round)]
    write_lines(run, lines)
    events = [line.event for line in lines]
    if first_of(events, StartEvent):
        write_atomic(run.results, _encoded(results_table(events)))


def _is_before(line: Line, round: int) -> bool:
    """Whether a line stays when a run goes on after that round."""
    number = round_of(line.event)
    return not isinstance(line.event, EndEvent) and (number is None or number <= round)


def append_results(run: RunFolder, events: Sequence[Event]) -> None:
    """Add a round's row to results.csv, from its `round` and `evaluation` events.

    The first row comes with the header, which needs the `start` event in events.jsonl.
    """
    columns, header = _columns(run), ""
    if columns is None:
        columns = result_columns(read_events(run))
        header = _csv_line(columns)
    append_bytes(run.results, _encoded(header + _csv_line(results_row(events, columns))))


def _columns(run: RunFolder) -> list[str] | None:
    """The header of results.csv; None where there is none yet."""
    try:
        with run.results.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), None)
    except FileNotFoundError:
        return None
    except (csv.Error, UnicodeDecodeError) as error:
        raise FedmtlError(f"{run.results}: is not our table; delete it, the next resume writes it anew") from error


def results_table(events: Sequence[Event]) -> str:
    """The whole of results.csv, from the events of a run."""
    columns = result_columns(events)
    by_round: dict[int, list[Event]] = {}
    for event in events:
        if isinstance(event, RoundEvent | EvaluationEvent):
            by_round.setdefault(event.round, []).append(event)
    closed = [events for events in by_round.values() if first_of(events, RoundEvent)]
    return _csv_line(columns) + "".join(_csv_line(results_row(events, columns)) for events in closed)


def result_columns(events: Iterable[Event]) -> list[str]:
    """The columns of results.csv: fixed by the tasks of the `start` event."""
    start = first_of(events, StartEvent)
    if start is None:
        raise FedmtlError("events.jsonl: has no `start`, which says what was run; put back a copy of the file")
    columns = list(_ROUND_COLUMNS)
    for name, task in start.tasks.items():
        columns += [f"{name}.{metric}" for metric in task_metrics(task)] + [f"{name}.train_loss"]
    return columns


def task_metrics(task: TaskFacts) -> Sequence[str]:
    """A task's metrics; a kind of task that is not built in names them in its `start`, or at least its main one."""
    return METRICS.get(task.kind) or task.metrics or ([task.metric] if task.metric else [])


def results_row(events: Iterable[Event], columns: Sequence[str]) -> list[str]:
    """One round's values in the order of the columns; undefined and not evaluated are empty."""
    values: dict[str, Any] = {}
    for event in events:
        if isinstance(event, RoundEvent):
            values |= {name: getattr(event, name) for name in _ROUND_COLUMNS}
            values |= {f"{task}.train_loss": loss for task, loss in event.losses.items()}
        elif isinstance(event, EvaluationEvent):
            values |= {f"{event.task}.{metric}": value for metric, value in event.metrics.items()}
    found = plain(values)
    return ["" if found.get(column) is None else str(found[column]) for column in columns]


def _encoded(table: str) -> bytes:
    # A JSON string may have half a surrogate pair, which no encoding can write.
    return table.encode("utf-8", "replace")


def _csv_line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
