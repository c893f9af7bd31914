"""What server and site tell each other before the first round, and what must be equal.

Plain text in JSON: the process that carries it needs no numeric library to pass it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmtl import __version__
from fedmtl.errors import WireError

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Word = Annotated[str, Field(max_length=300)]
Row = Annotated[int, Field(ge=0, lt=1 << 31)]
MOST_TASKS, MOST_LABELS, MOST_ROWS = 1000, 10_000, 5_000_000


class Said(BaseModel):
    """A message's words: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Terms(Said):
    """What must be equal on both sides, as one of them has it; labels by task, in their order."""

    version: Word
    tokenizer: Word = ""
    encoder: Word = ""
    labels: Annotated[dict[Word, list[Word]], Field(max_length=MOST_TASKS)] = {}


class Welcome(Said):
    """The server's first word to a node: the run, its config, and its terms."""

    run: Word
    config: dict[str, Any]
    evaluated: bool
    max_bytes: Count
    terms: Terms


class Held(Said):
    """What a site has of one task: counts, never texts."""

    examples: Count
    validation: Count
    tokens: Count
    truncated: Count
    labels: Annotated[dict[Word, Count], Field(max_length=MOST_LABELS)]


class Hello(Said):
    """A site's answer: who it is, what it has, the token rows it uses, and its own terms."""

    client: Word
    terms: Terms
    tasks: Annotated[dict[Word, Held], Field(max_length=MOST_TASKS)] = {}
    rows: Annotated[list[Row], Field(max_length=MOST_ROWS)] | None = None
    evaluation_rows: Annotated[list[Row], Field(max_length=MOST_ROWS)] | None = None


def read_hello(words: str) -> Hello:
    """A site's words; anything that is not a hello is a WireError."""
    try:
        return Hello.model_validate_json(words)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(f"its hello is not whole: {where or 'words'}: {first['msg']}"[:300]) from None


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
    if not hello.tasks or not all(held.examples for held in hello.tasks.values()):
        return "brings no examples"
    if not all(_are_rows(rows, num_rows) for rows in (hello.rows, hello.evaluation_rows)):
        return f"its token rows are not rising numbers below {num_rows}"
    for task in hello.tasks:
        if hello.terms.labels.get(task) != ours.labels[task]:
            theirs = ", ".join(hello.terms.labels.get(task, []))
            return (
                f"labels of {task} differ: {', '.join(ours.labels[task])} at the server, {theirs or 'none'} at the site"
            )
    return None


def _are_rows(rows: list[int] | None, num_rows: int) -> bool:
    return rows is None or (all(a < b for a, b in pairwise(rows)) and (not rows or rows[-1] < num_rows))


def _difference(theirs: Terms, ours: Terms) -> str | None:
    for name, what in (("version", "version of fedmtl"), ("tokenizer", "tokenizer"), ("encoder", "encoder")):
        if getattr(theirs, name) != getattr(ours, name):
            return f"{what} differs: {getattr(ours, name)} at the server, {getattr(theirs, name)} at the site"
    return None


def version_only(client: str) -> Hello:
    """The hello of a site that cannot read a config of another version."""
    return Hello(client=client, terms=Terms(version=__version__))
