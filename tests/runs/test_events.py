"""Events: what a line becomes and what becomes of an event, for every kind; and that no other file knows the lines."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.errors import FedmtlError
from fedmtl.runs import event_lines, events
from fedmtl.runs.event_lines import (
    Event,
    LiveEvent,
    NotAnEvent,
    Numbers,
    OtherEvent,
    Round,
    event_kind,
    events_of,
    first_of,
    from_json,
    last_of,
    round_of,
    to_json,
    to_line,
)
from fedmtl.runs.events import Averages, EndEvent, PlanEvent, RoundEvent, StartEvent, TaskFacts

ROOT = Path(__file__).parents[2]
LINES = (Path(__file__).parent / "events_of_every_kind.jsonl").read_bytes().splitlines(keepends=True)
KINDS = {kind: cls for kind, cls in event_lines._KINDS.items() if cls.__module__ == events.__name__}
DOCS = ROOT / "docs/run-folder.md"

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values(hint: Any, checks: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a field's type, with what its checks ask for."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return values(inner, (*checks, *more))
    words = " ".join(map(repr, checks))
    if "_is_square" in words:
        row = st.lists(st.integers(0, 99), min_size=2, max_size=2)
        return st.lists(row, min_size=2, max_size=2)
    if "_rise" in words:
        floats = st.lists(st.floats(-99, 99), min_size=2, max_size=2 if "MaxLen" in words else 5, unique=True)
        return floats.map(sorted)
    if hint is Any:
        return JSON
    if dataclasses.is_dataclass(hint):
        return records(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([values(part) for part in parts])
    if origin is dict:
        return st.dictionaries(TEXT, values(parts[1]), max_size=3)
    if origin is list:
        size = {"min_size": 2, "max_size": 2} if "MinLen" in words or "min_length" in words else {"max_size": 3}
        return st.lists(values(parts[0]), **size)
    low = 0 if "Ge(ge=0)" in words or "ge=0" in words else -(10**6)
    plain = {int: st.integers(low, 10**9), float: st.floats(low, 1e9), str: TEXT, bool: st.booleans()}
    return st.none() if hint is type(None) else plain[hint]


def records(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    fields = {one.name: values(hints[one.name]) for one in dataclasses.fields(cls) if one.name != "unknown"}
    if issubclass(cls, Event):
        fields["unknown"] = st.dictionaries(TEXT.map("later_{}".format), JSON, max_size=2)
    return st.builds(cls, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_comes_back_from_its_line(kind):
    @settings(max_examples=60, deadline=None)
    @given(records(KINDS[kind]))
    def check(event):
        line = to_line(event)
        again = from_json(json.loads(line))
        assert again == event
        assert type(again) is KINDS[kind]
        assert to_line(again) == line
        assert next(iter(to_json(event))) == "event"

    check()


@pytest.mark.parametrize("line", LINES, ids=[json.loads(line)["event"] for line in LINES])
def test_a_line_that_a_run_wrote_comes_back_byte_for_byte(line):
    event = from_json(json.loads(line))
    assert event.unknown == {}
    assert to_line(event) == line


def test_the_lines_that_runs_wrote_are_of_every_kind():
    assert {json.loads(line)["event"] for line in LINES} == set(KINDS)


def test_a_scored_round_an_unscored_one_and_a_pass_without_scores_are_three_things():
    scored = from_json({"event": "round", "round": 1, "overall": 0.5, "classification": 0.25})
    unscored = from_json({"event": "round", "round": 1, "overall": None, "classification": None})
    unmentioned = from_json({"event": "round", "round": 1})
    assert scored.averages == Averages(overall=0.5, classification=0.25)
    assert (scored.overall, scored.classification) == (0.5, 0.25)
    assert (unscored.averages, unscored.overall) == (Averages(), None)
    assert (unmentioned.averages, unmentioned.overall) == (None, None)
    assert '"overall": null' in to_line(unscored).decode()
    assert "overall" not in to_line(unmentioned).decode()


class TestUnknown:
    def test_an_unknown_kind_has_its_name_its_round_and_its_fields(self):
        event = from_json({"event": "mine.thing", "round": 4, "x": [1]})
        assert isinstance(event, OtherEvent)
        assert (event.kind, round_of(event), event.unknown["x"]) == ("mine.thing", 4, [1])
        assert to_json(event) == {"event": "mine.thing", "round": 4, "x": [1]}

    # The last two are fields of the class that no line has.
    @pytest.mark.parametrize("name", ["later", "unknown", "averages"])
    def test_an_unknown_field_of_a_known_kind_is_not_lost(self, name):
        line = {"event": "round", "round": 1, "overall": 0.5, name: {"overall": "x"}}
        event = from_json(line)
        assert event.unknown == {name: {"overall": "x"}}
        assert event.overall == 0.5
        assert to_json(event)[name] == {"overall": "x"}

    def test_an_unknown_field_cannot_replace_a_known_one(self):
        event = RoundEvent(round=1, unknown={"event": "end", "round": 9, "later": 2})
        assert to_json(event) == {**to_json(RoundEvent(round=1)), "later": 2}

    def test_a_kind_of_task_that_is_not_built_in_can_be_read(self):
        start = from_json({"event": "start", "tasks": {"a": {"kind": "ordinal", "metrics": ["kappa"]}}})
        assert start.tasks == {"a": TaskFacts(kind="ordinal", metrics=["kappa"])}
        built_in = StartEvent(tasks={"a": TaskFacts(kind="classification")})
        assert "metrics" not in to_json(built_in)["tasks"]["a"]


REFUSED = {
    "no dict": [1],
    "no kind": {"round": 1},
    "a kind that is no text": {"event": 5},
    "no round": {"event": "round"},
    "true for a round": {"event": "round", "round": True},
    "null for seconds": {"event": "round", "round": 1, "seconds": None},
    "text for an average": {"event": "round", "round": 1, "overall": "high"},
    "a negative count": {"event": "update", "round": 1, "client": "a", "bytes_up": -1},
    "not finite": {"event": "evaluation", "round": 1, "task": "a", "metrics": {"f1": float("nan")}},
    "not square": {"event": "evaluation", "round": 1, "task": "a", "metrics": {}, "confusion": [[1, 2]]},
    "a round of a kind without one": {"event": "start", "round": "1"},
    "a round of an unknown kind": {"event": "x\ny" * 99, "round": -1},
    "a long path": {"event": "clients", "clients": {"a\nb" * 500: 5}},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_is_no_event_is_refused_in_one_short_line(value):
    with pytest.raises(NotAnEvent) as caught:
        from_json(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_message_names_the_field_and_not_where_the_class_has_it():
    with pytest.raises(NotAnEvent, match=r"^its `round` is not one: overall: Input should be"):
        from_json({"event": "round", "round": 1, "overall": "high"})


@pytest.fixture
def clipped():
    @event_kind("mypackage.clipped")
    @dataclass(frozen=True, slots=True, kw_only=True)
    class ClippedEvent(Event):
        round: Round
        norms: Numbers

        def lines(self):
            return [f"clipped {len(self.norms)} updates"]

    # pydantic finds the names of annotations in the module.
    globals()["ClippedEvent"] = ClippedEvent
    yield ClippedEvent
    del event_lines._KINDS["mypackage.clipped"]
    del globals()["ClippedEvent"]


class TestPlugIns:
    LINE: dict[str, Any] = {"event": "mypackage.clipped", "round": 2, "norms": {"a": 1.5}}  # noqa: RUF012

    def test_a_plug_in_registers_a_kind_that_is_written_read_and_shown(self, clipped):
        event = clipped(round=2, norms={"a": 1.5})
        assert to_json(event) == self.LINE
        assert from_json(self.LINE) == event
        assert event.lines() == ["clipped 1 updates"]
        with pytest.raises(NotAnEvent, match=r"`mypackage\.clipped` is not one: norms\.a"):
            from_json({**self.LINE, "norms": {"a": "x"}})

    def test_events_that_were_read_before_the_plug_in_was_imported_are_found(self, request):
        read = [from_json(self.LINE), from_json({"event": "other.kind"})]
        assert all(isinstance(event, OtherEvent) for event in read)
        clipped = request.getfixturevalue("clipped")
        assert events_of(read, clipped) == [clipped(round=2, norms={"a": 1.5})]

    def test_two_classes_of_one_kind_are_an_error_that_names_both(self):
        with pytest.raises(FedmtlError, match=r"event kind 'round': is fedmtl\.runs\.events\.RoundEvent already") as no:

            @event_kind("round")
            @dataclass(frozen=True, slots=True, kw_only=True)
            class Mine(Event):
                pass

        assert "Mine needs another name, such as `mypackage.round`" in str(no.value)
        assert event_lines._KINDS["round"] is RoundEvent


def test_first_and_last_of_a_class():
    told = [PlanEvent(total=1), RoundEvent(round=1), PlanEvent(total=2)]
    assert first_of(told, PlanEvent) == PlanEvent(total=1)
    assert last_of(told, PlanEvent) == PlanEvent(total=2)
    assert last_of(told, EndEvent) is None


def test_kinds_for_observers_are_of_no_line():
    live = {cls._kind for cls in LiveEvent.__subclasses__()}
    assert live == {"answer", "teacher", "resumed", "waiting", "warning"}
    assert not live & set(event_lines._KINDS)


def test_kinds_are_known_to_whoever_imports_only_the_reader():
    code = (
        "from fedmtl.runs.event_lines import from_json; print(type(from_json({'event': 'round', 'round': 1})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "RoundEvent\n"


def test_the_documentation_names_every_field_of_every_kind():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCS.read_text().partition("\n## Events")[2], re.MULTILINE))
    assert set(rows) == set(KINDS)
    for kind, cls in KINDS.items():
        told = set(re.findall(r"`(\w+)`", rows[kind]))
        assert event_lines._shape(cls).names - {"event"} <= told, kind


# ------------------------------------------------- no other file knows how an event looks in the file

# The scripts are not searched: they also run trees of other commits, whose classes are others.
SEARCHED = ("src/fedmtl", "src/fedmtl_studies", "benchmarks", "examples")
# This one may: it is the way from a line to an event and back.
KNOW_LINES = {"src/fedmtl/runs/event_lines.py"}


def bare_events(path: Path) -> list[int]:
    """The lines that write {"event": ...} or dict(event=...), or read ["event"] or .get("event")."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Dict(keys=keys) if any(isinstance(key, ast.Constant) and key.value == "event" for key in keys):
                found.append(node.lineno)
            case ast.Subscript(slice=ast.Constant(value="event")):
                found.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="event"), *_]):
                found.append(node.lineno)
            case ast.Call(func=ast.Name(id="dict"), keywords=names) if any(name.arg == "event" for name in names):
                found.append(node.lineno)
    return found


def test_no_other_file_reads_or_writes_an_event_as_a_dict():
    paths = {folder: list((ROOT / folder).rglob("*.py")) for folder in SEARCHED}
    assert all(paths.values()), "every folder has files"
    found = {path.relative_to(ROOT).as_posix() for each in paths.values() for path in each if bare_events(path)}
    assert found == KNOW_LINES, "use the classes of runs/events.py"


@pytest.mark.parametrize(
    "line", ['{"event": "end"}', 'read(line)["event"] == "end"', 'line.get("event") == "end"', "dict(event='end')"]
)
def test_the_search_finds_every_way_to_write_or_read_one(tmp_path, line):
    file = tmp_path / "some.py"
    file.write_text(f"event.kind\n{line}\n")
    assert bare_events(file) == [2]
