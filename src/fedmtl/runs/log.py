"""events.jsonl has one event a line, in the order things happened."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_json
from fedmtl.runs.events import event_mistake
from fedmtl.runs.files import append_bytes, write_atomic
from fedmtl.runs.folder import RunFolder

# A million updates are 300 MB; a reader holds all of them, some times larger.
LARGEST_EVENTS = 2 << 30

Event = dict[str, Any]


def append_event(run: RunFolder, event: Mapping[str, Any]) -> None:
    """Add one line to events.jsonl; it is in the file when this returns. NaN and infinity become null."""
    append_bytes(run.events, _line(event))


def read_events(run: RunFolder) -> list[Event]:
    """The run's events in order, each as `event_schema` says; a last line that was cut off while written is left out.

    A line that is broken otherwise is an error whose advice, `--repair`, is `repair_events`.
    """
    events: list[Event] = []
    for number, event, mistake in _lines(run):
        if mistake is not None:
            raise FedmtlError(f"{run.events}, line {number}: {mistake}; {repair_advice(run)}")
        events.append(event)
    return events


def repair_advice(run: RunFolder) -> str:
    """What to do about a broken events.jsonl, as part of a message."""
    command = "fedmtl server" if (run.path / "place.json").exists() else "fedmtl run"
    where = run.name if run.path.parent == Path("runs") else run.path
    return f"put back a copy of the file, or leave its broken lines out with `{command} --resume {where} --repair`"


def repair_events(run: RunFolder) -> list[int]:
    """Leave out the lines that cannot be read, and return their numbers; the file as it was stays beside it."""
    kept: list[Event] = []
    broken: list[int] = []
    for number, event, mistake in _lines(run):
        if mistake is None:
            kept.append(event)
        else:
            broken.append(number)
    if broken:
        number = 1
        while (copy := run.path / f"events.jsonl.broken-{number}").exists():
            number += 1
        shutil.copyfile(run.events, copy)
        copy.chmod(0o600)
        write_events(run, kept)
    return broken


def missing_rounds(events: Iterable[Mapping[str, Any]], last: int) -> list[int]:
    """The rounds from 0 to `last` that no `round` event closes."""
    closed = {event["round"] for event in events if event["event"] == "round"}
    return [number for number in range(last + 1) if number not in closed]


def _lines(run: RunFolder) -> Iterator[tuple[int, Event, str | None]]:
    """Every line's number, its event, and what is wrong with it."""
    if not run.events.exists():
        return
    if run.events.stat().st_size > LARGEST_EVENTS:
        raise FedmtlError(f"{run.events}: has more than {LARGEST_EVENTS >> 30} GB, which no run writes")
    lines = run.events.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_json(line, "", "")
        except FedmtlError:
            if number < len(lines) or not _is_cut(line):
                yield number, {}, "is not JSON"
            continue
        yield number, event, event_mistake(event)


def _is_cut(line: bytes) -> bool:
    """Whether a line that is not JSON may be the beginning of one of ours."""
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def write_events(run: RunFolder, events: Iterable[Mapping[str, Any]]) -> None:
    """Put events.jsonl in place whole."""
    write_atomic(run.events, b"".join(map(_line, events)))


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(event), allow_nan=False).encode() + b"\n"


def plain(value: Any) -> Any:
    """The same value in JSON's types; numpy's scalars and arrays by their `tolist`."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
