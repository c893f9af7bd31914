"""What server and site tell each other before the first round, and what must be equal.

Plain text in JSON: the process that carries it needs no numeric library to pass it on. A hello has no label value in
it: the server names the labels of a task, the site counts examples in that order, and both compare the list's digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmtl import __version__
from fedmtl.errors import WireError
from fedmtl.federation.faults import NAME
from fedmtl.tasks.task import SCORE_RANGES

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Word = Annotated[str, Field(max_length=300)]
Name = Annotated[str, Field(pattern=NAME)]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z.+_-]{1,40}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
Row = Annotated[int, Field(ge=0, lt=1 << 31)]
MOST_TASKS, MOST_LABELS, MOST_ROWS = 1000, 10_000, 5_000_000


class Said(BaseModel):
    """A message's words: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SiteTerms(Said):
    """What must be equal on both sides, as a site has it."""

    version: Version
    tokenizer: Digest = ""
    encoder: Digest = ""


class Terms(SiteTerms):
    """As the server has it, with the labels of every task in their order; a regression has none."""

    labels: Annotated[
        dict[Name, Annotated[list[Word], Field(max_length=MOST_LABELS)]], Field(max_length=MOST_TASKS)
    ] = {}


class Welcome(Said):
    """The server's first word to a node: the run, its config, and its terms."""

    run: RunId
    config: dict[str, Any]
    evaluated: bool
    max_bytes: Count
    terms: Terms


class TaskCounts(Said):
    """What a site has of one task: counts, never texts or labels.

    `labels` are in the order of the server's list, or of the score ranges of a regression; without any, the site's
    policy does not tell them. `label_list` is `labels_digest` of the list the site compared its examples with.
    `windowed` texts are read in several windows, `windows` in all. Counts may be rounded up, so that what is counted
    later is never more.
    """

    examples: Count
    validation: Count
    tokens: Count
    truncated: Count
    windowed: Count = 0
    windows: Count = 0
    labels: Annotated[list[Count], Field(max_length=MOST_LABELS)]
    label_list: Digest

    @property
    def has_labels(self) -> bool:
        """Whether the task has a list of labels; without one, ranges of scores are counted."""
        return self.label_list != labels_digest(())


class Hello(Said):
    """A site's answer: who it is, what it has, the token rows it uses, its terms, and whether it saves the model."""

    client: Name
    terms: SiteTerms
    tasks: Annotated[dict[Name, TaskCounts], Field(max_length=MOST_TASKS)] = {}
    rows: Annotated[list[Row], Field(max_length=MOST_ROWS)] | None = None
    evaluation_rows: Annotated[list[Row], Field(max_length=MOST_ROWS)] | None = None
    wants_model: bool = False


def read_hello(words: str) -> Hello:
    """A site's words; anything that is not a hello is a WireError."""
    try:
        return Hello.model_validate_json(words)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        # A key that a stranger made up is no word of ours.
        where = ".".join(part for part in map(str, first["loc"]) if part in _KEYS)
        raise WireError(f"its hello is not whole: {where or 'words'}: {first['type']}") from None


_KEYS = {*Hello.model_fields, *TaskCounts.model_fields, *SiteTerms.model_fields}


def labels_digest(labels: Sequence[str]) -> str:
    """Equal for equal lists, and short enough to compare by eye."""
    return hashlib.sha256(json.dumps(list(labels)).encode()).hexdigest()[:16]


def refusal(
    hello: Hello, ours: Terms, num_rows: int, enrolled: Mapping[str, Collection[str]], shown: str | None
) -> str | None:
    """Why a site must not take part, or None if it may.

    `num_rows` is the length of the token table; `enrolled` says who may bring which tasks; `shown` is the name of the
    key a site came with, None where keys are not used.
    """
    if shown is not None and hello.client != shown:
        return f"says it is {hello.client}, its key is {shown}'s"
    if hello.client not in enrolled:
        return f"{hello.client} is not enrolled; known are {', '.join(sorted(enrolled)) or 'none'}"
    differing = _difference(hello.terms, ours)
    if differing is not None:
        return differing
    strange = sorted(set(hello.tasks) - set(enrolled[hello.client]))
    if strange:
        return f"brings {', '.join(strange)}; it is enrolled for {', '.join(enrolled[hello.client])}"
    if not hello.tasks or not all(counts.examples for counts in hello.tasks.values()):
        return "brings no examples"
    if not all(_are_rows(rows, num_rows) for rows in (hello.rows, hello.evaluation_rows)):
        return f"its token rows are not rising numbers below {num_rows}"
    reasons = (_label_refusal(task, counts, ours) for task, counts in hello.tasks.items())
    return next(filter(None, reasons), None)


def _label_refusal(task: str, counts: TaskCounts, ours: Terms) -> str | None:
    if task not in ours.labels:
        return f"brings {task}, which this run does not have"
    labels = ours.labels[task]
    if counts.label_list != labels_digest(labels):
        return f"labels of {task} differ: the server's list is {labels_digest(labels)}, the site's {counts.label_list}"
    if len(counts.labels) not in (0, len(labels) or SCORE_RANGES):
        return f"counts {len(counts.labels)} labels of {task}; it has {len(labels) or SCORE_RANGES}"
    return None


def _are_rows(rows: list[int] | None, num_rows: int) -> bool:
    return rows is None or (all(a < b for a, b in pairwise(rows)) and (not rows or rows[-1] < num_rows))


def _difference(theirs: SiteTerms, ours: Terms) -> str | None:
    for name, what in (("version", "version of fedmtl"), ("tokenizer", "tokenizer"), ("encoder", "encoder")):
        if getattr(theirs, name) != getattr(ours, name):
            return f"{what} differs: {getattr(ours, name)} at the server, {getattr(theirs, name)} at the site"
    return None


def version_only(client: str) -> Hello:
    """The hello of a site that cannot read a config of another version."""
    return Hello(client=client, terms=SiteTerms(version=__version__))
