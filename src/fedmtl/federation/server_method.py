"""What a server does around a round, beyond sampling and averaging: one class per method.

A method overrides the hooks it needs; what it must know in later rounds rides in `State.extra` under its name. The
phase says when its hooks run beside those of others: `plan` (who shares what), then `weights` (what is made of the
averaged weights), then `constraint` (what must hold whatever the others did).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fedmtl.config import Config
from fedmtl.federation.aggregators.mean import ClientWeights
from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.messages import (
    ClientId,
    ClientInfo,
    Engine,
    Evaluation,
    Failure,
    Job,
    State,
    Traffic,
    Update,
)
from fedmtl.model.encoder import Encoder
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.runs.event_lines import Event, Observer
from fedmtl.sharing.plan import NO_EXTRA, Extra, SharingPlan, Weights
from fedmtl.tasks.metrics import Sums
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import LocalSettings

Phase = Literal["plan", "weights", "constraint"]
PHASES: tuple[Phase, ...] = ("plan", "weights", "constraint")


@dataclass(frozen=True)
class ServerSetup:
    """What a method may build itself from before the first round.

    `observe` gets the events of what takes long, and warnings. `secret` is what only this server knows: noise and draws
    that nobody else may know come from it. In a simulation there is none, and they come from the config's seed.
    `clients` are those of each task where all of them are known before the first round, as in a simulation, and
    `most_examples` is the largest number of examples of each task that one of them has.
    """

    config: Config
    tasks: Mapping[str, Task]
    encoder: Encoder
    model: MultiTaskModel
    plan: SharingPlan
    settings: LocalSettings
    device: str
    observe: Observer = lambda event: None
    secret: bytes | None = None
    clients: Mapping[str, Sequence[ClientId]] | None = None
    most_examples: Callable[[str], int] | None = None


@dataclass(frozen=True)
class RoundSettings:
    """What a method changes about one round: what task weights are multiplied by, and what every job carries for it.

    An `aggregator` takes the round's updates in place of the rule of `federation.aggregation`.
    """

    task_factors: Mapping[str, float] = field(default_factory=dict)
    extra: Extra = NO_EXTRA
    events: tuple[Event, ...] = ()
    aggregator: Aggregator | None = None


@dataclass(frozen=True)
class Step:
    """The state that a hook leaves behind, and what it has to say; every event is of the state's round."""

    state: State
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class OpenRound:
    """A round of training or of scoring whose jobs are still to be sent, with all that is needed to send them.

    `clients` are those that take part, with their tasks. `job` makes the job of one of them, with the extra that a
    method sends along. `weights` says how much clients count in a mean; scores are not weighted. `may_be_small` says
    that a method drew the clients by chance, so that too few of them are no mistake.
    """

    state: State
    number: int
    engine: Engine
    clients: Mapping[ClientId, tuple[str, ...]]
    infos: Mapping[ClientId, ClientInfo]
    job: Callable[[ClientId, Mapping[str, Extra]], Job]
    deadline: float
    weights: ClientWeights | None = None
    may_be_small: bool = False


@dataclass(frozen=True)
class Collected:
    """What a method made of a round's jobs, where no single update may be read.

    `updates` say who returned one, without values, counts and losses. `combined` has the mean of those that could be
    opened, their counts and losses, and `weights` what it counts in each scope. `is_skipped` says that nobody was sent
    anything, as too few were drawn.
    """

    updates: tuple[Update, ...]
    failures: tuple[Failure, ...]
    combined: Update
    weights: Mapping[str, float]
    events: tuple[Event, ...] = ()
    is_skipped: bool = False


@dataclass(frozen=True)
class Scored:
    """What a method made of the jobs of an evaluation: sums over all clients of a task, and who answered."""

    sums: Mapping[str, Sums]
    clients: tuple[ClientId, ...]
    failures: tuple[Failure, ...]
    traffic: Traffic


class ServerMethod:
    """The hooks, all empty."""

    name: ClassVar[str]
    phase: ClassVar[Phase] = "weights"

    def sample(self, candidates: Mapping[ClientId, Sequence[str]], round_number: int) -> Sequence[ClientId] | None:
        """Which of the clients that a round may have, given with the tasks each would train, are to take part.

        It is called once for every round, before anything else. None leaves the choice to
        `federation.clients_per_round`. Where a method chooses, a sample may be smaller than `federation.min_clients`,
        or empty, and the round goes on.
        """
        return None

    @property
    def reads_updates(self) -> bool:
        """Whether it has to see single updates."""
        return type(self).add is not ServerMethod.add

    @property
    def hides_updates(self) -> bool:
        """Whether it collects updates so that nobody sees a single one."""
        return type(self).collect is not ServerMethod.collect

    def start(self, state: State) -> Step:
        """Round 0: the state before anybody trained."""
        return Step(state)

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        """After the clients of a round are sampled, with the tasks each trains; look up an info once, and let it go."""
        return RoundSettings()

    def add(self, update: Update) -> None:
        """Every accepted update of a round, in the order in which they are averaged."""

    def collect(self, open_round: OpenRound) -> Collected | None:
        """Send the jobs of a round and combine their updates in another way than one by one; None leaves it."""
        return None

    def collect_scores(self, open_round: OpenRound) -> Scored | None:
        """The same for an evaluation at the clients."""
        return None

    def step(self, state: State, delta: Weights) -> tuple[Weights, Extra] | None:
        """New weights from the mean delta, and the method's next extra; None leaves weights plus delta."""
        return None

    def after_aggregation(self, before: State, after: State) -> Step:
        """The state after the step; `before` is that of the round before."""
        return Step(after)

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        """The state after its evaluation; every task's progress is in it."""
        return Step(state)

    def report(self, state: State) -> tuple[Event, ...]:
        """What there is to say of the state that a round ends with."""
        return ()

    def check(self, extra: Extra) -> None:
        """Raise unless an extra that was read from a file is one that this method could have written."""
        if extra:
            raise ValueError("this method has no state")
