"""Both sides agree before the first round, or the site is refused with both values."""

from __future__ import annotations

import json

import pytest

from fedmtl import __version__
from fedmtl.errors import WireError
from fedmtl.federation.handshake import Held, Hello, Terms, read_hello, refusal, version_only

OURS = Terms(version=__version__, tokenizer="t1", encoder="e1", labels={"sst2": ["no", "yes"], "stsb": []})
HELD = Held(examples=3, validation=2, tokens=9, truncated=0, labels={"no": 1, "yes": 2})
ENROLLED = {"a": ["sst2"], "b": ["sst2", "stsb"]}


def hello(client: str = "a", terms: Terms = OURS, **changes) -> Hello:
    return Hello(**{"client": client, "terms": terms, "tasks": {"sst2": HELD}, "rows": [0, 1, 5], **changes})


def why(said: Hello, shown: str | None = None) -> str | None:
    return refusal(said, OURS, 6, ENROLLED, shown)


def test_a_site_that_agrees_may_take_part():
    assert why(hello()) is None
    assert why(hello(), shown="a") is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "9.9", f"version of fedmtl differs: {__version__} at the server, 9.9 at the site"),
        ("tokenizer", "t2", "tokenizer differs: t1 at the server, t2 at the site"),
        ("encoder", "e2", "encoder differs: e1 at the server, e2 at the site"),
        ("labels", {"sst2": ["yes", "no"]}, "labels of sst2 differ: no, yes at the server, yes, no at the site"),
        ("labels", {}, "labels of sst2 differ: no, yes at the server, none at the site"),
    ],
)
def test_a_difference_is_refused_with_both_values(name, value, words):
    assert why(hello(terms=OURS.model_copy(update={name: value}))) == words


def test_only_enrolled_names_with_their_own_key_and_tasks():
    assert why(hello("c")) == "c is not enrolled; known are a, b"
    assert why(hello("b"), shown="a") == "says it is b, its key is a's"
    assert why(hello(tasks={"stsb": HELD})) == "brings stsb; it is enrolled for sst2"
    # A key that was struck off is nobody's.
    assert why(hello(), shown="") == "says it is a, its key is 's"


@pytest.mark.parametrize("rows", [[0, 6], [3, 2], [1, 1]])
def test_rows_are_rising_and_in_the_table(rows):
    assert why(hello(rows=rows)) == "its token rows are not rising numbers below 6"
    assert why(hello(evaluation_rows=rows)) == "its token rows are not rising numbers below 6"


def test_a_site_without_examples_is_refused():
    assert why(hello(tasks={})) == "brings no examples"
    assert why(hello(tasks={"sst2": HELD.model_copy(update={"examples": 0})})) == "brings no examples"


def test_a_site_of_another_version_says_only_that():
    assert version_only("a").model_dump(exclude_defaults=True) == {"client": "a", "terms": {"version": __version__}}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": ["0"]},
        {"rows": [-1]},
        {"client": 7},
        {"tasks": {"sst2": {"examples": -1, "tokens": 0, "truncated": 0, "labels": {}}}},
        {"more": 1},
        {"client": "x" * 301},
    ],
)
def test_words_that_are_no_hello_are_a_wire_error(change):
    words = json.loads(hello().model_dump_json()) | change
    with pytest.raises(WireError, match="hello is not whole"):
        read_hello(json.dumps(words))
    assert read_hello(hello().model_dump_json()) == hello()
