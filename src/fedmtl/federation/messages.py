"""The nouns of a federation: what goes to a client, what comes back, what a round leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from fedmtl.runs.event_lines import Event
from fedmtl.sharing.plan import Extra, Key, Rows, SharingPlan, Weights
from fedmtl.tasks.metrics import Scores, Sums

ClientId = str
JobKind = Literal["train", "evaluate", "exchange"]


@dataclass(frozen=True)
class Codecs:
    """How tensors travel: fp32, fp16 or int8 down; up also topk, the largest `topk_share` of the entries.

    With `error_feedback` a client adds what its last update lost to its next one.
    """

    down: str = "fp32"
    up: str = "fp32"
    topk_share: float = 1.0
    error_feedback: bool = True

    @property
    def filters(self) -> tuple[str, ...]:
        """The names of filters in the package that an update goes through before it is encoded so."""
        return ("error_feedback",) if self.error_feedback and self.up != "fp32" else ()


@dataclass(frozen=True)
class Job:
    """One piece of work for one client; `settings` are plain values, `plan` says which value serves which task.

    `fixed` gives the digest of every fixed value; those the client was not sent before are in `weights`. `extra` is
    what capabilities send along, by name. An `exchange` has nothing else: it is between the two halves of one
    capability, and touches no example.
    """

    kind: JobKind
    round: int
    client: ClientId
    tasks: tuple[str, ...]
    weights: Weights
    plan: SharingPlan
    rows: Rows | None
    seed: int
    state_round: int
    settings: Mapping[str, Any]
    fixed: Mapping[str, str] = field(default_factory=dict)
    codecs: Codecs = Codecs()
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Encoded sizes as they crossed, or would cross, the network, and the seconds at the client."""

    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Update:
    """What a client returns: a delta for every value it trained, or sums (as plain values) where it evaluated.

    `seen` counts the examples of each task it trained on, every pass counted; `extra` is what the client's halves of
    capabilities send, by name.
    """

    round: int
    client: ClientId
    tasks: tuple[str, ...]
    delta: Mapping[Key, Tensor]
    rows: Rows | None
    num_examples: Mapping[str, int]
    losses: Mapping[str, float]
    sums: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    traffic: Traffic = Traffic()
    seen: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A client that cost the round its contribution; data, not an exception."""

    round: int
    client: ClientId
    reason: str
    traffic: Traffic = Traffic()


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client: examples per task, the token rows its texts use, tokens and labels per task.

    Tokens, where known, only say who trains longest, so that those can start first; labels are counted in their order.
    `num_validation` bounds what the client may say that it scored; a task without an entry is not bounded.
    """

    num_examples: Mapping[str, int]
    rows: Rows | None = None
    evaluation_rows: Rows | None = None
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    label_counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    num_validation: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Scores of every task, the sums they follow from, and main metrics per client where scored at clients.

    `further` are the sums of more validation sets, by TASK:NAME; nothing is decided by them.
    """

    scores: Mapping[str, Scores]
    sums: Mapping[str, Sums]
    overall: float | None
    classification: float | None
    clients: Mapping[str, Mapping[ClientId, float | None]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    traffic: Traffic = Traffic()
    further: Mapping[str, Sums] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """A task's way so far: main metric by round, the best one, and when it was stopped."""

    scores: tuple[tuple[int, float | None], ...] = ()
    best_round: int | None = None
    best_score: float | None = None
    stopped_round: int | None = None


@dataclass(frozen=True)
class State:
    """Everything a resume needs; seeds are derived, and clients save their states.

    `extra` is what methods and the aggregator know of earlier rounds, by name.
    """

    round: int
    weights: Weights
    plan: SharingPlan
    progress: Mapping[str, Progress] = field(default_factory=dict)
    accepted: Mapping[ClientId, int] = field(default_factory=dict)
    best_overall: tuple[int, float] | None = None
    extra: Mapping[str, Extra] = field(default_factory=dict)

    def with_extra(self, name: str, extra: Extra) -> State:
        """The state with a capability's extra; an empty one is left out."""
        others = {other: one for other, one in self.extra.items() if other != name}
        return replace(self, extra={**others, name: extra} if extra else others)


@dataclass(frozen=True)
class Round:
    """What one pass of the loop yields; `state` is the state after it, `events` are what methods have to say of it.

    `shares` has for every accepted client its share of the weight in the mean of each scope. Where no single update
    may be read, `combined` has what all of them add up to, and `updates` say who returned one.
    """

    number: int
    state: State
    updates: tuple[Update, ...]
    failures: tuple[Failure, ...]
    evaluation: Evaluation | None
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    events: tuple[Event, ...] = ()
    shares: Mapping[ClientId, Mapping[str, float]] = field(default_factory=dict)
    combined: Update | None = None

    @property
    def readable(self) -> tuple[Update, ...]:
        """The updates whose counts and losses can be read: each by itself, or one for all of them together."""
        return self.updates if self.combined is None else (self.combined,)


class Scorer(Protocol):
    """Scores on the server's validation examples, until it is closed."""

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        """Every task's outputs for the server's validation examples, in their order, and the summed loss."""
        ...

    def close(self) -> None:
        """End workers and connections; it is called once, however the run ends."""
        ...


class Engine(Scorer, Protocol):
    """Carries Jobs to clients and Updates back, and scores on the server's examples; it decides nothing."""

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        """Every client that may take part in the next round, by name."""
        ...

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        """Answers in any order, one for every job; `deadline` is in seconds from now."""
        ...
