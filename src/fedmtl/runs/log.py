"""events.jsonl has one event a line, in the order things happened; a rewrite keeps the bytes of the lines that stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_json
from fedmtl.runs.event_lines import Event, LiveEvent, NotAnEvent, from_json, to_line
from fedmtl.runs.events import RoundEvent
from fedmtl.runs.files import append_bytes, write_atomic
from fedmtl.runs.folder import RunFolder

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
