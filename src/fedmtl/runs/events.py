"""The kinds of events that a run writes: each is a frozen record with the fields that docs/run-folder.md lists.

A plug-in defines its kinds in the same way as this module does, with a dotted name:

    @event_kind("mypackage.clipped")
    @dataclass(frozen=True, slots=True, kw_only=True)
    class ClippedEvent(Event):
        round: Round
        norms: Numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from fedmtl.runs.event_lines import (
    NULL,
    Count,
    Counts,
    Event,
    Flag,
    Given,
    Integer,
    LiveEvent,
    Number,
    Numbers,
    Round,
    Seconds,
    Text,
    event_kind,
)


def _is_square(rows: list[list[int]]) -> list[list[int]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("a confusion matrix is square")
    return rows


def _rise(edges: list[float]) -> list[float]:
    if any(low >= high for low, high in pairwise(edges)):
        raise ValueError("edges rise")
    return edges


# So many scopes are named in one line.
MOST_NAMED = 5

# The parts of events. Fields have defaults where files of an earlier version may lack them.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What `start` says of a task; `metrics` names those of a kind of task that is not built in.

    `further` names the validation sets beside the one that counts; their evaluations have TASK:NAME as task.
    """

    kind: Text
    labels: list[Text] | None = field(default=None, metadata=NULL)
    metric: Given[Text] = None
    auxiliary: Flag = False
    pair: Text | None = field(default=None, metadata=NULL)
    pool: Text | None = field(default=None, metadata=NULL)
    score_range: Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_rise)] | None = field(
        default=None, metadata=NULL
    )
    metrics: Given[list[Text]] = None
    further: Given[list[Text]] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientShare:
    """A client's training examples of one task."""

    examples: Given[Count] = None
    labels: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """What `clients` says of a client."""

    tasks: dict[str, ClientShare] = field(default_factory=dict)
    from_round: Round | None = field(default=None, metadata=NULL)
    until_round: Round | None = field(default=None, metadata=NULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeFacts:
    """The size of one scope of a plan."""

    scope: Text
    level: Text
    parameters: Count
    tensors: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """The size of one layer of a plan; `level` has several words where its parameters have several levels."""

    layer: Text
    level: Text
    parameters: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUpdate:
    """What a client's update says of one task."""

    examples: Count | None = None
    loss: Number | None = field(default=None, metadata=NULL)
    seen: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """A histogram of predictions minus scores."""

    edges: Annotated[list[Number], AfterValidator(_rise)]
    counts: list[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Scores at each of some thresholds: of all labels together by metric, and the F1 of each label; None is a gap."""

    thresholds: Annotated[list[Number], AfterValidator(_rise)]
    together: dict[str, list[Number | None]]
    labels: dict[str, list[Number | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """What was decided of one movable layer; it moved where `before` and `after` differ."""

    layer: Text
    agreement: Numbers
    measured: Numbers
    before: Text
    after: Text
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """How many weights there are, and how many of them are zero."""

    weights: Count
    zeros: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """One averaged scope; `head` is the task whose head it is, None for the encoder."""

    scope: Text
    head: Text | None
    tensors: Count
    clients: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """The averages over tasks after a round; None is undefined, or not evaluated."""

    overall: Number | None = field(default=None, metadata=NULL)
    classification: Number | None = field(default=None, metadata=NULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyTotals:
    """What a run has spent over all its sessions: the sums of its `energy` events.

    `estimated` says that some of the CPU's joules are; `grams_co2` is there where the config has the grams per kWh.
    """

    cpu_seconds: Seconds
    gpu_seconds: Seconds
    cpu_joules: Number
    gpu_joules: Number | None = field(default=None, metadata=NULL)
    estimated: Flag = False
    grams_co2: Number | None = field(default=None, metadata=NULL)


@event_kind("start")
@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent(Event):
    """A run begins."""

    version: Given[Text] = None
    mode: Given[Text] = None
    seed: Given[Integer] = None
    synthetic: Flag = False
    encoder: Given[Text] = None
    tasks: dict[str, TaskFacts] = field(default_factory=dict)
    device: Given[Text] = None
    workers: Given[Count] = None
    stack: Given[Count] = None
    precision: Given[Text] = None
    kernels: Given[Text] = None
    num_rounds: Given[Round] = None
    step_passes: Counts | None = None
    torch: Given[Text] = None
    transformers: Given[Text] = None


@event_kind("config")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEvent(Event):
    """The settings that a run goes by from here on; `changed` has before and after of what a resume found edited."""

    config: dict[str, Any]
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = field(default_factory=dict)

    def lines(self) -> Sequence[str]:
        words = ", ".join(f"{key} from {before} to {after}" for key, (before, after) in self.changed.items())
        return [f"  config.yaml was edited: {words}; this does not change what is trained"] if words else []


@event_kind("data")
@dataclass(frozen=True, slots=True, kw_only=True)
class DataEvent(Event):
    """The examples of one task.

    `windowed` are the texts for training with more than `max_length` tokens that are read in several windows, and
    `windows` how many those have; of `truncated` ones some tokens are in none. `tokens` counts those of all windows.
    """

    task: Text
    source: Given[Text] = None
    train: Given[Count] = None
    augmented: Given[Count] = None
    validation: Given[Count] = None
    truncated: Given[Count] = None
    tokens: Given[Count] = None
    windowed: Given[Count] = None
    windows: Given[Count] = None
    most_windows: Given[Count] = None
    max_length: Given[Count] = None
    validation_cut: Flag = False
    repeated: Given[Count] = None
    labels: Counts | None = None
    quantiles: list[Number | None] | Numbers | None = None
    fingerprint: dict[str, Text] | None = None


@event_kind("clients")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsEvent(Event):
    """Which client has how many examples of which task."""

    clients: dict[str, ClientFacts]


@event_kind("plan")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent(Event):
    """The sharing plan in numbers; `round` is there where a round changed the plan."""

    round: Given[Round] = None
    rules: list[Annotated[list[Text], Field(min_length=2, max_length=2)]] = field(default_factory=list)
    groups: dict[str, Any] = field(default_factory=dict)
    scopes: list[ScopeFacts] = field(default_factory=list)
    layers: list[LayerFacts] = field(default_factory=list)
    heads: Counts = field(default_factory=dict)
    total: Given[Count] = None
    trainable: Given[Count] = None
    at_clients: Count = 0


@event_kind("expected")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEvent(Event):
    """A server waits for these sites before its first round, or before the one after a resume."""

    round: Round
    clients: list[Text]


@event_kind("site")
@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEvent(Event):
    """A site came to the server, or came again; `tasks` counts its examples."""

    round: Round
    client: Text
    tasks: dict[str, Any]


@event_kind("update")
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEvent(Event):
    """The server accepted a client's update; `shares` has its share of the weight in the mean of each scope."""

    round: Round
    client: Text
    tasks: dict[str, TaskUpdate] = field(default_factory=dict)
    shares: Given[Numbers] = None
    conflicts: Number | None = None
    seconds: Given[Seconds] = None
    bytes_up: Given[Count] = None
    bytes_down: Given[Count] = None


@event_kind("failure")
@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent(Event):
    """A client's contribution to a round was lost or refused."""

    round: Round
    client: Text
    reason: Given[Text] = None
    bytes_up: Given[Count] = None
    bytes_down: Given[Count] = None


@event_kind("remark")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemarkEvent(Event):
    """Something worth knowing that cost no contribution; the client is "" where it is about the server itself."""

    round: Round
    client: Text
    reason: Given[Text] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRule:
    """What combines the updates of one scope, and how many clients share it."""

    rule: Text
    clients: Count


@event_kind("aggregation")
@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationEvent(Event):
    """Which rule combines each scope, where one is not a mean; in `helpless` scopes too few clients share a value."""

    round: Round
    scopes: dict[str, ScopeRule]
    helpless: list[Text] = field(default_factory=list)

    def lines(self) -> Sequence[str]:
        words = self.warning()
        return [f"  note: {words}"] if words else []

    def warning(self) -> str:
        """Where no rule can tell a wrong update, in words; empty where there is no such scope."""
        shown = [f"{scope} ({self.scopes[scope].clients})" for scope in self.helpless if scope in self.scopes]
        if not shown:
            return ""
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        return (
            "no aggregation rule can tell a wrong update from a right one where fewer than three clients share a"
            f" scope: {', '.join(shown[:MOST_NAMED])}{more}"
        )


@event_kind("evaluation")
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(Event):
    """One task was scored; a classification has `confusion`, a regression `moments` and `residuals`.

    `by_label` has scores and counts of each label by name, for kinds whose labels are scored apart; a tagging has a
    `confusion` of its types beside it, called by `confusion_names`, and a multilabel has `curves`.
    """

    round: Round
    task: Text
    metrics: Numbers
    undefined: dict[str, Text] | None = field(default=None, metadata=NULL)
    loss: Number | None = field(default=None, metadata=NULL)
    examples: Given[Count] = None
    marked: Text | None = field(default=None, metadata=NULL)
    confusion: Annotated[list[list[Count]], AfterValidator(_is_square)] | None = None
    moments: dict[str, Any] | None = None
    residuals: Residuals | None = None
    clients: Numbers | None = None
    by_label: dict[str, Numbers] | None = None
    confusion_names: list[Text] | None = None
    curves: Curves | None = None


@event_kind("baseline")
@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEvent(Event):
    """What something simpler than the run scores on a task's validation examples; `name` says what.

    It was fitted on `train` of `available` training examples, and scored on `examples` of the validation examples.
    """

    task: Text
    name: Text
    metrics: Numbers
    train: Given[Count] = None
    available: Given[Count] = None
    examples: Given[Count] = None
    seconds: Given[Seconds] = None


@event_kind("round")
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent(Event):
    """A round ended; `averages` is None where a pass of a distillation was not scored.

    In the file the two averages are fields of the line itself.
    """

    round: Round
    stage: Given[Text] = None
    clients: Given[Count] = None
    failures: Given[Count] = None
    tasks: Counts = field(default_factory=dict)
    aggregated: list[Aggregated] = field(default_factory=list)
    losses: Numbers = field(default_factory=dict)
    seen: Given[Counts] = None
    samples: Given[Count] = None
    averages: Averages | None = field(default=None, metadata={"flat": ("overall", "classification")})
    seconds: Given[Seconds] = None
    train_seconds: Given[Seconds] = None
    longest_client_seconds: Given[Seconds] = None
    evaluate_seconds: Given[Seconds] = None
    bytes_up: Given[Count] = None
    bytes_down: Given[Count] = None

    @property
    def overall(self) -> float | None:
        """The mean of the tasks' main metrics; None where it is undefined or was not evaluated."""
        return self.averages.overall if self.averages else None

    @property
    def classification(self) -> float | None:
        """The mean accuracy; None where it is undefined or was not evaluated."""
        return self.averages.classification if self.averages else None


@event_kind("profile")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEvent(Event):
    """Where a round's seconds went, at the server and summed over the clients' workers."""

    round: Round
    seconds: Seconds
    server: dict[str, Seconds]
    clients: dict[str, Seconds]


@event_kind("energy")
@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyEvent(Event):
    """What was spent since the last such event, or since the session began; a round that is cut back was spent too.

    `cpu_source` is rapl or estimated, by `cpu_watts` over `cores`; `gpu_source` is nvml, or None where no card is read.
    """

    seconds: Seconds
    cpu_seconds: Seconds
    gpu_seconds: Seconds
    cpu_joules: Number | None
    cpu_source: Text
    cpu_watts: Number | None = field(default=None, metadata=NULL)
    cores: Given[Count] = None
    gpu_joules: Number | None = field(default=None, metadata=NULL)
    gpu_source: Text | None = field(default=None, metadata=NULL)


@event_kind("end")
@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(Event):
    """A run ended: done, interrupted or failed; `keep` says which round its model is of, `last` or `best`."""

    status: Given[Text] = None
    reason: Text | None = field(default=None, metadata=NULL)
    rounds: Given[Round] = None
    seconds: Given[Seconds] = None
    weights_sha256: Text | None = field(default=None, metadata=NULL)
    energy: Given[EnergyTotals] = None
    keep: Given[Text] = None


@event_kind("distillation")
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationEvent(Event):
    """The server trained the averaged model towards a teacher; `losses` are by task."""

    round: Round
    losses: Numbers = field(default_factory=dict)
    steps: Given[Count] = None
    seconds: Given[Seconds] = None


@event_kind("distill")
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillEvent(Event):
    """This run is a student's, made by `fedmtl distill`."""

    teacher: Text
    start: Any = field(default=None, metadata=NULL)
    settings: dict[str, Any] = field(default_factory=dict)
    teacher_metrics: Numbers = field(default_factory=dict)


@event_kind("task_weights")
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWeightsEvent(Event):
    """How much each task counted in a round."""

    round: Round
    weights: Numbers


@event_kind("sharing")
@dataclass(frozen=True, slots=True, kw_only=True)
class SharingEvent(Event):
    """What adaptive sharing decided of the movable layers, from the bottom to the top."""

    round: Round
    layers: list[LayerMove]

    def lines(self) -> Sequence[str]:
        moved = [layer for layer in self.layers if layer.before != layer.after]
        return [f"  {layer.layer}: {layer.before} -> {layer.after}, {layer.reason}" for layer in moved]


@event_kind("pruning")
@dataclass(frozen=True, slots=True, kw_only=True)
class PruningEvent(Event):
    """How sparse the model is after a round; counts, so that the shares can be recomputed."""

    round: Round
    target: Given[Number] = None
    pruned: Given[Count] = None
    linear: Zeros
    all: Zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFacts:
    """Sums that were released: each example was in one with this chance, and had this much noise beside it.

    `noise_multiplier` is the noise's standard deviation in units of the norm that gradients are clipped to.
    """

    chance: Number
    noise_multiplier: Number
    times: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSpending:
    """What the noise on a task's gradients comes to so far, at the client where it is most.

    `epsilon` is by `accountant`: privacy loss distributions (`pld`) at the end of a run, the bound by Renyi orders
    (`rdp`), which is never smaller, before. `releases` are that client's. `unconfirmed` are jobs of the task that no
    accepted update answered; they are counted as done, but for those of `unknown` clients, of which no update came.

    Where updates are masked no client is named: every client checks its own ledger, `accountant` is `bound` where it
    keeps to the config's epsilon, and `jobs` is the most that one client was sent.
    """

    epsilon: Number
    epsilon_rdp: Number
    accountant: Text
    client: Text
    releases: list[ReleaseFacts]
    clients: Count
    scopes: list[Text]
    unconfirmed: Count = 0
    unknown: Count = 0
    jobs: Count | None = None


@event_kind("example_privacy")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePrivacyEvent(Event):
    """The ledger of noise on gradients after a round: what was spent of each task, and what this round added.

    The unit is one example of one task at one client, data sets being neighbours if one has one example more.
    """

    round: Round
    delta: Number
    max_grad_norm: Number
    tasks: dict[Text, ExampleSpending]
    released: dict[Text, dict[Text, ReleaseFacts]] = field(default_factory=dict)


@event_kind("early_stop")
@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopEvent(Event):
    """A task stopped: what no other task shares with it stays as it was in its best round, which scored `score`.

    `stop_score` is that of the round after which it stopped.
    """

    round: Round
    task: Text
    best_round: Round | None
    score: Number | None = field(default=None, metadata=NULL)
    stop_score: Number | None = None

    def lines(self) -> Sequence[str]:
        score = "–" if self.score is None else f"{self.score:.3f}"
        return [
            f"  {self.task}: stopped; what the server has of it alone stays as in round {self.best_round} ({score})"
        ]


@event_kind("privacy")
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyEvent(Event):
    """What noise has come to after a round: (epsilon, delta) of the `unit` that it hides, a client or an example.

    `releases` is the ledger that epsilon follows from: chance, noise multiplier and times of what was released so far.
    `accountant` is pld, which is tight, or rdp, a bound above it. `words` is the statement, with what is not covered.
    """

    round: Round
    unit: Text
    epsilon: Number
    delta: Number
    accountant: Text
    releases: list[dict[str, Number | Count]]
    words: Text
    details: Numbers = field(default_factory=dict)


@event_kind("secure_aggregation")
@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationEvent(Event):
    """How a round's sums were opened: by sum, of how many clients, or that they were too few.

    `dropped` counts clients by the exchange that they did not answer. `step` is that of the whole numbers, `error` how
    far an entry of a mean may be from the plain mean. Seconds are those beside the clients' jobs.
    """

    round: Round
    purpose: Text
    clients: Count
    returned: Count
    threshold: Count
    min_clients: Count
    opened: Counts
    closed: Counts = field(default_factory=dict)
    dropped: Counts = field(default_factory=dict)
    step: Number | None = None
    error: Number | None = None
    seconds: Seconds = 0.0
    bytes_up: Count = 0
    bytes_down: Count = 0

    def lines(self) -> Sequence[str]:
        what = "does not move" if self.purpose == "train" else "has no score"
        return [
            f"  {name}: {what} in this round, {found} clients returned it and a sum has {self.min_clients} at least"
            for name, found in self.closed.items()
            if not name.startswith("counts:") and found < self.min_clients
        ]


# For observers only, never in the file.


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvent(LiveEvent):
    """A client's update or failure arrived."""

    _kind: ClassVar[str] = "answer"

    round: int
    client: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEvent(LiveEvent):
    """A teacher begins to compute its outputs for so many examples of a task."""

    _kind: ClassVar[str] = "teacher"

    task: str
    examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent(LiveEvent):
    """Something in the data that spoils a run's numbers, in words without any of the data."""

    _kind: ClassVar[str] = "warning"

    words: str

    def lines(self) -> Sequence[str]:
        return [f"  warning: {self.words}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(LiveEvent):
    """A run goes on after a round; `broken` names damaged checkpoints, `missing` rounds without events, in words."""

    _kind: ClassVar[str] = "resumed"

    round: int
    broken: Sequence[str] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(LiveEvent):
    """The server listens and waits for these clients."""

    _kind: ClassVar[str] = "waiting"

    address: str
    clients: Sequence[str]
