"""The protocols by which the core calls capabilities, as they will stand in the package.

Every hook has an empty default, so that a capability writes only what it needs, and the core can tell which hooks a
capability has (`overrides`). Nothing here knows the name of a capability.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from fedmtl.federation.messages import ClientId, ClientInfo, Evaluation
from fedmtl.model.multitask import BoundModel
from fedmtl.model.multitask import Inputs, MultiTaskModel
from fedmtl.sharing.plan import Key, Weights
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.plan import Rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.metrics import Scores, Sums

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


# -- what a capability carries ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extra:
    """What a capability adds to a State, a Job, an Update or a client's state: plain values, and tensors by slot and key.

    Nobody but its capability looks inside. The wire format, checkpoints and client states write it as it is.
    """

    values: Mapping[str, Json] = field(default_factory=dict)
    tensors: Mapping[str, Weights] = field(default_factory=dict)


NOTHING = Extra()


@dataclass(frozen=True)
class Slot:
    """What a capability declares of one slot of its tensors, for those who handle them without looking inside.

    `on_move`: when a layer changes its level, a state's tensors are averaged and copied as the weights are, or dropped,
    or the move is refused before round 1. `rows`: whether tensors under the token table's key are cut to a client's
    rows. `codec`: exact, or packed bits for masks. `like`: whether tensors have their key's shape ("weight"), or any
    shape within the size bound ("free").
    """

    on_move: Literal["mean", "drop", "refuse"] = "mean"
    rows: bool = True
    codec: Literal["exact", "bits"] = "exact"
    like: Literal["weight", "free"] = "weight"


# -- the messages, with what changes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The server's state. Progress, the best round and the accepted rounds are the core's; all else is an extra."""

    round: int
    weights: Weights
    plan: SharingPlan
    accepted: Mapping[ClientId, int] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    kind: Literal["train", "evaluate", "exchange"]
    round: int
    client: ClientId
    tasks: tuple[str, ...]
    weights: Weights
    plan: SharingPlan
    rows: Rows | None
    seed: int
    settings: Mapping[str, Json]
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    round: int
    client: ClientId
    tasks: tuple[str, ...]
    delta: Mapping[Key, Tensor]
    rows: Rows | None
    num_examples: Mapping[str, int]
    extra: Mapping[str, Extra] = field(default_factory=dict)


# -- the server's half -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSetup:
    """What never changes in a run: tasks, canonical parameter names with shapes, the token table, seed, linear layers."""

    tasks: Mapping[str, Any]
    shapes: Mapping[str, torch.Size]
    table: str
    linear: frozenset[str]
    seed: int
    num_rounds: int
    average: str


@dataclass(frozen=True)
class Participant:
    """A client of the round that begins, with the tasks it trains."""

    tasks: tuple[str, ...]
    info: ClientInfo


@dataclass(frozen=True)
class RoundSettings:
    """What a method changes about one round: factors of task weights, and what jobs carry under its name.

    `extra` goes to every client, `extra_of` to one; tensors are cut by the plan and by rows as weights are.
    """

    task_factors: Mapping[str, float] = field(default_factory=dict)
    extra: Extra = NOTHING
    extra_of: Mapping[ClientId, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A capability's event: its kind, and plain fields."""

    kind: str
    fields: Mapping[str, Json]


@dataclass(frozen=True)
class Step:
    """What a hook of the server leaves behind."""

    state: State
    events: tuple[Event, ...] = ()


class ServerMethod:
    """What a server does around a round. Its own state rides in `State.extra[name]`.

    Hooks run by phase, in a phase in the order of the config: `plan` (who shares what), `weights` (steps on the
    averaged weights), `constraint` (what must hold whatever the others did). Early stopping is `plan` after evaluation.
    """

    name: ClassVar[str]
    phase: ClassVar[Literal["plan", "weights", "constraint"]] = "weights"
    slots: ClassVar[Mapping[str, Slot]] = {}

    def start(self, state: State) -> Step:
        """Round 0: the state before anybody trained."""
        return Step(state)

    def before_round(self, state: State, clients: Mapping[ClientId, Participant]) -> RoundSettings:
        """Called after the round's clients are sampled."""
        return RoundSettings()

    def expects(self, job: Job) -> ExpectedExtra | None:
        """What the update to this job must carry under this name; None where nothing may."""
        return None

    def add(self, update: Update, weight: Mapping[str, float]) -> None:
        """Every accepted update as it streams by, in the order in which it is averaged; `weight` is its share by scope."""

    def step(self, state: State, delta: Weights) -> tuple[Weights, Extra] | None:
        """New weights from the mean delta; at most one method of a run has this hook (server optimizers)."""
        return None

    def after_aggregation(self, before: State, after: State) -> Step:
        return Step(after)

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        return Step(state)


@dataclass(frozen=True)
class ExpectedExtra:
    """Bounds on an extra before its capability looks at it; the core refuses an update that is outside them.

    Tensors of a slot must have exactly the keys given, finite, of the key's shape in the job (or at most `most_numbers`
    numbers where the slot is free). `check` is the capability's own test and returns a reason or None.
    """

    tensors: Mapping[str, frozenset[Key]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    most_numbers: int = 0

    def check(self, extra: Extra, update: Update) -> str | None:
        return None


class Sampler(Protocol):
    """Who takes part in a round; Poisson sampling for an accountant replaces the default, fixed-size one."""

    def sample(
        self, round_number: int, active: Mapping[ClientId, tuple[str, ...]], seed: int
    ) -> Sequence[ClientId]: ...


class Aggregator(Protocol):
    """How the updates of a round become one delta, scope by scope."""

    streams: ClassVar[bool]

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """With `streams`: one update with its weight in each of its scopes, in the order of the clients' names."""
        ...

    def result(self, waiting: StoredUpdates) -> Weights:
        """The delta. Without `streams` the updates wait on disk, and may be read as often as needed."""
        ...

    def remember(self) -> Extra:
        """What the next round's aggregator starts from (norms, a momentum, a previous direction)."""
        ...


class StoredUpdates(Protocol):
    """The updates of a round on disk, in the order of the clients' names; memory is that of one value of all clients."""

    def clients(self, scope: str) -> Sequence[tuple[ClientId, float]]:
        """The clients that returned a scope, with their weights."""
        ...

    def keys(self) -> Iterator[Key]: ...

    def values(self, key: Key) -> tuple[Sequence[ClientId], Tensor]:
        """One value of all clients that returned it, as (clients, ...); missing token rows are NaN."""
        ...

    def passes(self) -> Iterator[Update]:
        """All updates once more, one at a time."""
        ...


class UpdateFilter:
    """What happens to an update between training and averaging; filters run in order at clients, reversed at the server."""

    name: ClassVar[str]
    reads_client_state: ClassVar[bool] = False

    def at_client(self, update: Update, job: Job, kept: Extra) -> tuple[Update, Extra]:
        """The update as it is sent, and what this client keeps for the round that the server accepts."""
        return update, kept

    def at_server(self, update: Update, job: Job) -> Update:
        """After the update was decoded and checked."""
        return update


class Exchange(Protocol):
    """Messages before and after training that are no update: secure aggregation's keys, shares and unmasking.

    Steps run in order; each sends one extra to every client of the round and collects one; who does not answer has
    dropped out, and later steps say so.
    """

    when: Literal["before_training", "after_training"]

    def send(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Extra]: ...

    def collect(self, answers: Mapping[ClientId, Extra]) -> Extra: ...

    def at_client(self, received: Extra, kept: Extra) -> tuple[Extra, Extra]:
        """What a client answers, and what it keeps until the round ends."""
        ...


# -- the client's half -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalClient:
    """What a local method finds when a client's round begins."""

    bound: BoundModel
    shards: Mapping[str, Shard]
    received: Extra
    kept: Extra
    seed: int
    device: torch.device
    round: int


@dataclass
class LocalStep:
    """One step while it happens. `loss` is what has been added up so far; hooks return what it becomes."""

    number: int
    task: str
    batch: np.ndarray
    inputs: Inputs
    labels: Tensor
    outputs: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """A piece of the flat buffers that a step moves: values and their gradients, as views, and where it lies."""

    place: slice
    values: Tensor
    gradients: Tensor


class LocalMethod:
    """What a client does while it trains.

    `stackable` says that the method has a stacked half (`StackedMethod`), or changes nothing that a stack computes. A
    method that says nothing trains one client at a time. `more_passes` says that its loss runs the encoder more than
    once in a step: gradients are then added up instead of overwritten.
    """

    name: ClassVar[str]
    stackable: ClassVar[bool] = False
    more_passes: ClassVar[bool] = False

    def start(self, client: LocalClient) -> None:
        """Before the first step; buffers are allocated here."""

    def outputs(self, step: LocalStep) -> Tensor | None:
        """The outputs that the losses are made of, in place of one plain pass."""
        return None

    def adjust(self, step: LocalStep, outputs: Tensor) -> Tensor:
        """Outputs as the labelled loss sees them (logit adjustment)."""
        return outputs

    def loss(self, step: LocalStep, loss: Tensor) -> Tensor:
        """Added to, or in place of, what the loss is so far."""
        return loss

    def task_gradient(self, step: LocalStep, reached: frozenset[Key]) -> None:
        """After one task's backward pass; its gradients alone are in the buffers."""

    def joint_gradient(self, tasks: Sequence[str], gradients: Mapping[str, Tensor], parts: Sequence[Part]) -> bool:
        """With several tasks in a step: True where the method has put their combination into the parts (PCGrad)."""
        return False

    def gradient(self, parts: Sequence[Part]) -> None:
        """In place, before gradients are clipped and the optimizer steps."""

    def stepped(self, parts: Sequence[Part]) -> None:
        """After the optimizer's step: masks, projections, moving averages."""

    def finish(self, num_steps: int) -> Finished:
        return Finished()


@dataclass(frozen=True)
class Finished:
    """`sent` goes into the update's extra, `kept` stays at the client with the state of this round."""

    sent: Extra = NOTHING
    kept: Extra = NOTHING


class PerExampleMethod(LocalMethod):
    """A local method that needs each example's gradient norm, which the backward pass gives (ghost clipping).

    The loop runs one pass that writes norms and no gradients, asks for a factor per example, and runs a second pass with
    the factors on the examples' losses. Both sequences of a dual pair, and all windows of a text, have one owner.
    """

    def factors(self, step: LocalStep, norms: Tensor) -> Tensor:
        """What each example's loss is multiplied by in the second pass; `norms` is in the order of the batch."""
        raise NotImplementedError


class StackedMethod(Protocol):
    """The stacked half of a local method. A stack records its step once, so buffers are allocated in `allocate`."""

    def allocate(self, stack: Any) -> None: ...

    def load(self, clients: Sequence[LocalClient]) -> None:
        """Refill the buffers for the clients of this round, one row each."""
        ...

    def adjust(self, task: str, outputs: Tensor) -> Tensor: ...

    def gradient(self, block: Any) -> None: ...


# -- tasks -----------------------------------------------------------------------------------------------------------


class TaskKind(Protocol):
    """Everything that depends on what is predicted."""

    name: ClassVar[str]
    per_token: ClassVar[bool]

    def num_outputs(self, task: Any) -> int: ...
    def head(self, task: Any, width: int) -> nn.Module: ...
    def parse_label(self, task: Any, raw: str) -> float | int | Sequence[int]: ...
    def collate(self, task: Any, labels: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray: ...
    def count_labels(self, task: Any, labels: np.ndarray) -> list[int]: ...
    def losses(self, task: Any, outputs: Tensor, labels: Tensor) -> Tensor: ...
    def divergence(self, task: Any, first: Tensor, second: Tensor) -> Tensor: ...
    def answer(self, task: Any, outputs: np.ndarray) -> Mapping[str, Json]: ...
    def sums(self, task: Any, outputs: np.ndarray, labels: np.ndarray, loss: float) -> Sums: ...
    def read_sums(self, task: Any, raw: Mapping[str, Any]) -> Sums: ...
    def score(self, task: Any, sums: Sums) -> Scores: ...
    def fit(self, task: Any, outputs: np.ndarray, labels: np.ndarray) -> Mapping[str, Json]: ...
    def onnx_outputs(self, task: Any) -> Sequence[str]: ...


# -- capabilities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capability:
    """What a user switches on: a section of the config and the halves that it turns into.

    `section` is where its options stand in the config: a built-in keeps its old key, a plug-in has `methods.<name>`.
    """

    name: str
    options: type[BaseModel]
    section: str
    server: type[ServerMethod] | None = None
    local: type[LocalMethod] | None = None
    filter: type[UpdateFilter] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters that it adds to the model, by pattern, with their sharing level."""


class Engine(Protocol):
    """Carries jobs to clients and updates back, scores at the server, and says what it can honour."""

    def clients(self) -> Mapping[ClientId, ClientInfo]: ...
    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Any]: ...
    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]: ...
    def close(self) -> None: ...


def overrides(method: object, hook: str) -> bool:
    """Whether a method has a hook of its own."""
    origin = next(c for c in type(method).__mro__ if hook in vars(c))
    return origin not in (ServerMethod, LocalMethod, UpdateFilter)


__all__ = ["Aggregator", "Capability", "Engine", "Extra", "LocalMethod", "MultiTaskModel", "ServerMethod", "TaskKind"]
