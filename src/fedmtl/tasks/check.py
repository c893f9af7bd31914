"""Examples are looked over before anybody trains on them: columns, labels, lengths, duplicates, personal data.

No text of the data is part of any result, message or error. Labels and columns are named only where the name can be no
text; everything else is a count or a line number. Duplicates are found by Python's hash of a text, which has a secret
of the process in it and never leaves the process: a plain hash of a text could be guessed from a list of texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

from fedmtl.tasks.parts import MOST_WORDS, Part, Split, lacks_header, shown_columns
from fedmtl.tasks.personal_data import may_have_personal_data, personal_data
from fedmtl.tasks.sources import as_number, separation_advice

if TYPE_CHECKING:
    from fedmtl.tasks.load import TaskData


# A label longer than this, or with more words, may be a text in a wrong column.
MOST_LETTERS, MOST_LABELS = 32, 50
# Of two labels that differ by a letter, one that is this much rarer is likely a mistake.
RARER = 10
# With fewer letters, most labels are near another one.
SHORT_LABEL = 4
# What spoils a run's numbers, and is said before it starts.
SPOILS = ("train_validation", "one_class", "label_once", "label_typo", "many_labels", "decimal_comma")
# A share of the most frequent label above which accuracy says little.
ONE_SIDED = 0.9


@dataclass(frozen=True)
class Finding:
    """Something a user may want to mend; `count` is how often, `words` a sentence without a word of the data."""

    code: str
    where: str
    count: int
    words: str


@dataclass(frozen=True)
class PartFacts:
    """One part in numbers; `labels` has the labels that may be named, and `other_labels` counts the others.

    `words` are the least, the median, the 95th percentile and the most words of an example. `personal` counts what
    looks like personal data by its kind, and `personal_rows` the examples that have any.
    """

    origin: str
    task: str
    client: str
    split: str
    columns: list[str]
    text: list[str]
    label: str | None
    rows: int
    empty_texts: int
    missing_labels: int
    labels: dict[str, int]
    other_labels: int
    words: list[int]
    repeated: int
    personal: dict[str, int]
    personal_rows: int


@dataclass(frozen=True)
class Overlaps:
    """Examples of one task with the same texts, but for case and spaces: how many stand where they should not."""

    task: str
    validation_in_train: int
    test_in_train: int
    between_clients: int
    conflicting: int


@dataclass(frozen=True)
class Checked:
    """What was found in all parts."""

    parts: list[PartFacts] = field(default_factory=list)
    tasks: list[Overlaps] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    @property
    def personal_rows(self) -> int:
        return sum(part.personal_rows for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_parts(parts: Sequence[Part], *, personal: bool = True) -> Checked:
    """Look over all parts, those of one task together; without `personal`, texts are not searched for personal data."""
    tasks: dict[str, list[Part]] = {}
    for part in parts:
        tasks.setdefault(part.task, []).append(part)
    facts: list[PartFacts] = []
    overlaps: list[Overlaps] = []
    findings: list[Finding] = []
    for task, members in tasks.items():
        keys: list[list[int]] = []
        for part in members:
            found, part_keys = _part_facts(part, personal)
            facts.append(found)
            keys.append(part_keys)
            findings += _part_findings(part, found)
        findings += _label_findings(task, members)
        overlap = _overlaps(task, members, keys)
        overlaps.append(overlap)
        findings += _overlap_findings(task or members[0].table.origin, overlap)
    return Checked(facts, overlaps, findings)


# One part


def _part_facts(part: Part, personal: bool) -> tuple[PartFacts, list[int]]:
    table, lengths, keys, empty = part.table, [], [], 0
    for texts in zip(*(table.columns[name] for name in part.text), strict=True):
        split = [text.lower().split() for text in texts]
        empty += not all(split)
        lengths.append(sum(map(len, split)))
        keys.append(hash(tuple(map(" ".join, split))))
    kinds, personal_rows = _personal(part) if personal else (Counter(), 0)
    counts = Counter(part.found)
    missing = counts.pop("", 0)
    is_score = _is_score(part, counts)
    named = {} if is_score else _named_labels(part, counts)
    given = (*(part.text if part.is_named else ()), part.label if part.is_label_named else None)
    shown = shown_columns(table, given)
    return PartFacts(
        origin=table.origin,
        task=part.task,
        client=part.client,
        split=part.split,
        columns=list(shown.values()),
        text=[shown[name] for name in part.text],
        label=None if part.label is None else shown[part.label],
        rows=len(table),
        empty_texts=empty,
        missing_labels=missing,
        labels=named,
        other_labels=0 if is_score else len(counts) - len(named),
        words=_quantiles(lengths),
        repeated=len(keys) - len(set(keys)),
        personal=dict(kinds),
        personal_rows=personal_rows,
    ), keys


def _quantiles(lengths: list[int]) -> list[int]:
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return [ordered[round(share * last)] for share in (0.0, 0.5, 0.95, 1.0)] if ordered else []


def _named_labels(part: Part, counts: Counter[str]) -> dict[str, int]:
    """The labels, the most frequent first, as far as they may be named; a guessed column has numbers for names.

    What is named is short, seen twice, no example's text and no number of a person: a label that occurs once may be a
    text that slipped into the column.
    """
    if len(counts) > MOST_LABELS or 2 * len(counts) > len(part.table):
        return {}
    if not part.is_label_named:
        return {f"#{number}": count for number, (_, count) in enumerate(counts.most_common(), start=1)}
    texts = {text for name in part.text for text in part.table.columns[name]}
    return {
        label: count
        for label, count in counts.most_common()
        if count > 1
        and len(label) <= MOST_LETTERS
        and len(label.split()) <= MOST_WORDS
        and label not in texts
        and not personal_data(label)
    }


def _is_score(part: Part, counts: Counter[str]) -> bool:
    """Whether the labels are numbers on a scale rather than names of classes."""
    if part.is_scored is not None:
        return part.is_scored
    values = [value.replace(",", ".") for value in counts]
    are_numbers = all(isfinite(as_number(value)) for value in values)
    return are_numbers and (len(values) > MOST_LABELS or any("." in value for value in values))


DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+\s*")


def _part_findings(part: Part, facts: PartFacts) -> Iterator[Finding]:
    where, table = _where(part), part.table
    # Columns that were named are there, so they are names.
    if not part.is_named and lacks_header(table):
        yield Finding("no_header", where, 1, "the first line does not look like names of columns; is there a header?")
    if not part.text:
        otherwise = ", or what separates columns with --delimiter" if len(table.columns) == 1 else ""
        remedy = separation_advice(list(table.columns)) or f"name it with --text{otherwise}"
        yield Finding("no_text", where, 1, f"no column of texts was found; {remedy}")
    if part.label is None:
        yield Finding("no_label", where, 1, "no column of labels was found; name it with --label")
    if facts.empty_texts:
        at = next(
            row
            for row in range(len(table))
            if any(not table.columns[name][row] or table.columns[name][row].isspace() for name in part.text)
        )
        more = f"{_examples(facts.empty_texts)} an empty text, the first in {table.unit} {table.number(at)}"
        yield Finding("empty_text", where, facts.empty_texts, more)
    if facts.missing_labels:
        count = facts.missing_labels
        yield Finding("missing_label", where, count, f"{_examples(count)} no label; {_refused(count)}")
    yield from _refused_labels(part)
    commas = [row for row, value in enumerate(part.labels) if "," in value and DECIMAL_COMMA.fullmatch(value)]
    if commas:
        words = (
            f"{_examples(len(commas))} a score with a decimal comma, the first in {table.unit}"
            f" {table.number(commas[0])}; write 3.5, not 3,5"
        )
        yield Finding("decimal_comma", where, len(commas), words)
    if facts.repeated and part.split == "train":
        yield Finding("repeated", where, facts.repeated, f"{_examples(facts.repeated)} the text of an earlier one")
    if facts.personal_rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in facts.personal.items())
        words = f"{_examples(facts.personal_rows)} what looks like personal data ({kinds})"
        yield Finding("personal", where, facts.personal_rows, words)


def _refused_labels(part: Part) -> Iterator[Finding]:
    """Count labels and scores that a run of the config refuses; those with a decimal comma are counted elsewhere."""
    rows: dict[tuple[str, str], list[int]] = {}
    for row, value in enumerate(part.labels):
        if part.known and value and not set(part.labels_of(row)) <= set(part.known):
            rows.setdefault(("label_unknown", f"a label that is not in tasks.{part.task}.labels"), []).append(row)
        if part.score_range is None or not value or DECIMAL_COMMA.fullmatch(value):
            continue
        low, high = part.score_range
        score = as_number(value)
        if isnan(score):
            rows.setdefault(("score_invalid", "a score that is no number"), []).append(row)
        elif not low <= score <= high:
            rows.setdefault(("score_outside", f"a score outside {low:g} to {high:g}"), []).append(row)
    for (code, what), found in sorted(rows.items()):
        first = f"the first in {part.table.unit} {part.table.number(found[0])}"
        words = f"{_examples(len(found))} {what}, {first}; {_refused(len(found))}"
        yield Finding(code, _where(part), len(found), words)


def _refused(count: int) -> str:
    return "a run refuses it, mend the row" if count == 1 else "a run refuses them, mend the rows"


def _examples(count: int) -> str:
    return "1 example has" if count == 1 else f"{count} examples have"


def _where(part: Part) -> str:
    return ", ".join(filter(None, (part.task, part.client, part.split))) if part.task else part.table.origin


# Labels


def _label_findings(task: str, parts: Sequence[Part]) -> Iterator[Finding]:
    trains = [part for part in parts if part.split == "train" and part.label is not None]
    total: Counter[str] = Counter()
    for part in trains:
        total.update(part.found)
    total.pop("", None)
    if not total or _is_score(trains[0], total):
        return
    where, several = task or trains[0].table.origin, trains[0].has_several
    for code, count, words in label_problems(total, lambda label: _line_of(label, trains), several=several):
        yield Finding(code, where, count, words)
    for part in trains:
        if len(trains) > 1 and len(set(part.found) - {""}) == 1 < len(total):
            yield Finding("one_class", _where(part), 1, f"has one of the {len(total)} labels only")


def _line_of(label: str, parts: Sequence[Part]) -> str:
    """Where a label stands first, for a message that must not quote it."""
    for part in parts:
        for row in range(len(part.labels)):
            if label in part.labels_of(row):
                return part.table.location(row)
    return ""


def label_problems(
    counts: Mapping[str, int],
    locate: Callable[[str], str] = lambda label: "",
    quote: Callable[[str], str] = lambda label: "",
    *,
    several: bool = False,
) -> Iterator[tuple[str, int, str]]:
    """What is odd about labels with these counts: a code, how many labels, and a sentence.

    Where an example may have `several` or none, one label is enough, and none of them can have too many.
    The sentence has of a label what `quote` gives of it, and of the one to look at also where it is (`locate`).
    """

    def named(label: str, *where: str) -> str:
        known = ", ".join(filter(None, (quote(label), *where)))
        return f" ({known})" if known else ""

    def line(label: str) -> str:
        return named(label, locate(label))

    once = [label for label, count in counts.items() if count == 1]
    rows = sum(counts.values())
    if len(counts) == 1 and not several:
        yield "one_class", 1, f"all {rows} training examples have the same label; a classifier needs two"
        return
    if len(counts) >= 10 and rows < 2 * len(counts):
        words = f"there are {len(counts)} labels in {rows} examples; is the label column the right one?"
        yield "many_labels", len(counts), words
        return
    pairs = similar_labels(counts)
    for rare, frequent in pairs:
        words = (
            f"a label of {counts[rare]} {'example' if counts[rare] == 1 else 'examples'}{line(rare)} is but for a"
            f" letter, case or spaces a label of {counts[frequent]}{named(frequent)}; is it a typing mistake?"
        )
        yield "label_typo", 1, words
    typos = {rare for rare, _ in pairs}
    rest = [label for label in once if label not in typos]
    if rest:
        many = "1 label occurs" if len(rest) == 1 else f"{len(rest)} labels occur"
        yield "label_once", len(rest), f"{many} in one training example only{line(rest[0])}"
    largest = max(counts.values())
    if largest / rows >= ONE_SIDED and not several:
        words = f"one label has {largest / rows:.0%} of the training examples; look at F1 or Matthews, not accuracy"
        yield "imbalance", largest, words


def similar_labels(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs (rare, frequent) of labels that are one but for case, spaces, or a letter where one is far rarer."""
    by_form: dict[str, list[str]] = {}
    for label in counts:
        by_form.setdefault(" ".join(label.lower().split()), []).append(label)
    pairs = []
    for labels in by_form.values():
        first, *others = sorted(labels, key=lambda label: -counts[label])
        pairs += [(other, first) for other in others]
    forms = {form: max(labels, key=lambda label: counts[label]) for form, labels in by_form.items()}
    shapes: dict[str, list[str]] = {}
    # Two words that differ by a letter, or by two that changed their order, are equal without one letter of each.
    for form in forms if len(forms) <= 1000 else ():
        if len(form) >= 2:
            for shape in {form, *(form[:at] + form[at + 1 :] for at in range(len(form)))}:
                shapes.setdefault(shape, []).append(form)
    near = {(a, b) for alike in shapes.values() for a in alike for b in alike if a != b}
    for a, b in sorted(near):
        rare, frequent = forms[a], forms[b]
        if counts[rare] * RARER <= counts[frequent] and _is_slip(a, b):
            pairs.append((rare, frequent))
    return pairs


def _is_slip(a: str, b: str) -> bool:
    """Whether one letter more, less, other or exchanged with its neighbour makes b of a; digits tell labels apart."""
    if re.sub(r"[^0-9]", "", a) != re.sub(r"[^0-9]", "", b):
        return False
    if min(len(a), len(b)) < SHORT_LABEL and not _is_short_slip(a, b):
        return False
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    if len(a) != len(b):
        longer, shorter = (a, b) if len(a) > len(b) else (b, a)
        return len(longer) == len(shorter) + 1 and longer[start + 1 :] == shorter[start:]
    is_other = a[start + 1 :] == b[start + 1 :]
    return is_other or (a[start : start + 2] == b[start : start + 2][::-1] and a[start + 2 :] == b[start + 2 :])


def _is_short_slip(a: str, b: str) -> bool:
    """Whether short labels may be one: a letter typed twice or two exchanged, since another letter is another label."""
    is_numeral = all(re.fullmatch("[ivxlcdm]+", label) for label in (a, b))
    return set(a) == set(b) and len(set(a)) > 1 and not is_numeral and len(a) + len(b) > 4


# Several parts


def _overlaps(task: str, parts: Sequence[Part], keys: Sequence[Sequence[int]]) -> Overlaps:
    train: dict[int, set[str]] = {}
    labels: dict[int, str] = {}
    conflicting: set[int] = set()
    for part, part_keys in zip(parts, keys, strict=True):
        if part.split != "train":
            continue
        owner = part.client
        for key in part_keys:
            train.setdefault(key, set()).add(owner)
        for key, label in zip(part_keys, part.labels, strict=False):
            if labels.setdefault(key, label) != label:
                conflicting.add(key)
    seen: dict[Split, int] = {"validation": 0, "test": 0}
    for part, part_keys in zip(parts, keys, strict=True):
        if part.split != "train":
            seen[part.split] += sum(key in train for key in part_keys)
    shared = sum(len(owners) > 1 for owners in train.values())
    return Overlaps(task, seen["validation"], seen["test"], shared, len(conflicting))


def _overlap_findings(where: str, found: Overlaps) -> Iterator[Finding]:
    for code, count, words in (
        ("train_validation", found.validation_in_train, "texts of validation that are in train too"),
        ("train_test", found.test_in_train, "texts of test that are in train too"),
        ("between_clients", found.between_clients, "texts at more than one client"),
        ("conflicting", found.conflicting, "texts in train with different labels"),
    ):
        if count:
            yield Finding(code, where, count, f"{words}: {count}")


# Personal data


def _personal(part: Part) -> tuple[Counter[str], int]:
    """Count by kind, and the rows with any; where nobody named the text columns, all but the label are read."""
    names = part.text if part.is_named else tuple(name for name in part.table.columns if name != part.label)
    kinds: Counter[str] = Counter()
    rows: set[int] = set()
    for name in names:
        for row, text in enumerate(part.table.columns[name]):
            if may_have_personal_data(text):
                found = personal_data(text)
                if found:
                    rows.add(row)
                    kinds.update(found)
    return kinds, len(rows)


# Before a run


def run_warnings(data: Mapping[str, TaskData]) -> list[str]:
    """What a run says before it starts, a line each: only what spoils its numbers, found in a few milliseconds.

    Validation texts are looked up in train as they are, with case and spaces. Data of the package is passed over.
    """
    lines = []
    for name, part in data.items():
        if part.synthetic:
            continue
        if part.repeated:
            many = "1 example has" if part.repeated == 1 else f"{part.repeated} examples have"
            lines.append(f"{name}: {many} the text of another; the cut of validation leaves equal texts on one side")
        if part.idle:
            lines.append(
                f"{name}: {part.idle} examples of clients' files are cut for validation and not scored, since the task"
                " has validation examples; name source.validation for these clients too, or write"
                " `evaluation.where: clients`"
            )
        validation = set(zip(*part.validation.texts, strict=True))
        trains = {"": part.train, **part.client_train}
        for train in trains.values():
            both = validation.intersection(zip(*train.texts, strict=True))
            if both:
                count = sum(row in both for row in zip(*part.validation.texts, strict=True))
                lines.append(f"{name}: {count} of {len(part.validation)} validation examples are in train too")
                break
        if not part.task.kind_of.has_labels:
            continue
        counts = {client: part.task.kind_of.counts(part.task, train.labels) for client, train in trains.items()}
        total = {label: sum(column) for label, *column in zip(part.task.labels, *counts.values(), strict=True)}
        counted = {label: count for label, count in total.items() if count}
        problems = label_problems(counted, quote=_quoted, several=part.task.kind_of.several_labels)
        lines += [f"{name}: {words}" for code, _, words in problems if code in SPOILS]
        commas = sum(DECIMAL_COMMA.fullmatch(label) is not None for label in part.task.labels)
        if commas:
            one = "1 label is a number" if commas == 1 else f"{commas} labels are numbers"
            lines.append(f"{name}: {one} with a decimal comma; for scores write 3.5, not 3,5, and `kind: regression`")
    return lines


def _quoted(label: str) -> str:
    """A label as a run names it; one that may be a text in a wrong column is not named."""
    is_short = len(label) <= MOST_LETTERS and len(label.split()) <= MOST_WORDS and not personal_data(label)
    return f"`{label}`" if is_short else ""


def one_label_warnings(clients: Mapping[str, Mapping[str, Mapping[str, int]]], tasks: Sequence[str]) -> list[str]:
    """For each of these tasks, the clients that have one of its labels only: client -> task -> label -> examples."""
    lines = []
    for task in tasks:
        counts = {client: shares[task] for client, shares in clients.items() if task in shares}
        seen = {client: {label for label, count in labels.items() if count} for client, labels in counts.items()}
        single = [client for client, labels in seen.items() if len(labels) == 1]
        if single and len(seen) > 1 and len(set().union(*seen.values())) > 1:
            who = single[0] if len(single) == 1 else f"{len(single)} of {len(seen)} clients ({single[0]}, ...)"
            lines.append(f"{task}: {who} {'has' if len(single) == 1 else 'have'} examples of one label only")
    return lines
