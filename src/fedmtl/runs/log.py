"""What a run writes down as it goes on, and who follows it.

events.jsonl has one event a line, in the order things happened; a rewrite keeps the bytes of the lines that stay.
results.csv has one row a round, and all of it can be recomputed from events.jsonl. A tracker sees every event as it is
written down.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_json
from fedmtl.runs.event_lines import Event, LiveEvent, NotAnEvent, first_of, from_json, plain, round_of, to_line
from fedmtl.runs.events import EndEvent, EvaluationEvent, RoundEvent, StartEvent, TaskFacts
from fedmtl.runs.folder import RunFolder, append_bytes, write_atomic

# A million updates are 300 MB; a reader holds all of them, some times larger.
LARGEST_EVENTS = 2 << 30


class Line(NamedTuple):
    """An event with the bytes that the file has of it, which may say more than the event does."""

    event: Event
    raw: bytes


def append_event(run: RunFolder, event: Event) -> None:
    """Add one line to events.jsonl; it is in the file when this returns. NaN and infinity become null."""
    assert not isinstance(event, LiveEvent), f"{event.kind} is for observers only"
    append_bytes(run.events, to_line(event))


def read_events(run: RunFolder) -> list[Event]:
    """The run's events in order; a last line that was cut off while written is left out.

    A line that is broken otherwise is an error whose advice, `--repair`, is `repair_events`.
    """
    return [event for _, event in _whole_lines(run)]


def read_lines(run: RunFolder) -> list[Line]:
    """The run's events with the bytes of their lines; errors are those of `read_events`."""
    return [Line(event, raw) for raw, event in _whole_lines(run)]


def write_lines(run: RunFolder, lines: Iterable[Line | Event]) -> None:
    """Replace events.jsonl as a whole: lines as they were, and events as new lines."""
    parts = (line.raw + b"\n" if isinstance(line, Line) else to_line(line) for line in lines)
    write_atomic(run.events, b"".join(parts))


def repair_advice(run: RunFolder) -> str:
    """What to do about a broken events.jsonl, as part of a message."""
    command = "fedmtl server" if (run.path / "place.json").exists() else "fedmtl run"
    where = run.name if run.path.parent == Path("runs") else run.path
    return f"put back a copy of the file, or leave its broken lines out with `{command} --resume {where} --repair`"


def repair_events(run: RunFolder) -> list[int]:
    """Leave out the lines that cannot be read, and return their numbers; the file as it was stays beside it."""
    whole: list[Line] = []
    broken: list[int] = []
    for number, raw, event in _lines(run):
        if isinstance(event, NotAnEvent):
            broken.append(number)
        else:
            whole.append(Line(event, raw))
    if broken:
        number = 1
        while (copy := run.path / f"events.jsonl.broken-{number}").exists():
            number += 1
        shutil.copyfile(run.events, copy)
        copy.chmod(0o600)
        write_lines(run, whole)
    return broken


def missing_rounds(events: Iterable[Event], last: int) -> list[int]:
    """The rounds from 0 to `last` that no `round` event closes."""
    closed = {event.round for event in events if isinstance(event, RoundEvent)}
    return [number for number in range(last + 1) if number not in closed]


def _whole_lines(run: RunFolder) -> Iterator[tuple[bytes, Event]]:
    for number, raw, event in _lines(run):
        if isinstance(event, NotAnEvent):
            raise FedmtlError(f"{run.events}, line {number}: {event}; {repair_advice(run)}")
        yield raw, event


def _lines(run: RunFolder) -> Iterator[tuple[int, bytes, Event | NotAnEvent]]:
    """Every line's number, its bytes, and its event or what is wrong with it."""
    if not run.events.exists():
        return
    if run.events.stat().st_size > LARGEST_EVENTS:
        raise FedmtlError(f"{run.events}: has more than {LARGEST_EVENTS >> 30} GB, which no run writes")
    lines = run.events.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line, "", "")
        except FedmtlError:
            if number < len(lines) or not _is_cut(line):
                yield number, line, NotAnEvent("is not JSON")
            continue
        try:
            yield number, line, from_json(value)
        except NotAnEvent as mistake:
            yield number, line, mistake


def _is_cut(line: bytes) -> bool:
    """Whether a line that is not JSON may be the beginning of one of ours."""
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


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
        columns += [f"{name}:{other}.{metric}" for other in task.further or () for metric in task_metrics(task)]
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


class Tracker(Protocol):
    """Takes a run's events somewhere else; it is made of its options and the run's folder."""

    def event(self, event: Event) -> None:
        """Take in an event that is in the run's file now."""
        ...

    def close(self) -> None:
        """The run is over, however it ended."""
        ...


class Trouble(FedmtlError):
    """A tracker says, once, that something is wrong which it deals with itself; it stays."""


class Trackers:
    """The trackers of a run. One that fails is left out from then on and named once: it never costs the run a round."""

    def __init__(self, trackers: Mapping[str, Tracker], remark: Callable[[str], None]) -> None:
        self._trackers, self._remark = dict(trackers), remark

    def event(self, event: Event) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.event(event)
            except Trouble as trouble:
                self._remark(f"the tracker {name}: {trouble}")
            except Exception as error:
                del self._trackers[name]
                self._remark(f"the tracker {name} failed and is left out: {type(error).__name__}: {error}")

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Trouble as trouble:
                self._remark(f"the tracker {name}: {trouble}")
            except Exception as error:
                self._remark(f"the tracker {name} did not close: {type(error).__name__}: {error}")
        self._trackers = {}
