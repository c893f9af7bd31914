"""results.csv has one row a round, and all of it can be recomputed from events.jsonl."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.runs.files import append_bytes, write_atomic
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import plain, read_events, write_events

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
    kept = [e for e in read_events(run) if e["event"] != "end" and e.get("round", -1) <= round]
    write_events(run, kept)
    if any(event["event"] == "start" for event in kept):
        write_atomic(run.results, results_table(kept).encode())


def append_results(run: RunFolder, events: Sequence[Mapping[str, Any]]) -> None:
    """Add a round's row to results.csv, from its `round` and `evaluation` events.

    The first row comes with the header, which needs the `start` event in events.jsonl.
    """
    columns, header = _columns(run), ""
    if columns is None:
        columns = result_columns(read_events(run))
        header = _csv_line(columns)
    append_bytes(run.results, (header + _csv_line(results_row(events, columns))).encode())


def _columns(run: RunFolder) -> list[str] | None:
    """The header of results.csv; None where there is none yet."""
    try:
        with run.results.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), None)
    except FileNotFoundError:
        return None
    except (csv.Error, UnicodeDecodeError) as error:
        raise FedmtlError(f"{run.results}: is not our table; delete it, the next resume writes it anew") from error


def results_table(events: Sequence[Mapping[str, Any]]) -> str:
    """The whole of results.csv, from the events of a run."""
    columns = result_columns(events)
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["event"] in ("round", "evaluation"):
            by_round.setdefault(event["round"], []).append(event)
    closed = [own for own in by_round.values() if any(event["event"] == "round" for event in own)]
    return _csv_line(columns) + "".join(_csv_line(results_row(own, columns)) for own in closed)


def result_columns(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of results.csv: fixed by the tasks of the `start` event."""
    start = next((event for event in events if event["event"] == "start"), None)
    if start is None:
        raise FedmtlError("events.jsonl: has no `start`, which says what was run; put back a copy of the file")
    columns = list(_ROUND_COLUMNS)
    for name, task in start.get("tasks", {}).items():
        columns += [f"{name}.{metric}" for metric in METRICS[task["kind"]]] + [f"{name}.train_loss"]
    return columns


def results_row(events: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """One round's values in the order of the columns; undefined and not evaluated are empty."""
    values: dict[str, Any] = {}
    for event in events:
        if event["event"] == "round":
            values |= {name: event.get(name) for name in _ROUND_COLUMNS}
            values |= {f"{task}.train_loss": loss for task, loss in event.get("losses", {}).items()}
        elif event["event"] == "evaluation":
            values |= {f"{event['task']}.{metric}": value for metric, value in event["metrics"].items()}
    found = plain(values)
    return ["" if found.get(column) is None else str(found[column]) for column in columns]


def _csv_line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
