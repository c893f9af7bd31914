"""SCAFFOLD: control variates correct every step of a client for how far its steps lie from everybody's.

Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, their option II. The server
has a control variate c and every client one more, c_i, which stays there: what a step of the round moves the weights
by, on average over all clients and at this client. A client adds c - c_i to each of its steps. The change of c_i
travels with its update, and c moves by the mean of the changes over all clients, weighted as their updates are.

Control variates are steps here, where the paper's are gradients. For plain SGD that is the same but for a factor. For
AdamW, and wherever gradients are clipped, it is not: a mean gradient says nothing of how far such a step goes, and
correcting gradients ended in models that answer one label (docs/results/scaffold.md). They are divided by the
schedule's factor at the middle of the round, so that they serve the next one, whose steps are shorter or longer.

A value that some of the tasks share has a c over the clients of those tasks. Values that stay at a client are not
corrected, nor are token rows that no text of a client uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import Average, Config
from fedmtl.federation.aggregators.mean import add_delta, client_weight, per_example
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step, with_extra
from fedmtl.sharing.extra import NO_EXTRA, Extra
from fedmtl.sharing.keys import Key, Weights, is_personal
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.vocabulary import used_rows
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import Finished, LocalClient, LocalMethod, Part
from fedmtl.training.schedules import rate_factor
from fedmtl.training.settings import local_settings

NAME = "scaffold"
CONTROL, CHANGE = "control", "change"


class ScaffoldOptions(BaseModel):
    """There is nothing to set: `methods: {scaffold: {}}` switches it on."""

    model_config = ConfigDict(extra="forbid")


class Scaffold(ServerMethod):
    """Sends c with every job, and moves it by what the clients say of theirs."""

    name = NAME
    # Before layers move to another level: the changes are of the keys that clients returned.
    phase = "plan"

    def __init__(self, tasks: Mapping[str, Task], average: Average) -> None:
        self._tasks, self._average = tasks, average
        self._clients: dict[ClientId, Mapping[str, int]] = {}
        self._task_weights: Mapping[str, float] = {}
        self._state: State | None = None
        self._sums: Weights = {}

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        known = self._clients
        self._clients = {client: known.get(client) or dict(infos[client].num_examples) for client in sorted(infos)}
        self._task_weights = {name: task.weight for name, task in self._tasks.items()}
        if self._average == "tasks":
            sizes = Counter[str]()
            for num_examples in self._clients.values():
                sizes.update(num_examples)
            self._task_weights = per_example(self._task_weights, sizes)
        self._state, self._sums = state, {}
        return RoundSettings(extra=state.extra.get(NAME, NO_EXTRA))

    def add(self, update: Update) -> None:
        assert self._state is not None
        for key, change in update.extra.get(NAME, NO_EXTRA).slot(CHANGE).items():
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._state.weights[key])
            add_delta(self._sums[key], change, self._weight(key.scope, update), update.rows)

    def after_aggregation(self, before: State, after: State) -> Step:
        control = dict(before.extra.get(NAME, NO_EXTRA).slot(CONTROL))
        # Also those that were not sampled: their c_i is a part of c, and did not change.
        everybody = [Update(0, client, tuple(count), {}, None, count, {}) for client, count in self._clients.items()]
        totals: dict[str, float] = {}
        for key, change in self._sums.items():
            if key.scope not in totals:
                totals[key.scope] = sum(self._weight(key.scope, client) for client in everybody)
            if totals[key.scope] > 0:
                moved = change.div_(totals[key.scope])
                control[key] = control[key] + moved if key in control else moved
        self._sums = {}
        return Step(with_extra(after, NAME, _extra(CONTROL, control)))

    def check(self, extra: Extra) -> None:
        if extra.values or set(extra.tensors) - {CONTROL} or not _are_numbers(extra.slot(CONTROL)):
            raise ValueError("SCAFFOLD has control variates alone")

    def _weight(self, scope: str, update: Update) -> float:
        assert self._state is not None
        return client_weight(update, scope, self._state.plan, self._task_weights, self._average)


class ScaffoldClient(LocalMethod):
    """Adds c - c_i to every step of the optimizer, and finds the next c_i."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factors: Sequence[float] = options["rate_factors"]
        self._num_moves = Counter[Key]()
        self._moving: list[slice] = []

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._bound, self._control = client.bound, stored.slot(CONTROL)
        self._factor = self._factors[client.round - 1]
        self._spans = {key: span for key, span in client.bound.flat.spans.items() if not is_personal(key)}
        self._steps, self._correction, self._before = map(self._buffer, ("steps", "correction", "before"))
        for key, span in self._spans.items():
            for sign, control in ((1.0, received.slot(CONTROL)), (-1.0, self._control)):
                if key in control:
                    part = self._correction[span]
                    part.add_(control[key].reshape(-1).to(part.device), alpha=sign * self._factor)
            if key.name == client.bound.model.table and client.bound.index is None:
                self._clear_unused_rows(client, key)

    def gradient(self, parts: Sequence[Part]) -> None:
        self._moving = [part.span for part in parts]
        for part in parts:
            self._before[part.span].copy_(part.values)

    def stepped(self, values: Tensor) -> None:
        for span in self._moving:
            # A head moves in the steps of its task alone.
            self._num_moves.update(key for key, inner in self._spans.items() if span.start <= inner.start < span.stop)
            self._steps[span].add_(values[span]).sub_(self._before[span])
            values[span].add_(self._correction[span])

    def finish(self, tasks: Sequence[str]) -> Finished:
        """The next c_i of the values that the update is of, the mean of their steps; others stay as they were."""
        control, change = dict(self._control), {}
        for key in dict.fromkeys(key for task in tasks for key in self._bound.views[task].values()):
            if self._num_moves[key]:
                mean = self._steps[self._spans[key]].div(self._num_moves[key] * self._factor)
                mean = mean.view(self._bound.parameters[key].shape).cpu()
                change[key] = mean - control[key] if key in control else mean
                control[key] = mean
        return Finished(_extra(CHANGE, change), _extra(CONTROL, control))

    def _clear_unused_rows(self, client: LocalClient, key: Key) -> None:
        """With vocabulary slices these rows would not be here: without them nothing else happens."""
        table = self._correction[self._spans[key]].view(client.bound.parameters[key].shape)
        ids = (ids for shard in client.shards.values() for ids in shard.used_ids())
        unused = torch.ones(len(table), dtype=torch.bool)
        unused[torch.from_numpy(used_rows(ids, client.bound.model.pad_id))] = False
        table[unused.to(table.device)] = 0.0

    def _buffer(self, name: str) -> Tensor:
        values = self._bound.flat.values
        return self._bound.buffers.take(f"{NAME}.{name}", values.numel(), values.dtype, values.device).zero_()


def _extra(slot: str, values: Weights) -> Extra:
    return Extra(tensors={slot: values}) if values else NO_EXTRA


def _are_numbers(values: Mapping[Key, Tensor]) -> bool:
    return all(value.is_floating_point() and bool(value.isfinite().all()) for value in values.values())


def _check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why it is no change of control variates; keys, shapes and norms are checked for all capabilities alike."""
    is_fine = not extra.values and set(extra.tensors) <= {CHANGE}
    return None if is_fine else "it sent more than changes of its control variates"


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    is_fine = not extra.values and set(extra.tensors) <= {CONTROL} and _are_numbers(extra.slot(CONTROL))
    return None if is_fine else "the job's control variates are none"


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    """What the schedule multiplies the learning rate by at the middle of every round, where it is nowhere 0."""
    if NAME not in config.methods:
        return None
    settings = local_settings(config.training, {}, {}, keep_optimizer=False)
    return {"rate_factors": [rate_factor(settings, number + 0.5) for number in range(settings.num_rounds)]}


def _open(setup: ServerSetup) -> Scaffold:
    return Scaffold(setup.tasks, setup.config.federation.average)


CAPABILITY = Capability(
    NAME,
    ScaffoldClient,
    _client_options,
    _open,
    check_sent=_check_sent,
    check_received=_check_received,
    options=ScaffoldOptions,
)
