"""Tagging: spans are counted as seqeval counts them, sums merge, and what a client sends is checked."""

import json
import random
import warnings
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.config import Config
from fedmtl.errors import ConfigError, DataError, WireError
from fedmtl.tasks.kinds.tagging import TaggingSums, count_spans, tag_names
from fedmtl.tasks.metrics import evaluation_event, score, sum_predictions, sums_from_dict
from fedmtl.tasks.resolve import resolve_task
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.sources import Table
from fedmtl.tasks.tag_schemes import lenient_spans, split_tag, strict_spans
from fedmtl.tasks.task import Task
from fedmtl.tasks.words import SEPARATOR, join_words
from tasks.kinds.small_tasks import quick

NAMES = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("LOC", "PER"))
TAGS = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
KIND = NAMES.kind_of


def numbers(tags):
    return [TAGS.index(tag) for tag in tags.split()]


def sums_of(pairs, loss=0.0):
    """Sums of a model that is sure of the second tags of every pair, where the first are true."""
    true = Sequences.of([numbers(tags) for tags, _ in pairs], np.int64)
    guess = Sequences.of([numbers(tags) for _, tags in pairs], np.int64)
    return sum_predictions(NAMES, guess.with_values(np.eye(len(TAGS))[guess.values]), true, loss)


def random_pairs(seed, count, tags=TAGS):
    chance = random.Random(seed)
    lengths = [chance.randint(0, 9) for _ in range(count)]
    return [tuple(" ".join(chance.choices(tags, k=length)) for _ in range(2)) for length in lengths]


def test_outputs_stand_for_the_tags_of_each_type():
    assert tag_names(NAMES) == TAGS
    assert KIND.num_outputs(NAMES) == 5


def test_spans_are_right_where_words_and_type_are():
    sums = sums_of(
        [
            ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC"),
            # A word short, and another type.
            ("B-PER I-PER O B-LOC", "B-PER O O B-PER"),
            ("O O O O", "O B-LOC O O"),
        ]
    )
    # LOC: true 2, predicted 2, right 1; PER: true 2, predicted 3, right 1, and one with a word too few.
    assert sums.counts.tolist() == [[2, 2, 1, 2, 1, 0], [2, 3, 1, 3, 1, 1]]
    # True LOC, PER and none by row: a LOC was taken for a PER, a PER was not found, and each type once where none is.
    assert sums.confusion.tolist() == [[1, 1, 0], [0, 1, 1], [1, 1, 0]]
    found = score(NAMES, sums)
    assert found.examples == 3
    assert found.metrics == pytest.approx(
        {"f1": 4 / 9, "macro_f1": (2 / 4 + 2 / 5) / 2, "strict_f1": 4 / 9, "precision": 2 / 5, "recall": 2 / 4}
    )
    by_label = KIND.evaluation_fields(NAMES, sums)["by_label"]
    assert by_label["PER"] == pytest.approx(
        {"f1": 2 / 5, "precision": 1 / 3, "recall": 1 / 2, "true": 2, "predicted": 3, "right": 1, "other_words": 1}
    )
    event = evaluation_event(1, NAMES, sums)
    assert (event.confusion, event.confusion_names) == (sums.confusion.tolist(), ["LOC", "PER", "no span"])


def test_what_types_are_taken_for_is_not_counted_of_very_many():
    labels = tuple(f"type {n}" for n in range(61))
    task = Task("codes", "tagging", ("tokens",), "tags", "f1", labels=labels)
    outputs = Sequences(np.eye(KIND.num_outputs(task))[[1, 3]], np.array([0, 2]))
    sums = sum_predictions(task, outputs, Sequences.of([[1, 1]], np.int64), 0.0)
    assert (sums.confusion.size, sums.counts.sum(0).tolist()) == (0, [2, 2, 1, 2, 1, 0])
    assert evaluation_event(1, task, sums).confusion is None
    assert sums_from_dict(task, json.loads(json.dumps(sums.to_dict()))).to_dict() == sums.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "prefixes"), [("IOB1", "BI"), ("IOB2", "BI"), ("IOBES", "BIES")])
def test_scores_of_random_tags_are_those_of_seqeval(scheme, prefixes):
    metrics, schemes = pytest.importorskip("seqeval.metrics"), pytest.importorskip("seqeval.scheme")
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("LOC", "PER"))]
    pairs = [tuple(each.split() for each in pair) for pair in random_pairs(3, 10_000, tags)]
    split = [tuple([split_tag(tag) for tag in each] for each in pair) for pair in pairs]
    true, guess = map(list, zip(*pairs, strict=True))
    strictly = {"mode": "strict", "scheme": getattr(schemes, scheme)}
    for read, options in ((lenient_spans, {}), (lambda tags: strict_spans(tags, scheme), strictly)):
        counts = count_spans(NAMES.labels, split, read)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = metrics.classification_report(true, guess, output_dict=True, zero_division=0, **options)
        for label, (num_true, predicted, right) in zip(NAMES.labels, counts.tolist(), strict=True):
            assert report[label]["support"] == num_true
            assert report[label]["precision"] == pytest.approx(right / predicted, abs=1e-12)
            assert report[label]["recall"] == pytest.approx(right / num_true, abs=1e-12)
            assert report[label]["f1-score"] == pytest.approx(2 * right / (num_true + predicted), abs=1e-12)
        num_true, predicted, right = counts.sum(0).tolist()
        assert report["micro avg"]["f1-score"] == pytest.approx(2 * right / (num_true + predicted), abs=1e-12)


def test_metrics_of_random_predictions_are_those_of_seqeval():
    metrics, schemes = pytest.importorskip("seqeval.metrics"), pytest.importorskip("seqeval.scheme")
    # Labels are whole, as those of files are once they are read.
    pairs = [(tags, guess) for tags, guess in random_pairs(5, 2000) if is_iob2(tags)]
    true, guess = ([each.split() for each in side] for side in zip(*pairs, strict=True))
    found = score(NAMES, sums_of(pairs)).metrics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "f1": metrics.f1_score(true, guess),
            "macro_f1": metrics.f1_score(true, guess, average="macro"),
            "strict_f1": metrics.f1_score(true, guess, mode="strict", scheme=schemes.IOB2),
            "precision": metrics.precision_score(true, guess),
            "recall": metrics.recall_score(true, guess),
        }
    assert found == pytest.approx(expected, abs=1e-12)


def is_iob2(tags):
    split = [split_tag(tag) for tag in tags.split()]
    return lenient_spans(split) == strict_spans(split, "IOB2")


@quick
@given(st.integers(0, 1000), st.lists(st.integers(0, 3), min_size=20, max_size=20))
def test_sums_of_any_partition_are_those_of_the_whole(seed, owners):
    pairs = random_pairs(seed, 20)
    whole = sums_of(pairs)
    parts = [sums_of([pair for pair, owner in zip(pairs, owners, strict=True) if owner == n]) for n in range(4)]
    merged = reduce(add, parts)
    assert merged.to_dict() == whole.to_dict()
    assert merged.examples == whole.examples == 20
    assert merged.counts[:, :3].tolist() == counted_one_by_one(pairs)
    assert sums_from_dict(NAMES, json.loads(json.dumps(merged.to_dict()))).to_dict() == whole.to_dict()


def counted_one_by_one(pairs):
    split = [tuple([split_tag(tag) for tag in each.split()] for each in pair) for pair in pairs]
    return count_spans(NAMES.labels, split, lenient_spans).tolist()


def test_sums_travel_as_counts_alone():
    sums = sums_of([("B-PER O", "B-PER O")], loss=0.25)
    sent = json.loads(json.dumps(sums.to_dict()))
    counts = [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    confusion = [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert sent == {"counts": counts, "texts": 1, "loss": 0.25, "broken": 0, "confusion": confusion}
    assert sums_from_dict(NAMES, sent).to_dict() == sums.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [[0, 0, 0, 0, 0, 0]]},
        {"counts": [[1, 1, 2, 1, 1, 0], [0] * 6]},
        {"counts": [[1, 1, 1, 2, 1, 0], [0] * 6]},
        {"counts": [[1, 1, 0, 1, 1, 0], [0] * 6]},
        {"counts": [[1, 1, 1, 1, 1, 1], [0] * 6]},  # shares words with a span that is right
        {"counts": [[2, 1, 1, 1, 1, 1], [0] * 6]},  # nothing is left that it could share them with
        {"counts": [[1, 1, 1, 1, 1], [0] * 5]},
        {"counts": [[1 << 40, 0, 0, 0, 0, 0], [0] * 6]},
        {"counts": [[-1, 0, 0, 0, 0, 0], [0] * 6]},
        {"confusion": [[0, 0, 0], [1, 0, 0], [0, 0, 0]]},  # another one was predicted
        {"confusion": [[0, 0, 0], [0, 0, 1], [0, 0, 1]]},
        {"confusion": [[0, 0], [0, 1]]},
        {"confusion": []},
        {"confusion": "many"},
        {"counts": "many"},
        {"texts": 1.5},
        {"loss": -1},
        {"broken": None},
    ],
)
def test_counts_that_no_predictions_have_are_refused(change):
    with pytest.raises(WireError, match="evaluation sums"):
        sums_from_dict(NAMES, {**sums_of([("B-PER", "O")]).to_dict(), **change})


def test_texts_with_outputs_that_are_not_finite_are_counted_apart():
    outputs = Sequences(np.array([[np.nan] * 5, [1.0, 0, 0, 0, 0]]), np.array([0, 1, 2]))
    sums = sum_predictions(NAMES, outputs, Sequences.of([[1], [0]], np.int64), 0.5)
    assert (sums.texts, sums.broken, sums.examples) == (1, 1, 2)
    assert score(NAMES, sums).undefined["f1"] == "1 of 2 predictions are not finite"


def test_without_spans_a_score_has_a_reason():
    found = score(NAMES, sums_of([("O O", "O O")]))
    assert set(found.metrics.values()) == {None}
    assert found.undefined["recall"] == "the texts have no span"
    assert score(NAMES, sums_of([("B-PER", "O")])).metrics["f1"] == 0.0
    assert score(NAMES, sums_of([("B-PER", "O")])).marked == "finds nothing"
    assert score(NAMES, TaggingSums(np.zeros((2, 6), np.int64), 0, 0.0)).undefined["f1"] == "no examples"


def outputs_of(tags, sure=4.0):
    return sure * np.eye(len(TAGS))[numbers(tags)]


def test_an_answer_has_the_letters_and_the_least_probability_of_each_span():
    text = "Ada Lovelace, in London"
    outputs = outputs_of("B-PER I-PER O O B-LOC")
    outputs[1, 4] = 2.0
    answer = KIND.answer(NAMES, outputs, (text,))
    assert [(text[each.start : each.end], each.label) for each in answer.entities] == [
        ("Ada Lovelace", "PER"),
        ("London", "LOC"),
    ]
    # e^2 / (e^2 + 4) of five tags, and e^4 / (e^4 + 4).
    assert answer.entities[0].probability == pytest.approx(np.exp(2) / (np.exp(2) + 4))
    assert answer.entities[1].probability == pytest.approx(np.exp(4) / (np.exp(4) + 4))
    assert answer.to_json()["entities"][1] == {
        "start": 17, "end": 23, "label": "LOC", "probability": answer.entities[1].probability, "text": "London",
    }  # fmt: skip
    assert answer.lines(text, coloured=False)[1] == "LOC 17-23 (0.932) London"
    coloured = answer.lines(text, coloured=True)[0]
    assert coloured.endswith(", in \x1b[30;43mLondon LOC\x1b[0m")
    assert answer.cells() == {"": [[0, 12, "PER"], [17, 23, "LOC"]]}
    scored = answer.scored()
    assert (scored["answer"], scored["probability"]) == ("B-PER I-PER O O B-LOC", answer.entities[0].probability)
    assert [span[:3] for span in json.loads(scored["probabilities"])] == answer.cells()[""]
    assert answer.tags == ("B-PER", "I-PER", "O", "O", "B-LOC")


def test_a_text_without_spans_is_answered():
    assert KIND.answer(NAMES, outputs_of("O"), ("so",)).lines("so", coloured=True) == ["nothing"]
    assert KIND.answer(NAMES, np.zeros((0, 5)), ("\u200b",)).to_json() == {"entities": []}


def test_letters_of_words_that_were_apart_are_those_of_the_text_with_spaces():
    answer = KIND.answer(NAMES, outputs_of("O B-LOC I-LOC"), (join_words(["In", "New", "York"]),))
    assert (answer.text, answer.entities[0].start, answer.entities[0].end) == ("In New York", 3, 11)


def table(*rows):
    return Table({"tokens": ["a"] * len(rows), "tags": [SEPARATOR.join(row.split()) for row in rows]}, "a.jsonl")


def test_tags_are_read_by_the_types_of_the_task():
    labels = KIND.parse(NAMES, table("B-PER I-PER O", "O"))
    assert [row.tolist() for row in labels] == [[3, 4, 0], [0]]
    assert KIND.counts(NAMES, labels) == [0, 1]
    assert KIND.groups(labels).tolist() == [2, 0]
    assert KIND.written_label(NAMES, labels[0]) == "B-PER I-PER O"


def test_a_type_that_the_task_does_not_have_is_named_with_its_row():
    with pytest.raises(
        DataError, match=r"a.jsonl, row 2: word 1 has the tag 'B-ORG', and the types of names are LOC, "
    ):
        KIND.parse(NAMES, table("O", "B-ORG"))


def test_types_are_found_in_the_training_data():
    assert KIND.found_labels(NAMES, [table("B-PER I-PER", "O B-LOC"), table("B-ORG")]) == ["LOC", "ORG", "PER"]
    with pytest.raises(DataError, match="no word has another tag than O"):
        KIND.found_labels(NAMES, [table("O O")])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"text": ["a", "b"]}, "tasks.own.text: found 2 columns on a tagging"),
        ({"pool": "cls"}, "tasks.own.pool: found on a tagging"),
        ({"class_weights": "balanced"}, "tasks.own.class_weights: found on a tagging"),
        ({"score_range": [0, 1]}, "tasks.own.score_range: found on a tagging"),
        ({"outputs": 1}, "tasks.own.outputs: found 1 on a tagging"),
        ({"labels": ["B-PER"]}, "tasks.own.labels: found B-PER, write types"),
        ({"labels": ["O", "PER"]}, "tasks.own.labels: found O, write types"),
        ({"metric": "accuracy"}, "tasks.own.metric: found accuracy on a tagging"),
        ({"pair": "dual"}, "tasks.own.pair"),
        ({"head": "pretrained"}, "tasks.own.head: found pretrained on a task that is a tagging"),
    ],
)
def test_keys_that_mean_nothing_are_refused(keys, words):
    config = Config.model_validate({"tasks": {"own": {"kind": "tagging", "source": {"train": "a.conll"}, **keys}}})
    with pytest.raises(ConfigError, match=words):
        resolve_task(config, "own")


def test_columns_have_defaults():
    config = Config.model_validate({"tasks": {"own": {"kind": "tagging", "source": {"train": "a.conll"}}}})
    task = resolve_task(config, "own")
    assert (task.text, task.label, task.metric) == (("tokens",), "tags", "f1")
