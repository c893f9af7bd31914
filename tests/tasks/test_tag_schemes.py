"""Spans are those that seqeval finds, by the lenient rule and strictly by each scheme."""

import random

import pytest

from fedmtl.tasks.tag_schemes import found_scheme, lenient_spans, misplaced, split_tag, strict_spans, to_iob2

PREFIXES = {"IOB1": "BI", "IOB2": "BI", "IOBES": "BIES"}


def random_tags(scheme, seed, count=10_000):
    chance = random.Random(seed)
    tags = ["O", "O", *(f"{prefix}-{kind}" for prefix in PREFIXES[scheme] for kind in ("PER", "LOC"))]
    return [[chance.choice(tags) for _ in range(chance.randint(0, 12))] for _ in range(count)]


def split(tags):
    return [split_tag(tag) for tag in tags]


@pytest.mark.parametrize("scheme", PREFIXES)
def test_spans_of_random_tags_are_those_of_seqeval(scheme):
    sequence_labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    schemes = pytest.importorskip("seqeval.scheme")
    for tags in random_tags(scheme, seed=7):
        lenient = [(kind, start, last + 1) for kind, start, last in sequence_labeling.get_entities(tags)]
        assert lenient_spans(split(tags)) == lenient, tags
        strict = schemes.Entities([tags], getattr(schemes, scheme)).entities[0]
        assert strict_spans(split(tags), scheme) == [(each.tag, each.start, each.end) for each in strict], tags


@pytest.mark.parametrize("scheme", PREFIXES)
def test_spans_written_as_iob2_are_read_again(scheme):
    for tags in random_tags(scheme, seed=8, count=1000):
        spans = lenient_spans(split(tags))
        written = split(to_iob2(spans, len(tags)))
        assert lenient_spans(written) == spans
        assert strict_spans(written, "IOB2") == spans
        assert misplaced(written, "IOB2") is None


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O", ("O", "")),
        ("B-PER", ("B", "PER")),
        ("I-creative-work", ("I", "creative-work")),
        ("L-PER", ("E", "PER")),
        ("U-PER", ("S", "PER")),
        *((wrong, None) for wrong in ("PER", "B-", "b-PER", "B_PER", "X-PER", "", "o", "BI-PER", "B- ")),
    ],
)
def test_a_tag_is_a_prefix_and_a_type(tags, expected):
    assert split_tag(tags) == expected


@pytest.mark.parametrize(
    ("tags", "scheme", "at"),
    [
        ("B-A I-A O I-A", "IOB2", 3),
        ("B-A I-B", "IOB2", 1),
        ("B-A B-A I-A", "IOB2", None),
        ("I-A I-A O I-B B-B", "IOB1", None),
        ("B-A I-A E-A S-B", "IOBES", None),
        # A B- without an end, and an E- behind an O.
        ("B-A O S-B", "IOBES", 0),
        ("O E-A", "IOBES", 1),
        ("S-B B-A", "IOBES", 1),
    ],
)
def test_the_first_tag_that_cannot_stand_there_is_found(tags, scheme, at):
    assert found_scheme([split(tags.split())]) == scheme
    assert misplaced(split(tags.split()), scheme) == at
