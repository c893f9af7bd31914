"""Several labels a text: counts merge and score as scikit-learn does, thresholds are fitted, mistakes are located."""

import json
import math
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.config import Config
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.tasks.examples import examples_from, join_examples, no_examples
from fedmtl.tasks.kinds.multilabel import RARE, THRESHOLD, thresholds
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.metrics import constant_score, evaluation_event, score, sum_predictions, sums_from_dict
from fedmtl.tasks.resolve import resolve_task
from fedmtl.tasks.sources import Table
from fedmtl.tasks.task import Task
from tasks.kinds.small_tasks import quick

MOODS = Task("moods", "multilabel", ("text",), "labels", "f1", labels=("anger", "fear", "joy"))
OPEN = Task("moods", "multilabel", ("text",), "labels", "f1")
KIND = MOODS.kind_of
# Logits of a model that is sure.
SURE = 9.0


def rows(*sets):
    return np.array([[label in found for label in MOODS.labels] for found in sets], np.uint8)


def sums_of(true, guess, task=MOODS, loss=0.0):
    return sum_predictions(task, (np.asarray(guess) - 0.5) * 2 * SURE, np.asarray(true, np.uint8), loss)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_labels_are_right_by_themselves_and_texts_as_a_whole():
    sums = sums_of(
        rows({"anger"}, {"anger", "joy"}, set(), {"joy"}),
        rows({"anger"}, {"anger"}, set(), {"anger"}),
    )
    # anger: true 2, predicted 3, right 2; fear nowhere; joy: true 2, predicted 0, right 0.
    assert sums.counts.tolist() == [[2, 3, 2], [0, 0, 0], [2, 0, 0]]
    found = score(MOODS, sums)
    assert found.metrics == pytest.approx(
        {
            "f1": 2 * 2 / (4 + 3),
            "macro_f1": (4 / 5 + 0) / 2,
            "subset_accuracy": 2 / 4,
            "precision": 2 / 3,
            "recall": 2 / 4,
        }
    )
    by_label = KIND.evaluation_fields(MOODS, sums)["by_label"]
    assert by_label["anger"] == pytest.approx(
        {"f1": 4 / 5, "precision": 2 / 3, "recall": 1.0, "true": 2, "predicted": 3, "right": 2, "threshold": THRESHOLD}
    )
    assert by_label["fear"]["f1"] is None
    assert evaluation_event(1, MOODS, sums).by_label == by_label


@pytest.mark.parametrize("width", [2, 5, 28])
def test_scores_of_random_labels_are_those_of_scikit_learn(width):
    metrics = pytest.importorskip("sklearn.metrics")
    chance = np.random.default_rng(width)
    task = Task("own", "multilabel", ("text",), "labels", "f1", labels=tuple(f"label {n}" for n in range(width)))
    # The last label is rare, so that it is sometimes nowhere.
    shares = np.linspace(0.5, 0.002, width)
    for _ in range(20):
        true, outputs = chance.random((300, width)) < shares, chance.normal(-1, 2, (300, width))
        guess = 1 / (1 + np.exp(-outputs)) > THRESHOLD
        found = score(task, sum_predictions(task, outputs, true.astype(np.uint8), 0.0)).metrics
        expected = {
            "f1": metrics.f1_score(true, guess, average="micro"),
            # A label that is nowhere has no F1; scikit-learn leaves it out where it is told to.
            "macro_f1": metrics.f1_score(true, guess, average="macro", zero_division=np.nan),
            "subset_accuracy": metrics.accuracy_score(true, guess),
            "precision": metrics.precision_score(true, guess, average="micro"),
            "recall": metrics.recall_score(true, guess, average="micro"),
        }
        assert found == pytest.approx(expected, abs=1e-12)


@quick
@given(st.data())
def test_sums_of_any_parts_are_those_of_the_whole(data):
    seed, count = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 30))
    chance = np.random.default_rng(seed)
    true, outputs = chance.integers(0, 2, (count, 3)).astype(np.uint8), chance.normal(0, 3, (count, 3))
    owners = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    parts = [sum_predictions(MOODS, outputs[owners == n], true[owners == n], 1.0) for n in range(4)]
    whole = sum_predictions(MOODS, outputs, true, 4.0)
    merged = reduce(add, parts)
    assert merged.to_dict() == whole.to_dict()
    again = sums_from_dict(MOODS, json.loads(json.dumps(merged.to_dict())))
    assert again.to_dict() == merged.to_dict()
    # What is added up under masks.
    numbers = sum(KIND.sums_to_numbers(MOODS, part) for part in parts)
    assert KIND.sums_from_numbers(MOODS, numbers).to_dict() == whole.to_dict()


def test_outputs_that_are_no_numbers_are_counted_apart():
    outputs = np.array([[9.0, -9.0, -9.0], [np.nan, 0.0, 0.0]])
    found = score(MOODS, sum_predictions(MOODS, outputs, rows({"anger"}, {"joy"}), 0.0))
    assert (found.examples, found.metrics["f1"]) == (2, None)
    assert found.undefined["f1"] == "1 of 2 predictions are not finite"


def test_what_finds_nothing_is_said():
    assert score(MOODS, sums_of(rows({"anger"}, {"joy"}), rows(set(), set()))).marked == "finds nothing"
    nothing = score(MOODS, sums_of(rows(set()), rows(set())))
    assert nothing.metrics["subset_accuracy"] == 1.0
    assert nothing.undefined["macro_f1"] == "no label is true or predicted"


# By 19 thresholds and 3 labels, how many are predicted and right.
DRAWN = [[[1, 1], [0, 0], [0, 0]]] * 6 + [[[0, 0]] * 3] * 13


def test_predictions_are_counted_by_threshold():
    shares = np.array([[0.12, 0.5, 0.001], [0.9, 0.31, 0.001]])
    sums = sum_predictions(MOODS, np.log(shares / (1 - shares)), rows({"anger"}, {"anger", "fear"}), 0.0)
    # anger: .12 and .9, both true; fear: .5, which is wrong, and .31.
    assert sums.drawn[1].tolist() == [[2, 2], [2, 1], [0, 0]]  # .10
    assert sums.drawn[5].tolist() == [[1, 1], [2, 1], [0, 0]]  # .30
    assert sums.drawn[10].tolist() == [[1, 1], [0, 0], [0, 0]]  # .55
    # Where a model trains predictions are those above .3.
    assert sums.drawn[5].tolist() == sums.counts[:, 1:].tolist()
    curves = evaluation_event(1, MOODS, sums).curves
    assert curves["thresholds"][5] == pytest.approx(0.3)
    assert curves["labels"]["anger"][5] == pytest.approx(2 / 3)
    assert curves["labels"]["joy"] == [None] * 19
    at = {name: values[5] for name, values in curves["together"].items()}
    assert at == pytest.approx({"f1": 2 * 2 / (3 + 3), "precision": 2 / 3, "recall": 2 / 3})


def test_more_labels_than_a_page_draws_have_no_curves():
    task = Task("codes", "multilabel", ("text",), "labels", "f1", labels=tuple(f"label {n}" for n in range(101)))
    sums = sum_predictions(task, np.zeros((2, 101)), np.ones((2, 101), np.uint8), 0.0)
    assert sums.drawn.size == 0
    assert evaluation_event(1, task, sums).curves is None
    assert sums_from_dict(task, json.loads(json.dumps(sums.to_dict()))).to_dict() == sums.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"drawn": [[[1, 1], [0, 0], [0, 0]]] * 18},  # a threshold is missing
        {"drawn": []},
        {"drawn": [*DRAWN[:9], *DRAWN[:1], *DRAWN[10:]]},  # more above a higher threshold
        {"drawn": [[[3, 3], [0, 0], [0, 0]], *DRAWN[1:]]},  # more right than true
        {"drawn": [[[1, 2], [0, 0], [0, 0]], *DRAWN[1:]]},
        {"drawn": [[[3, 1], [0, 0], [0, 0]], *DRAWN[1:]]},  # more wrong than texts without the label
        {"drawn": "many"},
        {"drawn": [[[1.5, 1], [0, 0], [0, 0]], *DRAWN[1:]]},
        {"counts": [[2, 1, 2], [0, 0, 0], [0, 0, 0]]},  # more right than predicted
        {"counts": [[3, 2, 1], [0, 0, 0], [0, 0, 0]]},  # more texts than there are
        {"counts": [[1, 1], [0, 0], [0, 0]]},
        {"counts": [[1, 1, 1], [0, 0, 0]]},
        {"whole": 3},  # every text is right, and a label is not
        {"whole": 0},  # no text is right, and one label of one text is wrong
        {"texts": -1},
        {"loss": -1.0},
        {"counts": "many"},
    ],
)
def test_sums_that_no_predictions_have_are_refused(change):
    fine = {"counts": [[2, 1, 1], [0, 0, 0], [0, 0, 0]], "whole": 2, "texts": 3, "loss": 1.5, "broken": 0}
    fine["drawn"] = DRAWN
    assert sums_from_dict(MOODS, fine).to_dict() == fine
    with pytest.raises(WireError, match="evaluation sums"):
        sums_from_dict(MOODS, fine | change)


def test_the_best_constant_answer():
    labels = rows({"anger"}, {"anger"}, {"anger", "joy"}, set())
    # anger to all: 2 * 3 / (4 + 4); anger and joy to all: 2 * 4 / (4 + 8).
    assert constant_score(MOODS, labels) == pytest.approx(6 / 8)
    macro = Task("moods", "multilabel", ("text",), "labels", "macro_f1", labels=MOODS.labels)
    assert constant_score(macro, labels) == pytest.approx((6 / 7 + 0 + 2 / 5) / 3)
    subset = Task("moods", "multilabel", ("text",), "labels", "subset_accuracy", labels=MOODS.labels)
    assert constant_score(subset, labels) == pytest.approx(2 / 4)


# -- thresholds --------------------------------------------------------------------------------------------------------


def test_thresholds_are_the_best_ones_on_validation_and_one_for_rare_labels():
    chance = np.random.default_rng(0)
    count = 400
    true = np.zeros((count, 3), np.uint8)
    true[:100, 0], true[100:200, 1], true[: RARE - 1, 2] = 1, 1, 1
    shares = chance.uniform(0.01, 0.09, (count, 3))
    shares[:100, 0] = 0.15  # best from .09 to .14
    shares[100:200, 1] = 0.85  # best from .09 to .84, of which the nearest to the fixed one is taken
    shares[: RARE - 1, 2] = 0.95
    outputs = np.log(shares / (1 - shares))
    fitted = KIND.fitted(MOODS, outputs, true)
    assert fitted.fitted[0] == pytest.approx(0.14)
    assert fitted.fitted[1] == pytest.approx(THRESHOLD)
    # All together are told apart by .09 to .14 too: the rare label would be by itself at THRESHOLD.
    assert fitted.fitted[2] == pytest.approx(0.14)
    assert score(fitted, sum_predictions(fitted, outputs, true, 0.0)).metrics["macro_f1"] == 1.0
    assert score(MOODS, sum_predictions(MOODS, outputs, true, 0.0)).metrics["macro_f1"] == pytest.approx(2 / 3)


def test_answers_are_what_is_above_the_thresholds():
    task = Task("moods", "multilabel", ("text",), "labels", "f1", labels=MOODS.labels, fitted=(0.1, 0.9, 0.5))
    outputs = np.log(np.array([0.2, 0.8, 0.6]) / np.array([0.8, 0.2, 0.4]))
    answer = KIND.answer(task, outputs)
    assert answer.to_json()["labels"] == ["joy", "anger"]
    assert answer.probabilities == pytest.approx({"anger": 0.2, "fear": 0.8, "joy": 0.6})
    assert answer.lines("", coloured=False) == ["joy (0.600), anger (0.200)"]
    assert answer.cells()[""] == ["joy", "anger"]
    assert answer.scored()["probability"] == pytest.approx(0.2)
    assert KIND.answer(MOODS, np.full(3, -9.0)).lines("", coloured=False) == ["no label"]
    assert thresholds(MOODS).tolist() == [THRESHOLD] * 3


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_of_the_labels_with_torch_and_without():
    outputs, labels = np.array([[0.0, 2.0, -1.0]]), rows({"fear"})
    # -log(1 - 1/2) - log(sigmoid 2) - log(1 - sigmoid -1)
    expected = math.log(2) + math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))
    assert KIND.plain_losses(MOODS, outputs, labels).tolist() == pytest.approx([expected])
    found = KIND.losses(MOODS, torch.from_numpy(outputs), torch.from_numpy(labels))
    assert found.tolist() == pytest.approx([expected])


def test_divergences_and_soft_labels_are_zero_where_nothing_differs():
    first, second = torch.tensor([[0.3, -2.0, 1.0]]), torch.tensor([[0.3, 0.0, 1.0]])
    assert KIND.divergences(MOODS, first, first).tolist() == [0.0]
    # Both ways: (p - q) (a - b) of the label that differs.
    assert KIND.divergences(MOODS, first, second).tolist() == pytest.approx([(1 / (1 + math.e**2) - 0.5) * -2.0])
    assert float(KIND.distillation_loss(MOODS, first, first, 2.0)) == pytest.approx(0.0, abs=1e-7)
    share, other = 1 / (1 + math.exp(1.0)), 0.5
    expected = 4 * (share * math.log(share / other) + (1 - share) * math.log((1 - share) / (1 - other)))
    assert float(KIND.distillation_loss(MOODS, first, second, 2.0)) == pytest.approx(expected, rel=1e-5)


def test_labels_are_counted_dealt_and_joined():
    labels = rows({"anger", "joy"}, {"anger"}, {"anger"}, set(), {"joy"})
    assert KIND.counts(MOODS, labels) == [3, 0, 2]
    # joy is rarer than anger.
    assert KIND.groups(labels).tolist() == [3, 1, 1, 0, 3]
    table = Table({"text": ["a", "b"], "labels": ["anger", ""]}, "here")
    whole = join_examples(MOODS, [examples_from(table, MOODS), no_examples(MOODS)])
    assert whole.labels.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert [KIND.written_label(MOODS, label) for label in whole.labels] == ['["anger"]', "[]"]
    assert KIND.counts(MOODS, no_examples(MOODS).labels) == [0, 0, 0]


# -- files -------------------------------------------------------------------------------------------------------------

TEXTS = ("so glad", "how awful", "well")


def read(tmp_path, name, content, task=OPEN):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    table = KIND.read_file(task, path)
    if not task.labels:
        task = Task("moods", "multilabel", ("text",), "labels", "f1", labels=tuple(KIND.found_labels(task, [table])))
    return task.labels, examples_from(table, task).labels.tolist()


FOUND = (("anger", "fear", "joy"), [[0, 0, 1], [1, 1, 0], [0, 0, 0]])
FORMS = {
    "commas.tsv": "text\tlabels\nso glad\tjoy\nhow awful\tanger,fear\nwell\t\n",
    "spaces.tsv": "text\tlabels\nso glad\tjoy\nhow awful\tfear, anger\nwell\t\n",
    "semicolons.csv": "text,labels\nso glad,joy\nhow awful,anger;fear\nwell,\n",
    "pipes.csv": "text,labels\nso glad,joy\nhow awful,anger|fear\nwell,\n",
    "quoted.csv": 'text,labels\nso glad,joy\nhow awful,"anger,fear"\nwell,""\n',
    "json.tsv": 'text\tlabels\nso glad\t["joy"]\nhow awful\t["fear", "anger"]\nwell\t[]\n',
    "flags.csv": "text,anger,fear,joy\nso glad,0,0,1\nhow awful,1,1,0\nwell,0,0,0\n",
    "flags.tsv": (
        "id\ttext\tanger\tfear\tjoy\n7\tso glad\tFalse\t0\t1.0\n8\thow awful\tTrue\t1\t0.0\n9\twell\tFalse\t0\t0.0\n"
    ),
    "lists.jsonl": "".join(
        json.dumps({"text": text, "labels": labels}) + "\n"
        for text, labels in zip(TEXTS, (["joy"], ["fear", "anger"], []), strict=True)
    ),
    "words.jsonl": "".join(
        json.dumps({"text": text, "labels": labels}) + "\n"
        for text, labels in zip(TEXTS, ("joy", "fear,anger", ""), strict=True)
    ),
    "flags.jsonl": "".join(
        json.dumps({"text": text, "anger": anger, "fear": anger, "joy": joy}) + "\n"
        for text, anger, joy in zip(TEXTS, (0, 1, 0), (1, 0, 0), strict=True)
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_labels_is_read(tmp_path, name):
    assert read(tmp_path, name, FORMS[name]) == FOUND
    assert read(tmp_path, name, FORMS[name], MOODS) == FOUND


def test_parquet_has_lists_and_flags(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "lists.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "labels": [["joy"], ["fear", "anger"], []]}), path)
    table = KIND.read_file(MOODS, path)
    assert examples_from(table, MOODS).labels.tolist() == FOUND[1]
    path = tmp_path / "flags.parquet"
    parquet.write_table(
        pyarrow.table({"text": TEXTS, "anger": [0, 1, 0], "fear": [0, 1, 0], "joy": [True, False, False]}), path
    )
    assert examples_from(KIND.read_file(MOODS, path), MOODS).labels.tolist() == FOUND[1]


def test_numbers_of_a_hub_dataset_are_called_by_their_names():
    columns = {"text": list(TEXTS), "labels": [[2], [0, 1], []]}
    table = KIND.read_rows(OPEN, columns, "hub moods", lambda column: ["anger", "fear", "joy"])
    assert KIND.found_labels(OPEN, [table]) == ["anger", "fear", "joy"]
    assert examples_from(table, MOODS).labels.tolist() == FOUND[1]


def test_labels_with_a_separator_in_them_are_told_by_their_list(tmp_path):
    names = ("Doe, Jane", "Smith, John")
    task = Task("moods", "multilabel", ("text",), "labels", "f1", labels=names)
    content = "text\tlabels\nso glad\tSmith, John\nhow awful\tSmith, John;Doe, Jane\n"
    assert read(tmp_path, "names.tsv", content, task) == (names, [[0, 1], [1, 1]])


def test_a_builtin_task_may_have_its_labels_by_number(tmp_path):
    task = resolve_task(Config.model_validate({"tasks": {"goemotions": {}}, "data": {"root": "here"}}), "goemotions")
    assert (len(task.labels), task.metric, task.text, task.label) == (28, "macro_f1", ("text",), "labels")
    _, found = read(tmp_path, "train.tsv", "text\tlabels\nso glad\t17,0\nwell\t27\n", task)
    assert [np.flatnonzero(row).tolist() for row in found] == [[0, 17], [27]]
    _, found = read(tmp_path, "train.tsv", "text\tlabels\nso glad\tjoy,admiration\nwell\tneutral\n", task)
    assert [np.flatnonzero(row).tolist() for row in found] == [[0, 17], [27]]


TWO_LINES = "text\tlabels\nso glad\tjoy\n"
MISTAKES = {
    "another label": ("a.tsv", TWO_LINES + "well\tjoy,angr\n", "line 3: label 'angr' in column labels is not one of"),
    "another label alone": ("a.tsv", TWO_LINES + "well\tangr\n", "line 3: label 'angr' in column labels is not one of"),
    "another separator": (
        "a.tsv",
        TWO_LINES + "well\tjoy/fear\n",
        "line 3: label 'joy/fear' in column labels is not one of anger, fear, joy; write one of , ; | between labels",
    ),
    "spaces between labels": (
        "a.tsv",
        TWO_LINES + "well\tjoy fear\n",
        "line 3: label 'joy fear' in column labels is not one of anger, fear, joy; write one of , ; | between",
    ),
    "another case": ("a.tsv", TWO_LINES + "well\tJoy\n", "line 3: label 'Joy' in .*; write 'joy'$"),
    "a list of Python": ("a.tsv", TWO_LINES + "well\t['joy', 'fear']\n", "line 3: "),
    "a label twice": (
        "a.tsv",
        TWO_LINES + "well\tjoy,fear,joy\n",
        "line 3: label 'joy' in column labels stands there twice",
    ),
    "a label twice in a list": (
        "a.jsonl",
        '{"text": "so", "labels": ["joy", "joy"]}\n',
        "line 1: label 'joy' in column",
    ),
    "an end without a label": (
        "a.tsv",
        TWO_LINES + "well\tjoy,fear,\n",
        "line 3: column labels has nothing on one side of a `,`",
    ),
    "nothing between": (
        "a.csv",
        "text,labels\nwell,joy;;fear\n",
        "line 2: column labels has nothing on one side of a `;`",
    ),
    "a list that does not end": ("a.tsv", TWO_LINES + 'well\t["joy", "fear"\n', "line 3: "),
    "a list with quotes missing": ("a.tsv", TWO_LINES + "well\t[joy]\n", "line 3: "),
    "an object for a list": (
        "a.jsonl",
        '{"text": "so", "labels": {"joy": 1}}\n',
        "line 1: {'joy': 1} is no list of labels",
    ),
    "null for a list": (
        "a.jsonl",
        '{"text": "so", "labels": null}\n',
        "line 1: None is no list of labels; .* for none",
    ),
    "true for a list": ("a.jsonl", '{"text": "so", "labels": true}\n', "line 1: True is no list of labels"),
    "a list in a list": (
        "a.jsonl",
        '{"text": "so", "labels": [["joy"]]}\n',
        r"line 1: its list has \['joy'\], which is no label",
    ),
    "half a label": ("a.jsonl", '{"text": "so", "labels": [1.5]}\n', "line 1: its list has 1.5, which is no label"),
    "an empty label": ("a.jsonl", '{"text": "so", "labels": [" "]}\n', "line 1: its list has ' ', which is no label"),
    "no labels in a line": (
        "a.jsonl",
        '{"text": "a", "labels": []}\n{"text": "b"}\n',
        "line 2: has no 'labels'; write",
    ),
    "a flag of 2": ("a.csv", "text,anger,fear,joy\na,0,0,1\nb,0,2,0\n", "line 3: column fear has '2', and says 0 or 1"),
    "a flag of yes": ("a.csv", "text,anger,fear,joy\na,0,0,1\nb,yes,0,0\n", "line 3: column anger has 'yes'"),
    "an empty flag": (
        "a.csv",
        "text,anger,fear,joy\na,0,0,1\nb,0,,0\n",
        "line 3: column fear has nothing, and says 0 or 1",
    ),
    "a column of flags missing": (
        "a.csv",
        "text,anger,fear\na,0,1\n",
        "has no column of 0 and 1 for 'joy', one of the labels",
    ),
    "no column of labels": ("a.csv", "text,mood\na,joy\n", "has no column 'labels'; write one of text, mood under"),
    "no column of texts": ("a.csv", "sentence,labels\na,joy\n", "has no column 'text'; write one of"),
    "a text missing": ("a.tsv", TWO_LINES + "\tfear\n", "line 3: column text is empty"),
    "Latin-1 bytes": ("a.tsv", TWO_LINES.encode() + b"caf\xe9\tjoy\n", "line 3: is not UTF-8"),
    "a quote that does not end": ("a.csv", 'text,labels\na,"joy,fear\n', "line 2: bad csv"),
    "a value too many": ("a.csv", "text,labels\na,joy,fear\n", "line 2: has 3 values, the header 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_files_are_one_line_with_file_and_line(tmp_path, mistake):
    name, content, words = MISTAKES[mistake]
    with pytest.raises(DataError, match=words) as caught:
        read(tmp_path, name, content, MOODS)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


OPEN_MISTAKES = {
    "two separators": (
        "text\tlabels\na\tjoy;fear\nb\tjoy,anger\n",
        "line 2: column labels has `;`, and `,` in other rows",
    ),
    "no label at all": ("text\tlabels\na\t\nb\t\n", "no text has a label; add some"),
    "a flag among words": ("text\tjoy\tfear\n" + "a\t0\t1\n" * 19 + "b\tmaybe\t0\n", "line 21: column joy has 'maybe'"),
}


@pytest.mark.parametrize("mistake", OPEN_MISTAKES)
def test_mistakes_where_labels_are_found_in_files(tmp_path, mistake):
    content, words = OPEN_MISTAKES[mistake]
    with pytest.raises(DataError, match=words):
        read(tmp_path, "train.tsv", content)


def test_a_column_of_flags_that_validation_lacks_is_said(tmp_path):
    (tmp_path / "train.csv").write_text("text,anger,joy\na,0,1\nb,1,0\n")
    (tmp_path / "dev.csv").write_text("text,anger\nc,1\nd,0\n")
    files = {"train": str(tmp_path / "train.csv"), "validation": str(tmp_path / "dev.csv")}
    config = Config.model_validate({"tasks": {"moods": {"kind": "multilabel", "source": files}}})
    with pytest.raises(DataError, match=r"dev.csv: has no column of 0 and 1 for 'joy', one of the labels of moods"):
        load_tasks(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, r"dev.tsv, line 3: label 'envy' in column labels is not one of anger, joy; mend it, or list every label"),
        ({"labels": ["joy", "envy"]}, r"train.tsv, line 3: label 'anger' in column labels is not one of joy, envy"),
    ],
)
def test_a_label_that_validation_has_alone_or_the_list_lacks_is_said(tmp_path, keys, words):
    (tmp_path / "train.tsv").write_text("text\tlabels\na\tjoy\nb\tanger,joy\n")
    (tmp_path / "dev.tsv").write_text("text\tlabels\nc\tjoy\nd\tjoy,envy\n")
    files = {"train": str(tmp_path / "train.tsv"), "validation": str(tmp_path / "dev.tsv")}
    config = Config.model_validate({"tasks": {"moods": {"kind": "multilabel", "source": files, **keys}}})
    with pytest.raises(DataError, match=words) as caught:
        load_tasks(config)
    assert "\n" not in str(caught.value)


def test_columns_of_flags_are_the_labels_in_their_order_and_are_said(tmp_path):
    (tmp_path / "train.csv").write_text("text,zeal,anger\n" + "a,0,1\nb,1,0\nc,0,0\nd,0,1\n")
    config = Config.model_validate(
        {"tasks": {"moods": {"kind": "multilabel", "source": {"train": str(tmp_path / "train.csv")}}}}
    )
    part = load_tasks(config)["moods"]
    assert part.task.labels == ("zeal", "anger")
    assert "the labels of moods are 2 columns of 0 and 1" in part.origin


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"class_weights": "balanced"}, "tasks.moods.class_weights: found on a multilabel"),
        ({"outputs": 1}, "tasks.moods.outputs: found 1 on a multilabel"),
        ({"score_range": [0, 1]}, "tasks.moods.score_range: found on a multilabel"),
        ({"metric": "accuracy"}, "tasks.moods.metric: found accuracy on a multilabel, write one of f1, macro_f1"),
        ({"head": "pretrained"}, "tasks.moods.head: found pretrained on a task that is a multilabel"),
    ],
)
def test_keys_that_mean_nothing_are_refused(keys, words):
    tasks = {"moods": {"kind": "multilabel", "source": {"train": "train.tsv"}, **keys}}
    with pytest.raises(ConfigError, match=words):
        resolve_task(Config.model_validate({"tasks": tasks}), "moods")


def test_thresholds_of_a_file_are_one_for_each_label():
    from dataclasses import replace

    assert KIND.problem(replace(MOODS, fitted=(0.1, 0.2, 0.3))) is None
    assert KIND.problem(replace(MOODS, fitted=(0.1, 0.2))) is not None
    assert KIND.problem(replace(MOODS, fitted=(0.1, 0.2, float("nan")))) is not None
    assert KIND.problem(replace(MOODS, labels=())) is not None
