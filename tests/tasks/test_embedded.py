"""The embedded data: what it promises, and that its pairs cannot be solved by counting words."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

from fedmtl.errors import DataError
from fedmtl.tasks.embedded import (
    EMBEDDED,
    NEGATIONS,
    NUM_EXAMPLES,
    SETTINGS,
    TAGGED,
    Event,
    Wording,
    embedded_columns,
    move_negation,
    phrases_of,
    rate,
    swap_roles,
    vocabulary,
    write,
)
from fedmtl.tasks.words import SEPARATOR, join_words

# PEOPLE: 0 doctor/physician, 1 lawyer/attorney, 2 teacher; VERBS: 0 helped/assisted; SETTINGS: 6 on monday.
HELPED = Event(agent=0, verb=0, patient=1)


def test_tagged_texts_have_the_phrases_of_their_types():
    columns = embedded_columns("settings", "train")
    assert (columns["tokens"][0], columns["tags"][0]) == (
        join_words(["the", "teacher", "hired", "the", "cook"]),
        SEPARATOR.join("OOOOO"),
    )
    for task, types in TAGGED.items():
        columns = embedded_columns(task, "validation")
        assert len(columns["tokens"]) == NUM_EXAMPLES["validation"] == len(set(columns["tokens"]))
        found = {tag[2:] for cell in columns["tags"] for tag in cell.split(SEPARATOR) if tag != "O"}
        assert found == set(types)
        for text, cell in zip(columns["tokens"], columns["tags"], strict=True):
            assert text.count(SEPARATOR) == cell.count(SEPARATOR) + 1
            assert set(text.split()) <= set(vocabulary())


def test_roles_are_those_of_the_event_in_either_voice():
    helped = Event(agent=0, verb=0, patient=1, setting=6)
    assert phrases_of(helped, Wording()) == [
        ("the doctor", "doer"), ("helped", ""), ("the lawyer", "receiver"), ("on monday", "time"),
    ]  # fmt: skip
    assert phrases_of(helped, Wording(is_passive=True, is_setting_first=True)) == [
        ("on monday", "time"), (",", ""), ("the lawyer", "receiver"), ("was helped by", ""), ("the doctor", "doer"),
    ]  # fmt: skip
    assert phrases_of(Event(0, 0, 1, spared=2), Wording())[-1] == ("but not the teacher", "")
    assert phrases_of(Event(0, 0, 1, setting=4), Wording())[-1] == ("near the river", "place")


def texts_of(task: str, split: str, seed: int = 0) -> list[tuple[str, ...]]:
    columns = embedded_columns(task, split, seed)
    return list(zip(*(column for name, column in columns.items() if name != "label"), strict=True))


def bag_of_words(task: str) -> tuple[np.ndarray, list[str], np.ndarray, list[str]]:
    """Train and validation as counts of words: of each text, their difference and their product."""
    counter = CountVectorizer(vocabulary=vocabulary(), token_pattern=r"\w+|,")

    def features(split: str) -> np.ndarray:
        counts = [counter.transform(texts).toarray() for texts in zip(*texts_of(task, split), strict=True)]
        if len(counts) == 1:
            return counts[0]
        first, second = counts
        return np.hstack([first, second, abs(first - second), first * second])

    train, validation = embedded_columns(task, "train"), embedded_columns(task, "validation")
    return features("train"), train["label"], features("validation"), validation["label"]


def test_first_rows_stay_the_same_on_every_platform():
    first_rows = [[column[0] for column in embedded_columns(task, "train").values()] for task in EMBEDDED]
    assert first_rows == [
        ["the story is inspired and gripping", "positive"],
        ["the lawyer watched the actor in the garden", "the actor watched the lawyer in the garden", "different"],
        ["the instructor was followed by the cook", "the instructor never followed the cook", "0.0"],
        [
            "the trooper at no time interrogated the child",
            "the soldier at no time interrogated the kid",
            "entailment",
        ],
    ]


@pytest.mark.parametrize("task", EMBEDDED)
def test_another_seed_gives_other_texts(task):
    shared = set(texts_of(task, "train", seed=0)) & set(texts_of(task, "train", seed=1))
    assert len(shared) < NUM_EXAMPLES["train"] / 2


def test_a_caller_may_change_the_columns_it_was_given():
    embedded_columns("sentiment", "train")["label"].clear()
    assert len(embedded_columns("sentiment", "train")["label"]) == NUM_EXAMPLES["train"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("task", EMBEDDED)
def test_no_text_or_pair_occurs_twice_in_either_order(task, seed):
    texts = texts_of(task, "train", seed) + texts_of(task, "validation", seed)
    assert len({frozenset(row) for row in texts}) == sum(NUM_EXAMPLES.values())


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("task", "labels"), [("sentiment", ["negative", "positive"]), ("paraphrase", ["different", "same"])]
)
def test_classes_are_exactly_balanced(task, labels, split):
    column = embedded_columns(task, split)["label"]
    assert [column.count(label) for label in labels] == [NUM_EXAMPLES[split] // 2] * 2


@pytest.mark.parametrize("split", ["train", "validation"])
def test_three_classes_are_balanced_to_one_example(split):
    column = embedded_columns("entailment", split)["label"]
    counts = [column.count(label) for label in ("contradiction", "neutral", "entailment")]
    assert sum(counts) == NUM_EXAMPLES[split]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("split", ["train", "validation"])
def test_scores_span_0_to_5_with_one_decimal(split):
    column = embedded_columns("similarity", split)["label"]
    assert (min(column), max(column)) == ("0.0", "5.0")
    assert all(label == f"{float(label):.1f}" for label in column)


def test_vocabulary_is_exactly_what_the_texts_use():
    rows = [row for task in EMBEDDED for split in NUM_EXAMPLES for row in texts_of(task, split)]
    assert vocabulary() == sorted({word for row in rows for text in row for word in text.split()})


def test_texts_have_3_to_14_words():
    lengths = {
        len(text.replace(",", "").split()) for task in EMBEDDED for row in texts_of(task, "train") for text in row
    }
    assert lengths <= set(range(3, 15))


def test_wording_changes_the_words_and_not_the_meaning():
    event = Event(agent=0, verb=0, patient=1, setting=6, is_negated=True)
    assert write(event, Wording()) == "the doctor never helped the lawyer on monday"
    reworded = Wording(is_passive=True, is_setting_first=True, agent=1, verb=1, patient=1, negation=1)
    assert write(event, reworded) == "on monday , the attorney was at no time assisted by the physician"
    assert rate(event, event) == 5.0


def test_swapped_roles_use_the_same_words_and_score_2():
    swapped = swap_roles(HELPED)
    assert write(HELPED, Wording()) == "the doctor helped the lawyer"
    assert write(swapped, Wording()) == "the lawyer helped the doctor"
    assert rate(HELPED, swapped) == 5.0 - 3.0


def test_moved_negation_uses_the_same_words_and_scores_2_5():
    event = Event(agent=0, verb=0, patient=1, spared=2)
    moved = move_negation(event)
    assert write(event, Wording()) == "the doctor helped the lawyer but not the teacher"
    assert write(moved, Wording()) == "the doctor helped the teacher but not the lawyer"
    assert rate(event, moved) == 5.0 - 2.5


@pytest.mark.parametrize(
    ("other", "score"),
    [
        (Event(agent=2, verb=0, patient=1), 5.0 - 1.2),
        (Event(agent=0, verb=3, patient=1), 5.0 - 1.5),
        (Event(agent=2, verb=3, patient=4), 5.0 - 1.2 - 1.2 - 1.5),
        (Event(agent=0, verb=0, patient=1, is_negated=True), 5.0 - 2.0),
        (Event(agent=0, verb=0, patient=1, setting=6), 5.0 - 0.6),
        (Event(agent=0, verb=0, patient=1, spared=2), 5.0 - 0.8),
        (Event(agent=1, verb=3, patient=0, is_negated=True), 0.0),  # 5 - 3 - 1.5 - 2 is below the floor
    ],
)
def test_every_part_that_differs_lowers_the_score(other, score):
    assert rate(HELPED, other) == pytest.approx(score)


def test_a_pair_of_the_same_words_in_another_order_is_different():
    rows = zip(*embedded_columns("paraphrase", "train").values(), strict=True)
    labels = [label for first, second, label in rows if sorted(first.split()) == sorted(second.split())]
    assert len(labels) > 30
    assert set(labels) == {"different"}


def test_active_against_passive_is_the_same_as_often_as_not():
    rows = zip(*embedded_columns("paraphrase", "train").values(), strict=True)
    labels = [label for first, second, label in rows if (" by " in first) != (" by " in second)]
    assert 0.45 < labels.count("same") / len(labels) < 0.55


def test_words_alone_tell_most_but_not_all_sentiments():
    train, labels, validation, expected = bag_of_words("sentiment")
    accuracy = LogisticRegression(C=0.1).fit(train, labels).score(validation, expected)
    assert 0.65 < accuracy < 0.85


def test_words_alone_do_not_tell_paraphrases():
    train, labels, validation, expected = bag_of_words("paraphrase")
    assert LogisticRegression(C=0.1).fit(train, labels).score(validation, expected) <= 0.62


def test_words_alone_tell_little_of_entailment_and_the_second_text_nothing():
    train, labels, validation, expected = bag_of_words("entailment")
    train, labels = train[:1200], labels[:1200]
    assert LogisticRegression(C=0.1, max_iter=300).fit(train, labels).score(validation, expected) < 0.8
    second = slice(len(vocabulary()), 2 * len(vocabulary()))
    only = LogisticRegression(C=0.1, max_iter=300).fit(train[:, second], labels).score(validation[:, second], expected)
    assert only < 0.45


def test_a_negated_first_text_with_a_setting_is_not_followed_by_one_without():
    # "never on monday" says nothing of the other days.
    rows = zip(*embedded_columns("entailment", "train").values(), strict=True)
    has_setting = [
        any(setting in text for setting in SETTINGS) for first, second, _ in rows for text in (first, second)
    ]
    firsts, seconds = has_setting[::2], has_setting[1::2]
    columns = embedded_columns("entailment", "train")
    negated = [any(word in text for word in NEGATIONS) for text in columns["sentence1"]]
    assert not any(n and a and not b for n, a, b in zip(negated, firsts, seconds, strict=True))
    assert sum(a and not b for a, b in zip(firsts, seconds, strict=True)) > 100


def test_words_alone_do_not_tell_similarity():
    train, labels, validation, expected = bag_of_words("similarity")
    predicted = Ridge(alpha=100.0).fit(train, np.array(labels, dtype=float)).predict(validation)
    scores = np.array(expected, dtype=float)
    assert np.corrcoef(predicted, scores)[0, 1] < 0.45
    first, second = np.split(validation[:, : 2 * len(vocabulary())].astype(float), 2, axis=1)
    cosine = (first * second).sum(1) / (np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1))
    assert np.corrcoef(cosine, scores)[0, 1] < 0.45


def test_an_unknown_task_or_split_names_the_choices():
    with pytest.raises(DataError, match="choose one of sentiment, paraphrase, similarity"):
        embedded_columns("sst2", "train")
    with pytest.raises(DataError, match="choose one of train, validation"):
        embedded_columns("sentiment", "test")
