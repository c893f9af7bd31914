"""Both sides agree before the first round, or the site is refused with both values."""

from __future__ import annotations

import json

import pytest

from fedmtl import __version__
from fedmtl.errors import WireError
from fedmtl.federation.handshake import (
    Hello,
    SiteTerms,
    TaskCounts,
    Terms,
    Welcome,
    labels_digest,
    read_hello,
    refusal,
    version_only,
)

OURS = Terms(version=__version__, tokenizer="a1", encoder="e1", labels={"sst2": ["no", "yes"], "stsb": []})
THEIRS = SiteTerms(version=__version__, tokenizer="a1", encoder="e1")
LIST = labels_digest(["no", "yes"])
COUNTS = TaskCounts(examples=3, validation=2, tokens=9, truncated=0, labels=[1, 2], label_list=LIST)
ENROLLED = {"a": ["sst2"], "b": ["sst2", "stsb"]}


def hello(client: str = "a", terms: SiteTerms = THEIRS, **changes) -> Hello:
    return Hello(**{"client": client, "terms": terms, "tasks": {"sst2": COUNTS}, "rows": [0, 1, 5], **changes})


def why(said: Hello, shown: str | None = None) -> str | None:
    return refusal(said, OURS, 6, ENROLLED, shown)


def test_a_site_that_agrees_may_take_part():
    assert why(hello()) is None
    assert why(hello(), shown="a") is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "9.9", f"version of fedmtl differs: {__version__} at the server, 9.9 at the site"),
        ("tokenizer", "a2", "tokenizer differs: a1 at the server, a2 at the site"),
        ("encoder", "e2", "encoder differs: e1 at the server, e2 at the site"),
    ],
)
def test_a_difference_is_refused_with_both_values(name, value, words):
    assert why(hello(terms=THEIRS.model_copy(update={name: value}))) == words


def test_labels_are_compared_by_a_digest_of_their_list_and_counted_in_its_order():
    other = COUNTS.model_copy(update={"label_list": labels_digest(["yes", "no"])})
    assert "labels of sst2 differ: the server's list is" in (why(hello(tasks={"sst2": other})) or "")
    longer = COUNTS.model_copy(update={"labels": [1, 2, 3]})
    assert why(hello(tasks={"sst2": longer})) == "counts 3 labels of sst2; it has 2"
    # A site's policy may keep them.
    assert why(hello(tasks={"sst2": COUNTS.model_copy(update={"labels": []})})) is None
    scores = COUNTS.model_copy(update={"labels": [1, 0, 0, 0, 2], "label_list": labels_digest([])})
    assert why(hello("b", tasks={"stsb": scores})) is None


def test_a_task_that_is_enrolled_and_not_in_the_run_is_refused():
    enrolled = {"a": ["sst2", "gone"]}
    reason = refusal(hello(tasks={"gone": COUNTS}), OURS, 6, enrolled, None)
    assert reason == "brings gone, which this run does not have"


def test_a_hello_holds_no_label_value():
    words = hello().model_dump_json()
    assert "yes" not in words
    assert "labels" not in json.loads(words)["terms"]


@pytest.mark.parametrize("run", ["../up", "/tmp/x", "a/b", "", "0" * 65, "r", "a\n"])
def test_a_run_is_named_by_hex_digits_only(run):
    with pytest.raises(ValueError, match="run"):
        Welcome(run=run, config={}, evaluated=False, max_bytes=1, terms=OURS)


def test_only_enrolled_names_with_their_own_key_and_tasks():
    assert why(hello("c")) == "c is not enrolled; known are a, b"
    assert why(hello("b"), shown="a") == "says it is b, its key is a's"
    assert why(hello(tasks={"stsb": COUNTS})) == "brings stsb; it is enrolled for sst2"
    # A key that was struck off is nobody's.
    assert why(hello(), shown="") == "says it is a, its key is 's"


@pytest.mark.parametrize("rows", [[0, 6], [3, 2], [1, 1]])
def test_rows_are_rising_and_in_the_table(rows):
    assert why(hello(rows=rows)) == "its token rows are not rising numbers below 6"
    assert why(hello(evaluation_rows=rows)) == "its token rows are not rising numbers below 6"


def test_a_site_without_examples_is_refused():
    assert why(hello(tasks={})) == "brings no examples"
    assert why(hello(tasks={"sst2": COUNTS.model_copy(update={"examples": 0})})) == "brings no examples"


def test_a_site_of_another_version_says_only_that():
    assert version_only("a").model_dump(exclude_defaults=True) == {"client": "a", "terms": {"version": __version__}}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": ["0"]},
        {"rows": [-1]},
        {"client": 7},
        {"tasks": {"sst2": {"examples": -1, "tokens": 0, "truncated": 0, "labels": []}}},
        {"tasks": {"sst2": {**json.loads(COUNTS.model_dump_json()), "labels": {"a whole sentence": 1}}}},
        {"tasks": {"a/b": json.loads(COUNTS.model_dump_json())}},
        {"terms": {"version": "1 \x1b[2J"}},
        {"more": 1},
        {"client": "x" * 65},
        {"client": "[/b]"},
        {"client": "..%2f"},
        {"client": "a\n"},
        {"client": "\x1b[2J"},
    ],
)
def test_words_that_are_no_hello_are_a_wire_error(change):
    words = json.loads(hello().model_dump_json()) | change
    with pytest.raises(WireError, match="hello is not whole"):
        read_hello(json.dumps(words))
    assert read_hello(hello().model_dump_json()) == hello()


def test_what_is_wrong_with_a_hello_is_said_without_its_words():
    words = json.loads(hello().model_dump_json())
    words["tasks"]["<b>\x1b[2J a stranger's text"] = 7
    with pytest.raises(WireError) as caught:
        read_hello(json.dumps(words))
    assert "stranger" not in str(caught.value)
    assert str(caught.value).isprintable()
