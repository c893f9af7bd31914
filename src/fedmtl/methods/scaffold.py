"""SCAFFOLD: control variates correct every step of a client for how far its steps lie from everybody's.

Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, their option II. The server
has a control variate c and every client one more, c_i, which stays there: what a step of the round moves the weights
by, on average over all clients and at this client. A client adds c - c_i to each of its steps. Its next c_i is
c_i - c + delta / steps, which the server finds from the update itself: all that travels beside it is the number of
steps. c moves by the mean of the changes over all clients, weighted as their updates are.

Control variates are steps here, where the paper's are gradients. For plain SGD that is the same but for a factor. For
AdamW, and wherever gradients are clipped, it is not: a mean gradient says nothing of how far such a step goes, and
correcting gradients ended in models that answer one label (docs/results/scaffold.md). They are divided by the
schedule's factor at the middle of the round, so that they serve the next one, whose steps are shorter or longer.

A value that some of the tasks share has a c over the clients of those tasks. Values that stay at a client are not
corrected, nor are token rows that no text of a client uses. With noise on gradients (`privacy.example`) they are: every
row moves, and which of them were corrected would tell a client's words.

What bounds a hostile client's update does not bound what c does with it in all later rounds, so the two are refused
together.
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
from fedmtl.errors import ConfigError
from fedmtl.federation.aggregators.mean import add_delta, client_weight, per_example
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan, Weights, is_personal, take_rows, used_rows
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import Finished, LocalClient, LocalMethod, Part, local_settings
from fedmtl.training.optimizer import rate_factor

NAME = "scaffold"
CONTROL, MOVES = "control", "moves"
MOST_MOVES = 10**9
LEAST_FACTOR = 1e-6


class ScaffoldOptions(BaseModel):
    """There is nothing to set: `methods: {scaffold: {}}` switches it on."""

    model_config = ConfigDict(extra="forbid")


class Scaffold(ServerMethod):
    """Sends c with every job, and moves it by what the updates say of the clients' control variates."""

    name = NAME
    # Before layers move to another level: the changes are of the keys that clients returned.
    phase = "plan"

    def __init__(
        self, task_weights: Mapping[str, float], average: Average, rate_factors: Sequence[float], table: str
    ) -> None:
        self._given_weights, self._average, self._factors, self._table = task_weights, average, rate_factors, table
        self._task_weights = task_weights
        self._declared: dict[ClientId, Mapping[str, int]] = {}
        self._examples: list[Mapping[str, int]] = []
        self._state: State | None = None
        self._sums: Weights = {}

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        known = self._declared
        self._declared = {client: known.get(client) or dict(infos[client].num_examples) for client in sorted(infos)}
        # Also of those that are not sampled: their c_i is a part of c, and does not change.
        self._examples = [
            {task: count[task] for task in sampled.get(client, count)} for client, count in self._declared.items()
        ]
        if self._average == "tasks":
            sizes = Counter[str]()
            for num_examples in self._examples:
                sizes.update(num_examples)
            self._task_weights = per_example(self._given_weights, sizes)
        self._state, self._sums = state, {}
        return RoundSettings(extra=state.extra.get(NAME, NO_EXTRA))

    def add(self, update: Update) -> None:
        assert self._state is not None
        factor = self._factors[self._state.round]
        control = self._state.extra.get(NAME, NO_EXTRA).slot(CONTROL)
        moves = update.extra.get(NAME, NO_EXTRA).values.get(MOVES, {})
        for key, delta in update.delta.items():
            num_moves = moves.get(key.scope, {}).get(key.name, 0)
            if not num_moves:
                continue
            change = delta / (num_moves * factor)
            if key in control:
                before = control[key]
                if before.shape != delta.shape:
                    assert update.rows is not None
                    before = take_rows(before, update.rows)
                if key.name == self._table:
                    # A row that no text of the client uses was not corrected either.
                    before = before * delta.any(dim=1, keepdim=True)
                change -= before
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._state.weights[key])
            add_delta(self._sums[key], change, self._weight(key.scope, update.num_examples), update.rows)

    def after_aggregation(self, before: State, after: State) -> Step:
        control = dict(before.extra.get(NAME, NO_EXTRA).slot(CONTROL))
        totals: dict[str, float] = {}
        for key, change in self._sums.items():
            if key.scope not in totals:
                totals[key.scope] = sum(self._weight(key.scope, num_examples) for num_examples in self._examples)
            if totals[key.scope] > 0:
                moved = change.div_(totals[key.scope])
                control[key] = control[key] + moved if key in control else moved
        self._sums = {}
        return Step(after.with_extra(NAME, _extra(CONTROL, control)))

    def check(self, extra: Extra) -> None:
        if extra.values or set(extra.tensors) - {CONTROL} or not _are_numbers(extra.slot(CONTROL)):
            raise ValueError("SCAFFOLD has control variates alone")

    def _weight(self, scope: str, num_examples: Mapping[str, int]) -> float:
        assert self._state is not None
        return client_weight(num_examples, scope, self._state.plan, self._task_weights, self._average)


class ScaffoldClient(LocalMethod):
    """Adds c - c_i to every step of the optimizer, and finds the next c_i."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factors: Sequence[float] = options["rate_factors"]
        self._corrects_all_rows: bool = options["corrects_all_rows"]
        self._num_moves = Counter[Key]()
        self._moving: list[slice] = []

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._bound, self._control = client.bound, stored.slot(CONTROL)
        self._factor = self._factors[client.round - 1]
        self._spans = {key: span for key, span in client.bound.flat.spans.items() if not is_personal(key)}
        self._before, self._correction = self._buffer("before"), self._buffer("correction").zero_()
        self._before.copy_(client.bound.flat.values)
        for key, span in self._spans.items():
            for sign, control in ((1.0, received.slot(CONTROL)), (-1.0, self._control)):
                if key in control:
                    part = self._correction[span]
                    part.add_(control[key].reshape(-1).to(part.device), alpha=sign * self._factor)
            is_whole_table = key.name == client.bound.model.table and client.bound.index is None
            if is_whole_table and not self._corrects_all_rows:
                self._clear_unused_rows(client, key)

    def gradient(self, parts: Sequence[Part]) -> None:
        # A head moves in the steps of its task alone.
        self._moving = [part.span for part in parts]
        for part in parts:
            inside = (key for key, span in self._spans.items() if part.span.start <= span.start < part.span.stop)
            self._num_moves.update(inside)

    def stepped(self, values: Tensor) -> None:
        for span in self._moving:
            values[span].add_(self._correction[span])

    def finish(self, tasks: Sequence[str]) -> Finished:
        """The next c_i of the values that the update is of, the mean of their steps; others stay as they were."""
        control, moves = dict(self._control), dict[str, dict[str, int]]()
        for key in dict.fromkeys(key for task in tasks for key in self._bound.views[task].values()):
            count, span = self._num_moves[key], self._spans.get(key)
            if count and span is not None:
                moved = self._bound.flat.values[span] - self._before[span]
                steps = (moved.div_(count) - self._correction[span]).div_(self._factor)
                control[key] = steps.view(self._bound.parameters[key].shape).cpu()
                moves.setdefault(key.scope, {})[key.name] = count
        return Finished(Extra({MOVES: moves}) if moves else NO_EXTRA, _extra(CONTROL, control))

    def _clear_unused_rows(self, client: LocalClient, key: Key) -> None:
        """With vocabulary slices these rows would not be here: without them nothing else happens."""
        table = self._correction[self._spans[key]].view(client.bound.parameters[key].shape)
        ids = (ids for shard in client.shards.values() for ids in shard.used_ids())
        unused = torch.ones(len(table), dtype=torch.bool)
        unused[torch.from_numpy(used_rows(ids, client.bound.model.pad_id))] = False
        table[unused.to(table.device)] = 0.0

    def _buffer(self, name: str) -> Tensor:
        values = self._bound.flat.values
        return self._bound.buffers.take(f"{NAME}.{name}", values.numel(), values.dtype, values.device)


def _extra(slot: str, values: Weights) -> Extra:
    return Extra(tensors={slot: values}) if values else NO_EXTRA


def _are_numbers(values: Mapping[Key, Tensor]) -> bool:
    return all(value.is_floating_point() and bool(value.isfinite().all()) for value in values.values())


def _check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why it is not how often each value moved."""
    moves = extra.values.get(MOVES, {})
    counts = [count for by_name in moves.values() for count in by_name.values()]
    is_fine = not extra.tensors and set(extra.values) <= {MOVES}
    is_fine = is_fine and all(type(count) is int and 0 < count <= MOST_MOVES for count in counts)
    return None if is_fine else "it sent something else of scaffold than how often each value moved"


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    is_fine = not extra.values and set(extra.tensors) <= {CONTROL} and _are_numbers(extra.slot(CONTROL))
    return None if is_fine else "the job's control variates are none"


def _rate_factors(config: Config) -> list[float]:
    """What the schedule multiplies the learning rate by at the middle of every round."""
    settings = local_settings(config.training, {}, {}, keep_optimizer=False)
    return [rate_factor(settings, number + 0.5) for number in range(settings.num_rounds)]


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    if NAME not in config.methods:
        return None
    return {"rate_factors": _rate_factors(config), "corrects_all_rows": config.privacy.example is not None}


def _open(setup: ServerSetup) -> Scaffold:
    federation, training = setup.config.federation, setup.config.training
    bounded = {
        **dict.fromkeys(federation.aggregation.looks_at_updates(), True),
        "federation.max_share": federation.max_share is not None,
        "federation.max_update_norm": federation.max_update_norm is not None,
        "federation.task_weighting": federation.task_weighting.kind != "fixed",
    }
    for key, is_set in bounded.items():
        if is_set:
            raise ConfigError(
                f"{key}: found with methods.scaffold, whose control variates it does not reach; leave one of them out"
            )
    factors = _rate_factors(setup.config)
    if min(factors, default=1.0) < LEAST_FACTOR:
        raise ConfigError(
            f"training.schedule: found {training.schedule}, which takes the learning rate to {min(factors):g} of itself"
            " before the last round; methods.scaffold compares steps of all rounds, so let it end higher"
        )
    in_loss = training.task_weight_in == "loss"
    weights = {name: 1.0 if in_loss else task.weight for name, task in setup.tasks.items()}
    return Scaffold(weights, federation.average, factors, setup.model.table)


CAPABILITY = Capability(
    NAME,
    ScaffoldClient,
    _client_options,
    _open,
    check_sent=_check_sent,
    check_received=_check_received,
    options=ScaffoldOptions,
)
