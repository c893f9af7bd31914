"""An event is a frozen record that becomes one line of JSON, and is read back from it.

An event that was read has every field that is required, and each field has its type, is finite and is bounded. What a
later version or a plug-in wrote is not lost: an unknown kind is read as an `OtherEvent`, and an unknown field of a
known kind is in `Event.unknown`. The kinds are in runs/events.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError

from fedmtl.errors import FedmtlError
from fedmtl.foreign import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LARGEST = 1 << 62
# Strict at the leaves only: a strict dataclass would take instances and no mappings.
Round = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
Integer = Annotated[int, Field(strict=True)]
# Sums of a few of them stay finite.
Number = Annotated[float, Field(strict=True, ge=-1e100, le=1e100, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True, max_length=1 << 20)]
Flag = Annotated[bool, Field(strict=True)]
Numbers = dict[str, Number | None]
Counts = dict[str, Count]


class _NeverNull:
    """Makes pydantic refuse null for a field that is None only where the file does not have it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        types = tuple(part for part in get_args(source) if part is not NoneType)
        return handler.generate_schema(Union[types])  # noqa: UP007


Value = TypeVar("Value")
Given = Annotated[Value | None, _NeverNull()]
# A field that is None by default is left out of the line where it is None; one with this mark is written as null.
NULL = {"null": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run; `unknown` has the fields of a line that this version does not know."""

    _kind: ClassVar[str] = ""

    unknown: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> str:
        """The word that the file has under `event`."""
        return self._kind

    def lines(self) -> Sequence[str]:
        """What the terminal shows of this event; a kind that the display knows is shown as the display says."""
        return ()


Observer = Callable[[Event], None]
Kind = TypeVar("Kind", bound=Event)
_KINDS: dict[str, type[Event]] = {}


def event_kind(kind: str) -> Callable[[type[Kind]], type[Kind]]:
    """Register a frozen dataclass, a subclass of Event, for the lines of that kind; plug-ins use a dotted name."""

    def register(cls: type[Kind]) -> type[Kind]:
        known = _KINDS.setdefault(kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise FedmtlError(
                f"event kind {kind!r}: is {known.__module__}.{known.__qualname__} already, so"
                f" {cls.__module__}.{cls.__qualname__} needs another name, such as `mypackage.{kind}`"
            )
        cls._kind = kind
        _KINDS[kind] = cls
        return cls

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEvent(Event):
    """An event of a kind that is not registered: a plug-in's that is not imported, or a later version's.

    `name` is the kind; every other field of the line is in `unknown`.
    """

    name: str

    @property
    def kind(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvent(Event):
    """An event that observers see and that no file has."""


def round_of(event: Event) -> int | None:
    """The round that an event belongs to; None for an event of no round."""
    number: int | None = getattr(event, "round", None)
    return event.unknown.get("round") if number is None else number


def events_of(events: Iterable[Event], cls: type[Kind]) -> list[Kind]:
    """The events of one kind, also those that were read before the module that registers the kind was imported."""
    found: list[Kind] = []
    for event in events:
        known = from_json(to_json(event)) if isinstance(event, OtherEvent) and event.name == cls._kind else event
        if isinstance(known, cls):
            found.append(known)
    return found


def first_of(events: Iterable[Event], cls: type[Kind]) -> Kind | None:
    """The first event of that class; None where there is none."""
    return next((event for event in events if isinstance(event, cls)), None)


def last_of(events: Sequence[Event], cls: type[Kind]) -> Kind | None:
    """The last event of that class; None where there is none."""
    return first_of(reversed(events), cls)


class NotAnEvent(FedmtlError):
    """A JSON value is not an event; the message says why, in words that follow "line 7: "."""


class _Shape(NamedTuple):
    """How pydantic reads a class, and the names of the fields that a line of it may have."""

    validate: Callable[[Any], Any]
    names: frozenset[str]
    flat: tuple[tuple[str, tuple[str, ...]], ...]


_SHAPES: dict[type[Event], _Shape] = {}


def _shape(cls: type[Event]) -> _Shape:
    """The shape of a class, made when the first line of its kind is read."""
    if cls in _SHAPES:
        return _SHAPES[cls]
    flat = tuple((one.name, one.metadata["flat"]) for one in dataclasses.fields(cls) if "flat" in one.metadata)
    names = {one.name for one in dataclasses.fields(cls)} - {"unknown"} - {name for name, _ in flat}
    validate = TypeAdapter(cls).validator.validate_python
    names |= {"event", *(part for _, parts in flat for part in parts)}
    return _SHAPES.setdefault(cls, _Shape(validate, frozenset(names), flat))


@lru_cache(maxsize=1)
def _round_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(dict[str, Round])


def from_json(value: object) -> Event:
    """The event of a parsed line; a value that is none raises NotAnEvent."""
    kind = value.get("event") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise NotAnEvent("is not an event")
    try:
        return _read(kind, value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"] if part != "averages") or "it"
        raise NotAnEvent(
            f"its `{printable(kind, 80)}` is not one: {printable(path, 80)}: {first['msg'][:120]}"
        ) from None


def _read(kind: str, value: dict[str, Any]) -> Event:
    cls = _KINDS.get(kind)
    if cls is None and not _KINDS:
        # The kinds are registered when their module is imported.
        import_module("fedmtl.runs.events")
        cls = _KINDS.get(kind)
    if cls is None:
        unknown = {name: inner for name, inner in value.items() if name != "event"}
        return _with_round(OtherEvent(name=kind, unknown=unknown))
    validate, names, flat = _shape(cls)
    is_known = value.keys() <= names
    if not is_known:
        unknown = {name: inner for name, inner in value.items() if name not in names}
        value = {name: inner for name, inner in value.items() if name in names} | {"unknown": unknown}
    for name, parts in flat:
        if any(part in value for part in parts):
            value = {**value, name: {part: value[part] for part in parts if part in value}}
    event: Event = validate(value)
    return event if is_known else _with_round(event)


def _with_round(event: Event) -> Event:
    """The same event; every reader may rely on the type of `round`, whatever the kind."""
    if "round" in event.unknown:
        _round_adapter().validate_python({"round": event.unknown["round"]})
    return event


def to_json(event: Event) -> dict[str, Any]:
    """The event as its line has it: `event` first, then the fields in their order, then the unknown ones."""
    fields = plain(event)
    unknown = fields.pop("unknown")
    known = {"event": event.kind, **({} if isinstance(event, OtherEvent) else fields)}
    return {**known, **{name: value for name, value in unknown.items() if name not in known}}


def to_line(event: Event) -> bytes:
    """The line of events.jsonl; NaN and infinity become null."""
    try:
        return json.dumps(to_json(event), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise FedmtlError(
            f"event {event.kind}: a field is not JSON ({error}); use numbers, text, lists and mappings"
        ) from error


_FIELDS: dict[type, tuple[tuple[str, bool, bool], ...]] = {}


def _fields(record: DataclassInstance) -> tuple[tuple[str, bool, bool], ...]:
    """Every field's name, whether None leaves it out of the line, and whether its fields stand in for it."""
    found = _FIELDS.get(type(record))
    if found is None:
        found = _FIELDS[type(record)] = tuple(
            (one.name, one.default is None and "null" not in one.metadata, "flat" in one.metadata)
            for one in dataclasses.fields(record)
        )
    return found


_LEAVES = frozenset({int, str, bool, NoneType})


def plain(value: Any) -> Any:
    """The same value in JSON's types; numpy's scalars and arrays by their `tolist`."""
    if type(value) in _LEAVES:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for name, is_left_out, is_flat in _fields(value):
            inner = getattr(value, name)
            if inner is None and is_left_out:
                continue
            if is_flat:
                found |= plain(inner)
            else:
                found[name] = plain(inner)
        return found
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
