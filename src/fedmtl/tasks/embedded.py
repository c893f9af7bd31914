"""Six small tasks that we write ourselves, for the demo, the tutorial and the tests: no download, no files.

The pairs cannot be distinguished by their words alone. Both texts are worded independently of the label
(synonyms, active or passive, the setting first or last), and most pairs that differ in meaning differ
in who did it to whom or in what is negated. In the tables of words a row is one meaning, and its columns are ways to
say it. Two of the tasks are to tag words: who did it to whom, which no word says by itself either, and where or when.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from fedmtl.errors import DataError
from fedmtl.seeds import derive_seed
from fedmtl.tasks.words import SEPARATOR, join_words

PEOPLE = (
    ("doctor", "physician"),
    ("lawyer", "attorney"),
    ("teacher", "instructor"),
    ("actor", "performer"),
    ("writer", "author"),
    ("thief", "robber"),
    ("child", "kid"),
    ("soldier", "trooper"),
    ("cook", "chef"),
    ("pilot", "aviator"),
)

# Past tense and participle are equal, so active and passive share one form.
VERBS = (
    ("helped", "assisted"),
    ("watched", "observed"),
    ("followed", "trailed"),
    ("praised", "applauded"),
    ("blamed", "accused"),
    ("hired", "employed"),
    ("mocked", "ridiculed"),
    ("rescued", "saved"),
    ("questioned", "interrogated"),
    ("greeted", "welcomed"),
)

NEGATIONS = ("never", "at no time")

SETTINGS = (
    "in the garden",
    "in the kitchen",
    "at the station",
    "at the market",
    "near the river",
    "near the harbor",
    "on monday",
    "on friday",
    "last week",
    "last night",
    "this morning",
    "this evening",
)

WORKS = (
    "film",
    "movie",
    "story",
    "novel",
    "book",
    "play",
    "song",
    "album",
    "show",
    "concert",
    "series",
    "comedy",
)
PARTS = ("start", "ending", "cast", "script", "premise", "melody", "title", "cover")
OPENERS = ("", "", "", "i think", "we agree", "critics say", "frankly ,", "overall ,")
INTENSIFIERS = ("very", "truly", "quite", "rather", "really", "simply")

# By sentiment: row 0 is negative, row 1 positive.
ADJECTIVES = (
    (
        *("dull", "tedious", "clumsy", "bland", "silly", "boring", "awful", "lifeless"),
        *("dreary", "shallow", "messy", "stale", "weak", "ugly", "painful", "pointless"),
    ),
    (
        *("charming", "brilliant", "funny", "moving", "clever", "fresh", "warm", "gripping"),
        *("lovely", "superb", "delightful", "honest", "elegant", "inspired", "thrilling", "touching"),
    ),
)
NOUNS = (("failure", "bore", "mess", "chore"), ("triumph", "delight", "treat", "gem"))

GRAMMAR = (
    *(
        "the",
        "was",
        "by",
        "but",
        "not",
        "never",
        "at",
        "all",
        "far",
        "from",
        "hardly",
        "a",
        "an",
        "and",
        "is",
    ),
    *("despite", ","),
)


EMBEDDED = ("sentiment", "paraphrase", "similarity", "entailment")
# Task -> the types of the spans in its texts.
TAGGED = {"roles": ("doer", "receiver"), "settings": ("place", "time")}
NUM_EXAMPLES = {"train": 3000, "validation": 400}

SENTIMENTS = ("negative", "positive")
VERDICTS = ("different", "same")
ENTAILMENTS = ("contradiction", "neutral", "entailment")

# A text, or two, and the label.
Row = tuple[str, ...]


def embedded_columns(task: str, split: str, seed: int = 0) -> dict[str, list[str]]:
    """The columns of a split; the same seed gives the same texts, and no text (or pair) is in both splits.

    Classes are balanced, to one example. Scores of `similarity` lie in 0..5 with one decimal. Tagged texts have a
    SEPARATOR behind every word, and between their tags.
    """
    if task not in (*EMBEDDED, *TAGGED):
        raise DataError(f"{task}: is not an embedded task; choose one of {', '.join((*EMBEDDED, *TAGGED))}")
    if split not in NUM_EXAMPLES:
        raise DataError(f"{task}: has no split {split!r}; choose one of {', '.join(NUM_EXAMPLES)}")
    names = ("sentence", "label") if task == "sentiment" else ("sentence1", "sentence2", "label")
    names = ("tokens", "tags") if task in TAGGED else names
    rows = _splits(task, seed)[split]
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def vocabulary() -> list[str]:
    """Every word and punctuation mark that can occur in a text, lower case and sorted."""
    phrases = [*GRAMMAR, *NEGATIONS, *SETTINGS, *WORKS, *PARTS, *OPENERS, *INTENSIFIERS]
    for table in (PEOPLE, VERBS, ADJECTIVES, NOUNS):
        phrases.extend(word for row in table for word in row)
    return sorted({word for phrase in phrases for word in phrase.split()})


@dataclass(frozen=True)
class Event:
    """Who did what to whom, as rows of the word tables; `spared` is whom it explicitly did not happen to."""

    agent: int
    verb: int
    patient: int
    spared: int | None = None
    setting: int | None = None
    is_negated: bool = False


@dataclass(frozen=True)
class Wording:
    """How an event is put into words; none of it changes the meaning."""

    is_passive: bool = False
    is_setting_first: bool = False
    agent: int = 0
    verb: int = 0
    patient: int = 0
    spared: int = 0
    negation: int = 0


def write(event: Event, wording: Wording) -> str:
    """The event as one sentence."""
    return " ".join(phrase for phrase, _ in phrases_of(event, wording))


def phrases_of(event: Event, wording: Wording) -> list[tuple[str, str]]:
    """The phrases of the sentence, with the type of those that a task tags."""
    agent = (f"the {PEOPLE[event.agent][wording.agent]}", "doer")
    patient = [(f"the {PEOPLE[event.patient][wording.patient]}", "receiver")]
    if event.spared is not None:
        patient.append((f"but not the {PEOPLE[event.spared][wording.spared]}", ""))
    verb = VERBS[event.verb][wording.verb]
    if event.is_negated:
        verb = f"{NEGATIONS[wording.negation]} {verb}"
    clause = [*patient, (f"was {verb} by", ""), agent] if wording.is_passive else [agent, (verb, ""), *patient]
    if event.setting is None:
        return clause
    setting = (SETTINGS[event.setting], "place" if SETTINGS[event.setting].split()[1] == "the" else "time")
    return [setting, (",", ""), *clause] if wording.is_setting_first else [*clause, setting]


def rate(first: Event, second: Event) -> float:
    """How alike two events are, 5.0 for the same meaning: every part that differs costs its share."""
    score = 5.0
    if (first.agent, first.patient) == (second.patient, second.agent):
        score -= 3.0
    elif first.spared is not None and (first.patient, first.spared) == (second.spared, second.patient):
        score -= 2.5
    else:
        score -= 1.2 * (first.agent != second.agent) + 1.2 * (first.patient != second.patient)
        score -= 0.8 * (first.spared != second.spared)
    score -= 1.5 * (first.verb != second.verb)
    score -= 2.0 * (first.is_negated != second.is_negated)
    score -= 0.6 * (first.setting != second.setting)
    return max(score, 0.0)


def swap_roles(event: Event) -> Event:
    return replace(event, agent=event.patient, patient=event.agent)


def move_negation(event: Event) -> Event:
    """Exchange whom it happened to and whom it did not; without such a contrast, add or drop the negation."""
    if event.spared is None:
        return replace(event, is_negated=not event.is_negated)
    return replace(event, patient=event.spared, spared=event.patient)


def _replace_part(rng: random.Random, event: Event, part: str) -> Event:
    if part == "verb":
        return replace(event, verb=_other(rng, len(VERBS), event.verb))
    if part == "setting":
        return replace(event, setting=_other(rng, len(SETTINGS), event.setting))
    person = _other(rng, len(PEOPLE), event.agent, event.patient, event.spared)
    return replace(event, agent=person) if part == "agent" else replace(event, patient=person)


def _other(rng: random.Random, num_rows: int, *taken: int | None) -> int:
    return rng.choice([row for row in range(num_rows) if row not in taken])


def _draw_event(rng: random.Random) -> Event:
    agent, patient, spared = rng.sample(range(len(PEOPLE)), 3)
    verb = rng.randrange(len(VERBS))
    if rng.random() < 0.1:
        return Event(agent, verb, patient, spared=spared)
    setting = rng.randrange(len(SETTINGS)) if rng.random() < 0.5 else None
    return Event(agent, verb, patient, setting=setting, is_negated=rng.random() < 0.25)


def _draw_wording(rng: random.Random) -> Wording:
    is_passive, is_setting_first = rng.random() < 0.25, rng.random() < 0.25
    agent, verb, patient, spared, negation = (int(rng.random() < 0.3) for _ in range(5))
    return Wording(is_passive, is_setting_first, agent, verb, patient, spared, negation)


def _paraphrase(rng: random.Random, is_same: bool) -> Row:
    first = second = _draw_event(rng)
    if not is_same:
        kind = rng.choices(("swap", "negation", "part"), (0.56, 0.22, 0.22))[0]
        if kind == "swap":
            second = swap_roles(first)
        elif kind == "negation":
            second = move_negation(first)
        else:
            second = _replace_part(rng, first, rng.choice(("agent", "verb", "patient")))
    return write(first, _draw_wording(rng)), write(second, _draw_wording(rng)), VERDICTS[is_same]


def _similarity(rng: random.Random, is_close: bool) -> Row:
    first = second = _draw_event(rng)
    if not is_close:
        kind = rng.choices(("swap", "negation", "both", "parts"), (0.35, 0.2, 0.1, 0.35))[0]
        if kind in ("swap", "both"):
            second = swap_roles(second)
        if kind in ("negation", "both"):
            second = move_negation(second)
        if kind == "parts":
            for part in rng.sample(("agent", "verb", "patient"), rng.choice((1, 2, 3))):
                second = _replace_part(rng, second, part)
    if first.setting is not None and rng.random() < 0.2:
        second = _replace_part(rng, second, "setting")
    return write(first, _draw_wording(rng)), write(second, _draw_wording(rng)), f"{rate(first, second):.1f}"


def _entailment(rng: random.Random, label: int) -> Row:
    """Two sentences, and whether the first says that the second is true; the second alone does not tell."""
    # Half of the events are negated, whatever the label.
    first = replace(_draw_event(rng), spared=None, is_negated=rng.random() < 0.5)
    second = first
    if label == ENTAILMENTS.index("contradiction"):
        second = move_negation(first)
    elif label == ENTAILMENTS.index("neutral"):
        kind = rng.choices(("swap", "part"), (0.5, 0.5))[0]
        second = swap_roles(first) if kind == "swap" else _replace_part(rng, first, rng.choice(("agent", "patient")))
        second = replace(second, is_negated=rng.random() < 0.5)
    # What happened on monday happened; what did not happen on monday may have on friday.
    if not first.is_negated and rng.random() < 0.5:
        second = replace(second, setting=None)
    return write(first, _draw_wording(rng)), write(second, _draw_wording(rng)), ENTAILMENTS[label]


def _tagged(types: Collection[str], rng: random.Random, _: int) -> Row:
    """A sentence with the phrases of these types tagged, and its tags."""
    words, tags = [], []
    for phrase, kind in phrases_of(_draw_event(rng), _draw_wording(rng)):
        inside = phrase.split()
        words += inside
        tags += [f"B-{kind}", *[f"I-{kind}"] * (len(inside) - 1)] if kind in types else ["O"] * len(inside)
    return join_words(words), SEPARATOR.join(tags)


def _sentiment(rng: random.Random, is_positive: bool) -> Row:
    verdict = f"the {rng.choice(WORKS)} is {_opinion(rng, is_positive)}"
    part, contrary = rng.choice(PARTS), rng.choice(ADJECTIVES[not is_positive])
    kind = rng.choices(("plain", "despite first", "despite last", "but"), (0.79, 0.07, 0.07, 0.07))[0]
    if kind == "plain":
        text = f"{rng.choice(OPENERS)} {verdict}".strip()
    elif kind == "despite first":
        text = f"despite {_article(contrary)} {contrary} {part} , {verdict}"
    elif kind == "despite last":
        text = f"{verdict} despite {_article(contrary)} {contrary} {part}"
    else:
        text = f"the {part} is {contrary} but {verdict}"
    return text, SENTIMENTS[is_positive]


def _opinion(rng: random.Random, is_positive: bool) -> str:
    agreeing, contrary = ADJECTIVES[is_positive], ADJECTIVES[not is_positive]
    forms: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(agreeing),
        lambda: f"{rng.choice(INTENSIFIERS)} {rng.choice(agreeing)}",
        lambda: " and ".join(rng.sample(agreeing, 2)),
        lambda: f"a {rng.choice(NOUNS[is_positive])}",
        lambda: f"not {rng.choice(contrary)} at all",
        lambda: f"never {rng.choice(contrary)}",
        lambda: f"far from {rng.choice(contrary)}",
        lambda: f"hardly a {rng.choice(NOUNS[not is_positive])}",
    )
    return rng.choices(forms, (0.2, 0.3, 0.25, 0.06, 0.05, 0.05, 0.05, 0.04))[0]()


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


# How a row of a task is written, and how many labels it is written for in turns; of a score, high and low.
_WRITERS: dict[str, tuple[Callable[[random.Random, Any], Row], int]] = {
    "sentiment": (_sentiment, 2),
    "paraphrase": (_paraphrase, 2),
    "similarity": (_similarity, 2),
    "entailment": (_entailment, 3),
    **{task: (partial(_tagged, types), 1) for task, types in TAGGED.items()},
}


@lru_cache(maxsize=8)
def _splits(task: str, seed: int) -> dict[str, tuple[Row, ...]]:
    rng = random.Random(derive_seed(seed, "embedded", task))
    seen: set[frozenset[str]] = set()
    splits: dict[str, tuple[Row, ...]] = {}
    for split, num_examples in NUM_EXAMPLES.items():
        writer, num_labels = _WRITERS[task]
        labels = [number % num_labels for number in range(num_examples)]
        rng.shuffle(labels)
        splits[split] = tuple(_fresh_row(rng, writer, label, seen) for label in labels)
    return splits


def _fresh_row(
    rng: random.Random, writer: Callable[[random.Random, Any], Row], label: int, seen: set[frozenset[str]]
) -> Row:
    """A row whose texts differ from each other and, in either order, were not seen."""
    while True:
        row = writer(rng, label)
        texts = frozenset(row[:-1])
        if len(texts) == len(row) - 1 and texts not in seen:
            seen.add(texts)
            return row
