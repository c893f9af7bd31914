"""Methods written against the protocols, without behaviour: whether they can be said at all, and in one file each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from protocols import NOTHING, Aggregator, Capability, Event, Exchange, ExpectedExtra, Extra, Finished, Job, Json, LocalClient, LocalMethod, LocalStep, Part, Participant, PerExampleMethod, RoundSettings, ServerMethod, Slot, State, Step, StoredUpdates, TaskKind, Update
from pydantic import BaseModel
from torch import Tensor, nn

from fedmtl.federation.messages import ClientId, Evaluation
from fedmtl.sharing.plan import Key, Weights
from fedmtl.tasks.metrics import Scores, Sums


class NoOptions(BaseModel):
    """A capability without options."""


# -- SCAFFOLD: control variates travel both ways and stay at the client ----------------------------------------------


class ScaffoldServer(ServerMethod):
    """c moves by the sum of the clients' changes over all clients of a scope (Karimireddy et al. 2020, option II)."""

    name = "scaffold"
    slots = {"control": Slot(on_move="mean")}

    def __init__(self, options: NoOptions) -> None:
        self._changes: Weights = {}

    def before_round(self, state: State, clients: Mapping[ClientId, Participant]) -> RoundSettings:
        return RoundSettings(extra=Extra(tensors={"control": state.extra["scaffold"].tensors["control"]}))

    def expects(self, job: Job) -> ExpectedExtra:
        return ExpectedExtra(tensors={"change": frozenset(job.weights)})

    def add(self, update: Update, weight: Mapping[str, float]) -> None:
        for key, change in update.extra["scaffold"].tensors["change"].items():
            self._changes[key] = self._changes.get(key, torch.zeros(())) + change

    def after_aggregation(self, before: State, after: State) -> Step:
        control = Extra(tensors={"control": self._changes})
        return Step(replace(after, extra={**after.extra, "scaffold": control}))


class ScaffoldClient(LocalMethod):
    name = "scaffold"

    def start(self, client: LocalClient) -> None:
        flat = client.bound.flat
        self._correction = torch.zeros_like(flat.values)
        self._start = flat.values.clone()
        for key, place in flat.places.items():
            theirs = client.received.tensors["control"][key]
            ours = client.kept.tensors.get("control", {}).get(key, torch.zeros_like(theirs))
            self._correction[place] = (theirs - ours).reshape(-1)

    def gradient(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.gradients.add_(self._correction[part.place])

    def finish(self, num_steps: int) -> Finished:
        return Finished(sent=Extra(tensors={"change": {}}), kept=Extra(tensors={"control": {}}))


SCAFFOLD = Capability("scaffold", NoOptions, "methods.scaffold", ScaffoldServer, ScaffoldClient)


# -- DP-SGD: per-example norms in the backward pass, a ledger at the server -----------------------------------------


class NoiseOptions(BaseModel):
    clip: float = 1.0
    multiplier: float = 1.0


class NoisyClient(PerExampleMethod):
    """Norms come from the hand-written backward pass (CPU) or the stack's; both own every sequence by example."""

    name = "example_noise"
    stackable = True

    def __init__(self, options: NoiseOptions) -> None:
        self._options = options

    def factors(self, step: LocalStep, norms: Tensor) -> Tensor:
        return (self._options.clip / norms).clamp(max=1.0)

    def gradient(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.gradients.add_(torch.randn_like(part.gradients), alpha=self._options.clip * self._options.multiplier)

    def finish(self, num_steps: int) -> Finished:
        return Finished(sent=Extra(values={"steps": num_steps}))


class NoiseLedger(ServerMethod):
    name = "example_noise"

    def expects(self, job: Job) -> ExpectedExtra:
        return ExpectedExtra(values=frozenset({"steps"}))

    def add(self, update: Update, weight: Mapping[str, float]) -> None:
        """One entry of the ledger for each client, from what was done."""

    def after_aggregation(self, before: State, after: State) -> Step:
        return Step(after, (Event("privacy", {"epsilon": 0.0}),))


# -- Krum: all updates of a scope, several passes --------------------------------------------------------------------


class Krum:
    """The update with the smallest summed distance to its nearest neighbours (Blanchard et al. 2017), scope by scope."""

    streams: ClassVar[bool] = False

    def __init__(self, num_hostile: int, before: State) -> None:
        self._num_hostile, self._before = num_hostile, before

    def add(self, update: Update, weights: Mapping[str, float]) -> None: ...

    def result(self, waiting: StoredUpdates) -> Weights:
        distances: dict[str, Tensor] = {}
        for key in waiting.keys():
            clients, values = waiting.values(key)
            flat = torch.nan_to_num(values.reshape(len(clients), -1))
            distances[key.scope] = distances.get(key.scope, torch.zeros(())) + torch.cdist(flat, flat).square()
        return {}

    def remember(self) -> Extra:
        return NOTHING


# -- secure aggregation: exchanges before and after, an aggregator that unmasks --------------------------------------


class KeyExchange:
    when: Literal["before_training", "after_training"] = "before_training"

    def send(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Extra]:
        return dict.fromkeys(clients, NOTHING)

    def collect(self, answers: Mapping[ClientId, Extra]) -> Extra:
        keys: Json = {client: answer.values["public_key"] for client, answer in answers.items()}
        return Extra(values={"keys": keys})

    def at_client(self, received: Extra, kept: Extra) -> tuple[Extra, Extra]:
        return Extra(values={"public_key": ""}), Extra(values={"private_key": ""})


class Unmasking:
    when: Literal["before_training", "after_training"] = "after_training"

    def send(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Extra]:
        return dict.fromkeys(clients, Extra(values={"dropped": []}))

    def collect(self, answers: Mapping[ClientId, Extra]) -> Extra:
        return NOTHING

    def at_client(self, received: Extra, kept: Extra) -> tuple[Extra, Extra]:
        return Extra(values={"shares": {}}), kept


class MaskedSum:
    """Adds masked integers; masks cancel in the sum, those of clients that dropped out are taken off in `result`."""

    streams: ClassVar[bool] = True

    def add(self, update: Update, weights: Mapping[str, float]) -> None: ...

    def result(self, waiting: StoredUpdates) -> Weights:
        return {}

    def remember(self) -> Extra:
        return NOTHING


# -- tagging: outputs per token --------------------------------------------------------------------------------------


class Tagging:
    name: ClassVar[str] = "tagging"
    per_token: ClassVar[bool] = True

    def num_outputs(self, task: Any) -> int:
        return len(task.labels)

    def head(self, task: Any, width: int) -> nn.Module:
        return nn.Linear(width, self.num_outputs(task))

    def parse_label(self, task: Any, raw: str) -> Sequence[int]:
        return [task.labels.index(tag) for tag in raw.split()]

    def collate(self, task: Any, labels: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Labels of the rows' tokens side by side; -100 where a token begins no word."""
        return np.full((len(rows), int(lengths.max())), -100)

    def count_labels(self, task: Any, labels: np.ndarray) -> list[int]:
        return np.bincount(labels[labels >= 0], minlength=len(task.labels)).tolist()  # type: ignore[no-any-return]

    def losses(self, task: Any, outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.zeros(len(outputs))

    def divergence(self, task: Any, first: Tensor, second: Tensor) -> Tensor:
        return torch.zeros(len(first))

    def answer(self, task: Any, outputs: np.ndarray) -> Mapping[str, Json]:
        return {"entities": []}

    def sums(self, task: Any, outputs: np.ndarray, labels: np.ndarray, loss: float) -> Sums:
        raise NotImplementedError

    def read_sums(self, task: Any, raw: Mapping[str, Any]) -> Sums:
        raise NotImplementedError

    def score(self, task: Any, sums: Sums) -> Scores:
        raise NotImplementedError

    def fit(self, task: Any, outputs: np.ndarray, labels: np.ndarray) -> Mapping[str, Json]:
        return {}

    def onnx_outputs(self, task: Any) -> Sequence[str]:
        return ["tags"]


# -- three that exist ------------------------------------------------------------------------------------------------


class Pruning(ServerMethod):
    """Masks in State.extra, sent with every training job, zero after whatever others did to the weights."""

    name = "pruning"
    phase = "constraint"
    slots = {"mask": Slot(on_move="drop", codec="bits")}

    def start(self, state: State) -> Step:
        return self._pruned(state)

    def before_round(self, state: State, clients: Mapping[ClientId, Participant]) -> RoundSettings:
        return RoundSettings(extra=Extra(tensors={"mask": state.extra["pruning"].tensors["mask"]}))

    def after_aggregation(self, before: State, after: State) -> Step:
        return self._pruned(after)

    def _pruned(self, state: State) -> Step:
        return Step(state, (Event("pruning", {"share": 0.0}),))


class PrunedClient(LocalMethod):
    name = "pruning"

    def start(self, client: LocalClient) -> None:
        self._mask = torch.ones_like(client.bound.flat.values)
        client.bound.flat.values.mul_(self._mask)

    def gradient(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.gradients.mul_(self._mask[part.place])

    def stepped(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.values.mul_(self._mask[part.place])


class AdaptiveSharing(ServerMethod):
    name = "adaptive_sharing"
    phase = "plan"

    def add(self, update: Update, weight: Mapping[str, float]) -> None:
        """Mean deltas by task, and the inner products that clients with several tasks sent."""
        products = update.extra.get("adaptive_sharing", NOTHING).values
        assert isinstance(products, Mapping)

    def expects(self, job: Job) -> ExpectedExtra:
        return ExpectedExtra(values=frozenset({"inner_products"}))

    def after_aggregation(self, before: State, after: State) -> Step:
        return Step(replace(after, plan=after.plan), (Event("sharing", {"layers": []}),))


class MeasuredClient(LocalMethod):
    name = "adaptive_sharing"

    def task_gradient(self, step: LocalStep, reached: frozenset[Key]) -> None:
        """Adds up each task's gradients of the shared layers."""

    def finish(self, num_steps: int) -> Finished:
        return Finished(sent=Extra(values={"inner_products": {}}))


class LogitAdjustment(ServerMethod):
    name = "logit_adjustment"

    def before_round(self, state: State, clients: Mapping[ClientId, Participant]) -> RoundSettings:
        counts: dict[str, Json] = {}
        return RoundSettings(extra=Extra(values={"label_counts": counts}))


class AdjustedClient(LocalMethod):
    name = "logit_adjustment"
    stackable = True

    def adjust(self, step: LocalStep, outputs: Tensor) -> Tensor:
        return outputs + self._offsets[step.task]

    def start(self, client: LocalClient) -> None:
        self._offsets: dict[str, Tensor] = {}


class EarlyStopping(ServerMethod):
    name = "early_stopping"
    phase = "plan"

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        return Step(state, (Event("early_stop", {"task": ""}),))


@dataclass(frozen=True)
class _Checks:
    """That each fits its protocol, for the type checker."""

    aggregators: tuple[Aggregator, ...] = (Krum(1, State(0, {}, None)), MaskedSum())  # type: ignore[arg-type]
    exchanges: tuple[Exchange, ...] = (KeyExchange(), Unmasking())
    kinds: tuple[TaskKind, ...] = (Tagging(),)

    def each(self) -> Iterator[object]:
        yield from self.aggregators
