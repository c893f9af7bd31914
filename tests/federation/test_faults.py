"""What a site says of an error: a code, a task and a line number, whatever the error's words are."""

from __future__ import annotations

import json

import pytest

from fedmtl.errors import ConfigError, DataError, FedmtlError
from fedmtl.federation.faults import MOST_LETTERS, SENTENCES, Fault, fault_of, is_safe_name, read_fault


def test_a_fault_comes_over_as_the_servers_own_sentence():
    fault = fault_of(DataError("/home/x.tsv, line 7: label 'a whole sentence'").coded("label_unknown", "notes", 7))
    sent = fault.model_dump_json(exclude_none=True)
    assert json.loads(sent) == {"code": "label_unknown", "task": "notes", "line": 7}
    fault = read_fault(sent)
    assert fault is not None
    assert fault.words() == "notes, line 7: a label is not in the agreed list"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("a text"), "data_unusable"),
        (ConfigError("a text"), "config_unusable"),
        (FedmtlError("a text"), "failed"),
        (FedmtlError("a text").coded("made up"), "failed"),
        (KeyError("a text"), "internal"),
        (MemoryError("a text"), "out_of_memory"),
        (UnicodeDecodeError("utf-8", b"a text", 0, 1, "a text"), "internal"),
    ],
)
def test_every_error_has_a_code_and_none_its_words(error, code):
    assert fault_of(error) == Fault(code=code)
    assert "a text" not in fault_of(error).model_dump_json()


@pytest.mark.parametrize(("task", "line"), [("a text", 1), ("notes", 0), ("notes", "a text"), ("\x1b[2J", -1)])
def test_a_place_that_is_none_is_left_out(task, line):
    fault = fault_of(DataError("x").coded("text_empty", task, line))
    assert fault.task in (None, "notes")
    assert fault.line in (None, 1)


@pytest.mark.parametrize(
    "reason",
    [
        None,
        "",
        "no such file: /home/x",
        "[" * 2000,
        json.dumps({"code": "my own words"}),
        json.dumps({"code": "text_empty", "words": "more"}),
        json.dumps({"code": "text_empty", "task": "<b>\x1b[2J"}),
        json.dumps({"code": "text_empty", "task": "notes\n"}),
        json.dumps({"code": "text_empty", "line": "7"}),
        json.dumps({"code": "text_empty", "line": 10**400}),
        json.dumps({"code": "text_empty", "line": True}),
        json.dumps({"code": "text_empty", "client": "my words"}),
        json.dumps(["text_empty"]),
        " " * MOST_LETTERS + json.dumps({"code": "text_empty"}),
    ],
)
def test_whatever_is_no_fault_is_unreadable(reason):
    assert read_fault(reason) is None


def test_every_code_has_a_sentence_of_one_line():
    for code, sentence in SENTENCES.items():
        assert read_fault(Fault(code=code).model_dump_json()) == Fault(code=code)
        assert Fault(code=code).words() == sentence
        assert sentence.isprintable()


def test_names_are_safe_in_files_terminals_and_pages():
    assert is_safe_name("sentiment_client_1")
    for name in ("", ".", "..", "../up", "a/b", "a\\b", "[/b]", "<b>", "a b", "a\n", "\x1b", "x" * 65, "ü"):
        assert not is_safe_name(name), name
