"""An event is one line of events.jsonl; this file says what each kind may hold, as docs/run-folder.md lays down."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, NotRequired, Required

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

_LARGEST = 1 << 62

Round = Annotated[int, Field(ge=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
# Sums of a few of them stay finite.
Number = Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=1 << 20)]
Numbers = dict[str, Number | None]
Counts = dict[str, Count]


def _is_square(rows: list[list[int]]) -> list[list[int]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("a confusion matrix is square")
    return rows


def _rise(edges: list[float]) -> list[float]:
    if any(low >= high for low, high in pairwise(edges)):
        raise ValueError("edges rise")
    return edges


def _known_kind(task: AboutTask) -> AboutTask:
    if task["kind"] not in ("classification", "regression") and not task.get("metrics"):
        raise ValueError("a task's kind is classification or regression, or its metrics are named")
    return task


_open = with_config(ConfigDict(extra="allow", strict=True))


@_open
class AboutTask(TypedDict):
    kind: Text
    metric: NotRequired[Text]
    metrics: NotRequired[list[Text]]
    labels: NotRequired[list[Text] | None]
    score_range: NotRequired[Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_rise)] | None]


@_open
class Start(TypedDict, total=False):
    version: Text
    mode: Text
    seed: int
    synthetic: bool
    encoder: Text
    device: Text
    precision: Text
    tasks: dict[str, Annotated[AboutTask, AfterValidator(_known_kind)]]
    num_rounds: Round
    step_passes: dict[str, Count] | None
    workers: Count
    stack: Count


@_open
class Data(TypedDict, total=False):
    task: Required[Text]
    source: Text
    train: Count
    validation: Count
    truncated: Count
    labels: Counts | None
    quantiles: list[Number | None] | Numbers | None


@_open
class Holding(TypedDict, total=False):
    examples: Count
    labels: Counts | None


@_open
class AboutClient(TypedDict, total=False):
    tasks: dict[str, Holding]
    from_round: Round | None
    until_round: Round | None


@_open
class Clients(TypedDict):
    clients: dict[str, AboutClient]


@_open
class Scope(TypedDict):
    scope: Text
    level: Text
    parameters: Count
    tensors: Count


@_open
class Layer(TypedDict):
    layer: Text
    level: Text
    parameters: Count


@_open
class Plan(TypedDict, total=False):
    rules: list[Annotated[list[Text], Field(min_length=2, max_length=2)]]
    scopes: list[Scope]
    layers: list[Layer]
    heads: Counts
    total: Count
    trainable: Count
    at_clients: Count


@_open
class Site(TypedDict):
    round: Round
    client: Text
    tasks: dict[str, Any]


@_open
class Update(TypedDict, total=False):
    round: Required[Round]
    client: Required[Text]
    tasks: dict[str, dict[str, Number | None]]
    conflicts: Number | None
    seconds: Seconds
    bytes_up: Count
    bytes_down: Count


@_open
class Failure(TypedDict, total=False):
    round: Required[Round]
    client: Required[Text]
    reason: Text
    bytes_up: Count
    bytes_down: Count


@_open
class Residuals(TypedDict):
    edges: Annotated[list[Number], AfterValidator(_rise)]
    counts: list[Count]


@_open
class Evaluation(TypedDict, total=False):
    round: Required[Round]
    task: Required[Text]
    metrics: Required[Numbers]
    undefined: dict[str, Text] | None
    loss: Number | None
    examples: Count
    marked: Text | None
    confusion: Annotated[list[list[Count]], AfterValidator(_is_square)] | None
    residuals: Residuals | None
    clients: Numbers | None


@_open
class Distillation(TypedDict, total=False):
    round: Required[Round]
    losses: Numbers
    steps: Count
    seconds: Seconds


@_open
class TaskWeights(TypedDict):
    round: Round
    weights: Numbers


@_open
class Decision(TypedDict):
    layer: Text
    agreement: Numbers
    measured: Numbers
    before: Text
    after: Text
    reason: Text


@_open
class Sharing(TypedDict):
    round: Round
    layers: list[Decision]


@_open
class Zeros(TypedDict):
    weights: Count
    zeros: Count


@_open
class Pruning(TypedDict):
    round: Round
    linear: Zeros
    all: Zeros


@_open
class EarlyStop(TypedDict):
    round: Round
    task: Text
    best_round: Round | None
    score: NotRequired[Number | None]


@_open
class Aggregated(TypedDict):
    scope: Text
    head: Text | None
    tensors: Count
    clients: Count


@_open
class RoundEnd(TypedDict, total=False):
    round: Required[Round]
    clients: Count
    failures: Count
    tasks: Counts
    aggregated: list[Aggregated]
    losses: Numbers
    seen: Counts
    samples: Count
    overall: Number | None
    classification: Number | None
    seconds: Seconds
    train_seconds: Seconds
    longest_client_seconds: Seconds
    evaluate_seconds: Seconds
    bytes_up: Count
    bytes_down: Count


@_open
class Profile(TypedDict):
    round: Round
    seconds: Seconds
    server: dict[str, Seconds]
    clients: dict[str, Seconds]


@_open
class End(TypedDict, total=False):
    status: Text
    reason: Text | None
    rounds: Round
    seconds: Seconds
    weights_sha256: Text | None


@_open
class AnyEvent(TypedDict, total=False):
    round: Round


_KINDS: dict[str, Any] = {
    "start": Start,
    "data": Data,
    "clients": Clients,
    "plan": Plan,
    "site": Site,
    "update": Update,
    "failure": Failure,
    "evaluation": Evaluation,
    "distillation": Distillation,
    "task_weights": TaskWeights,
    "sharing": Sharing,
    "pruning": Pruning,
    "early_stop": EarlyStop,
    "round": RoundEnd,
    "profile": Profile,
    "end": End,
}


@lru_cache(maxsize=64)
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[kind])


@lru_cache(maxsize=1)
def _any_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(AnyEvent)


def event_mistake(event: Any) -> str | None:
    """What is wrong with a parsed line, in words for a message; None where readers may rely on it."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "is not an event"
    kind = event["event"]
    try:
        _any_adapter().validate_python(event)
        if kind in _KINDS:
            _adapter(kind).validate_python(event)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"])) or "it"
        return f"its `{kind}` is not one: {path[:80]}: {first['msg'][:120]}"
    return None
