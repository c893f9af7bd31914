"""A sharing plan that changes between rounds: layers in which tasks pull apart split, those in which they agree merge.

A layer's level may go from `all` over the groups to `task` and back. Two tasks that share it and disagree call for a
split, to the coarsest level at which no two that disagree share. Tasks that agree call for a merge. Splits begin at the
top and merges at the bottom, so that the layers below the first that is split are one pass for all tasks; one layer
moves in a round, as every move changes what the others are to be measured by.

Agreement is the cosine between tasks' updates of a round. Gradients in conflict are those of Yu et al. 2020 (PCGrad);
over a round's updates instead of one step's gradients they cost the server one mean delta per task, of the movable
layers only. A client that trains several tasks in one value cannot say whose its delta is, so it sends the inner
products of its tasks' gradients: gradients and not movements, as with momentum a step of one task is mostly what the
steps of the others left behind (two tasks that alternate with gradients at right angles would show a cosine of .995
under a beta of .9). A pair's agreement is the mean of both kinds of evidence, each counted by the examples of the two
tasks behind it (by clients where the mean is uniform).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.config import AdaptiveSharingConfig, Average, Config
from fedmtl.config.sharing import group_depth
from fedmtl.errors import ConfigError
from fedmtl.federation.aggregators.mean import add_delta
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.model.multitask import BoundModel
from fedmtl.runs.events import LayerMove, SharingEvent
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan, Weights, layer_of, move, owner_task
from fedmtl.training.local_method import Finished, LocalClient, LocalMethod
from fedmtl.training.stacked.method import StackedMethod

NAME = "adaptive_sharing"
LAYERS, PRODUCTS = "layers", "inner_products"
# A sum's last digits depend on how many threads made it; a decision must not.
DIGITS = 6

Agreement = dict[str, dict[str, float]]
Layers = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LayerTrack:
    """A movable layer's way so far: the smoothed agreement of each pair of tasks that has one (`a/b`).

    `low` and `high` are the rounds in a row for which it called for a split or a merge.
    """

    agreement: Mapping[str, float] = field(default_factory=dict)
    low: int = 0
    high: int = 0


@dataclass(frozen=True)
class LayerDecision:
    """What a round decided of a movable layer, by the agreement it measured and the smoothed one of each pair."""

    layer: str
    measured: Mapping[str, float]
    smoothed: Mapping[str, float]
    before: str
    after: str
    reason: str


class AdaptiveSharing(ServerMethod):
    """Measures agreement as updates stream by, and moves at most one layer after each round."""

    name = NAME
    phase = "plan"

    def __init__(self, settings: AdaptiveSharingConfig, layers: Layers, tasks: Sequence[str], average: Average) -> None:
        self._settings, self._layers, self._tasks, self._average = settings, layers, tasks, average
        self._updates: TaskUpdates | None = None

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        self._updates = TaskUpdates(self._layers, self._tasks, state.weights, state.plan, self._average)
        return RoundSettings()

    def add(self, update: Update) -> None:
        assert self._updates is not None
        self._updates.add(update)

    def after_aggregation(self, before: State, after: State) -> Step:
        assert self._updates is not None
        state, decisions = adapt(after, self._settings, self._layers, self._tasks, self._updates.measure())
        layers = [
            LayerMove(
                layer=decision.layer,
                agreement=dict(decision.smoothed),
                measured=dict(decision.measured),
                before=decision.before,
                after=decision.after,
                reason=decision.reason,
            )
            for decision in decisions
        ]
        return Step(state, (SharingEvent(round=state.round, layers=layers),))

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) - {LAYERS}:
            raise ValueError("adaptive sharing has the way of its layers alone")
        tracks = TypeAdapter(dict[str, LayerTrack]).validate_python(extra.values.get(LAYERS, {}))
        for layer, track in tracks.items():
            if layer not in self._layers or min(track.low, track.high) < 0:
                raise ValueError(f"{layer} is no layer that moves")
            if not all(math.isfinite(value) for value in track.agreement.values()):
                raise ValueError(f"the agreement of {layer} is no number")


def fineness(level: str, plan: SharingPlan) -> int:
    """0 for `all`, the depth for a group, and more than any of them for `task`."""
    if level == "all":
        return 0
    return len(plan.groups) + 1 if level == "task" else group_depth(level)


def allowed_levels(settings: AdaptiveSharingConfig, plan: SharingPlan) -> list[str]:
    """From coarse to fine."""
    depths = ["group" if depth == 1 else f"group.{depth}" for depth in range(1, len(plan.groups) + 1)]
    return sorted(settings.levels or ["all", *depths, "task"], key=lambda level: fineness(level, plan))


def movable_layers(settings: AdaptiveSharingConfig, plan: SharingPlan, names: Sequence[str]) -> Layers:
    """layer -> names of its parameters that train, from the bottom to the top.

    Raises a ConfigError for a layer that cannot move.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        if owner_task(name) is None:
            layers.setdefault(layer_of(name), []).append(name)
    for pattern in settings.layers or ():
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            raise ConfigError(
                f"sharing.adaptive.layers: `{pattern}` matches no layer; the encoder has {', '.join(layers)}"
            )
    levels = allowed_levels(settings, plan)
    chosen: dict[str, tuple[str, ...]] = {}
    for layer, members in layers.items():
        # Under LoRA a layer's weights are fixed; what trains in it may move.
        moving = [name for name in members if plan.level(name) != "fixed"] or members
        found = {plan.level(name) for name in moving}
        if settings.layers is None and (not layer[-1].isdigit() or not found & set(levels)):
            continue
        if settings.layers is not None and not any(fnmatchcase(layer, pattern) for pattern in settings.layers):
            continue
        if len(found) > 1 or not found <= set(levels):
            raise ConfigError(
                f"sharing.adaptive: the layer {layer} is at level {' and '.join(sorted(found))} by sharing.rules; a"
                f" layer that moves is at one of {', '.join(levels)}: leave it out of `layers`, or change its rule"
            )
        chosen[layer] = tuple(moving)
    if not chosen:
        raise ConfigError("sharing.adaptive: no layer can move; name some in `sharing.adaptive.layers`")
    return chosen


@dataclass(frozen=True)
class Rule:
    """What decides: the settings, and for every level from coarse to fine which pairs of tasks share there."""

    settings: AdaptiveSharingConfig
    plan: SharingPlan
    pairs: Mapping[str, frozenset[str]]

    def split(self, level: str, agreement: Mapping[str, float]) -> str | None:
        """The coarsest finer level at which no pair is known to disagree, where one does at this level."""
        if not self._disagree(self.pairs[level], agreement):
            return None
        finer = [other for other in self.pairs if self.is_finer(other, level)]
        calm = [other for other in finer if not self._disagree(self.pairs[other], agreement)]
        return calm[0] if calm else finer[-1] if finer else None

    def merge(self, level: str, agreement: Mapping[str, float]) -> str | None:
        """The coarsest level at which all pairs that would come to share are known to agree.

        What a stopped task has for itself does not move, so that it is not merged either.
        """
        here = SharingPlan((("*", level),), self.plan.groups)
        if any(here.key("", task, "").scope == f"task:{task}" for task in self.plan.stopped):
            return None
        for other, pairs in self.pairs.items():
            joined = pairs - self.pairs[level]
            if self.is_finer(level, other) and all(
                pair in agreement and agreement[pair] > self.settings.merge_above for pair in joined
            ):
                return other
        return None

    def _disagree(self, pairs: frozenset[str], agreement: Mapping[str, float]) -> bool:
        return any(agreement[pair] < self.settings.split_below for pair in pairs if pair in agreement)

    def is_finer(self, level: str, other: str) -> bool:
        return fineness(level, self.plan) > fineness(other, self.plan)


def make_rule(settings: AdaptiveSharingConfig, plan: SharingPlan, tasks: Sequence[str]) -> Rule:
    pairs = {}
    for level in allowed_levels(settings, plan):
        every = SharingPlan((("*", level),), plan.groups)
        pairs[level] = frozenset(
            pair_name(a, b) for a, b in combinations(tasks, 2) if every.key("", a, "") == every.key("", b, "")
        )
    return Rule(settings, plan, pairs)


def adapt(
    state: State, settings: AdaptiveSharingConfig, layers: Layers, tasks: Sequence[str], agreement: Agreement
) -> tuple[State, tuple[LayerDecision, ...]]:
    """The state after a round's agreement was taken in, with at most one layer moved, and what was decided of each."""
    rule = make_rule(settings, state.plan, tasks)
    levels = {layer: state.plan.level(names[0]) for layer, names in layers.items()}
    known = layer_tracks(state)
    tracks = {
        layer: _follow(known.get(layer, LayerTrack()), agreement.get(layer, {}), levels[layer], rule, state)
        for layer in layers
    }
    moves, reasons = _moves(rule, levels, tracks)
    if state.round <= settings.warmup_rounds:
        reasons = dict.fromkeys(layers, "warm-up")
    for layer, level in moves.items():
        state = _moved(state, layer, layers[layer], level, tasks)
        tracks[layer] = replace(tracks[layer], low=0, high=0)
    decisions = tuple(
        LayerDecision(
            layer,
            measured=agreement.get(layer, {}),
            smoothed=tracks[layer].agreement,
            before=levels[layer],
            after=moves.get(layer, levels[layer]),
            reason=reasons[layer],
        )
        for layer in layers
    )
    values = {layer: asdict(track) for layer, track in tracks.items()}
    return state.with_extra(NAME, Extra({LAYERS: values})), decisions


def layer_tracks(state: State) -> dict[str, LayerTrack]:
    """The way of every movable layer so far."""
    values = state.extra.get(NAME, NO_EXTRA).values.get(LAYERS, {})
    return {layer: LayerTrack(**track) for layer, track in values.items()}


def _follow(track: LayerTrack, fresh: Mapping[str, float], level: str, rule: Rule, state: State) -> LayerTrack:
    """The smoothed agreement, and for how many rounds in a row it has called for a split or a merge."""
    # The first rounds are about what all tasks have in common: the outputs' scale, the mean label.
    if not fresh or state.round <= rule.settings.warmup_rounds:
        return track
    keep = rule.settings.smoothing
    smoothed = {
        **track.agreement,
        **{
            pair: keep * track.agreement[pair] + (1.0 - keep) * value if pair in track.agreement else value
            for pair, value in fresh.items()
        },
    }
    low = track.low + 1 if rule.split(level, smoothed) else 0
    high = track.high + 1 if not low and rule.merge(level, smoothed) else 0
    return LayerTrack(smoothed, low, high)


def _moves(
    rule: Rule, levels: Mapping[str, str], tracks: Mapping[str, LayerTrack]
) -> tuple[dict[str, str], dict[str, str]]:
    """The layer that moves, if any, with its new level; and for every layer why it moves or stays."""
    order = list(levels)
    moves: dict[str, str] = {}
    reasons = dict.fromkeys(order, "stays")
    splits = [layer for layer in reversed(order) if tracks[layer].low]
    merges = [layer for layer in order if tracks[layer].high]
    for layer in [*splits, *merges]:
        count, verb = max(tracks[layer].low, tracks[layer].high), "disagree" if layer in splits else "agree"
        target, side = _wish(rule, levels, tracks[layer], layer)
        if count < rule.settings.patience or target is None:
            reasons[layer] = f"tasks {verb}, {count} of {rule.settings.patience} rounds"
        elif side is not None:
            reasons[layer] = f"tasks {verb}; waits for the layers {side}"
        elif moves:
            reasons[layer] = f"tasks {verb}; waits, as one layer moves in a round"
        else:
            moves[layer] = target
            reasons[layer] = f"tasks {verb} for {count} rounds"
    return moves, reasons


def _wish(rule: Rule, levels: Mapping[str, str], track: LayerTrack, layer: str) -> tuple[str | None, str | None]:
    """The level a layer should have, and on which side of it there are layers that must move first."""
    order = list(levels)
    index, level = order.index(layer), levels[layer]
    if track.low:
        target = rule.split(level, track.agreement)
        stuck = target is not None and any(rule.is_finer(target, levels[above]) for above in order[index + 1 :])
        return target, "above" if stuck else None
    target = rule.merge(level, track.agreement)
    stuck = target is not None and any(rule.is_finer(levels[below], target) for below in order[:index])
    return target, "below" if stuck else None


def _moved(state: State, layer: str, names: Sequence[str], level: str, tasks: Sequence[str]) -> State:
    """The state with one layer at another level: its weights and optimizer state are copied or averaged."""
    is_partly_fixed = any(key.scope == "fixed" and layer_of(key.name) == layer for key in state.weights)
    plan = state.plan
    for pattern in names if is_partly_fixed else (f"{layer}.*",):
        plan = plan.with_rule(pattern, level)

    def carry(values: Mapping[Key, Tensor], *, partial: bool = True) -> Weights:
        moving = {key: value for key, value in values.items() if key.name in names}
        rest = {key: value for key, value in values.items() if key.name not in names}
        return {**rest, **move(moving, state.plan, plan, tasks, partial=partial)}

    return replace(
        state,
        plan=plan,
        weights=carry(state.weights, partial=False),
        # A value that nobody returned yet has no state to carry.
        extra={name: extra.changed(carry) for name, extra in state.extra.items()},
    )


def pair_name(first: str, second: str) -> str:
    return f"{first}/{second}"


class TaskUpdates:
    """Adds up what each task did to each movable layer, update by update; `layers` are layer -> parameter names."""

    def __init__(
        self,
        layers: Mapping[str, Sequence[str]],
        tasks: Sequence[str],
        before: Weights,
        plan: SharingPlan,
        average: Average = "weighted",
    ) -> None:
        self._layers, self._tasks, self._before, self._plan = layers, tasks, before, plan
        self._is_uniform = average == "uniform"
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._counts: dict[tuple[str, str], float] = {}
        self._from_clients: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def add(self, update: Update) -> None:
        for layer, names in self._layers.items():
            users: dict[str, list[str]] = {}
            for task in update.tasks:
                users.setdefault(self._plan.key(names[0], task, update.client).scope, []).append(task)
            for scope, tasks in users.items():
                if len(tasks) == 1:
                    self._add_delta(update, layer, scope, tasks[0])
                elif layer in _products(update):
                    self._add_products(update, layer, tasks)

    def measure(self) -> Agreement:
        """layer -> pair of tasks -> cosine, of all pairs there is evidence for."""
        found: Agreement = {}
        for layer in self._layers:
            pairs = {}
            for first, second in combinations(self._tasks, 2):
                name = pair_name(first, second)
                evidence = [*self._from_clients.get(layer, {}).get(name, ()), *self._between(layer, first, second)]
                total = sum(weight for _, weight in evidence)
                if total:
                    pairs[name] = round(sum(cosine * weight for cosine, weight in evidence) / total, DIGITS)
            found[layer] = pairs
        return found

    def _add_delta(self, update: Update, layer: str, scope: str, task: str) -> None:
        weight = self._weight(update, task)
        for name in self._layers[layer]:
            key = Key(scope, name)
            if key in update.delta:
                if (task, name) not in self._sums:
                    self._sums[task, name] = torch.zeros_like(self._before[key])
                add_delta(self._sums[task, name], update.delta[key], weight, update.rows)
        self._counts[layer, task] = self._counts.get((layer, task), 0.0) + weight

    def _add_products(self, update: Update, layer: str, tasks: Sequence[str]) -> None:
        products = _products(update)[layer]
        index = {task: number for number, task in enumerate(update.tasks)}
        for first, second in combinations([task for task in self._tasks if task in tasks], 2):
            a, b = index[first], index[second]
            found = cosine(products[a][b], products[a][a], products[b][b])
            if found is not None:
                weight = self._weight(update, first) + self._weight(update, second)
                pairs = self._from_clients.setdefault(layer, {})
                pairs.setdefault(pair_name(first, second), []).append((found, weight))

    def _between(self, layer: str, first: str, second: str) -> Iterator[tuple[float, float]]:
        shared = [n for n in self._layers[layer] if (first, n) in self._sums and (second, n) in self._sums]
        products = [
            sum(_dot(self._sums[a, name], self._sums[b, name]) for name in shared)
            for a, b in ((first, second), (first, first), (second, second))
        ]
        found = cosine(*products)
        if found is not None:
            yield found, self._counts[layer, first] + self._counts[layer, second]

    def _weight(self, update: Update, task: str) -> float:
        return 1.0 if self._is_uniform else float(update.num_examples[task])


def cosine(product: float, first: float, second: float) -> float | None:
    """The cosine from an inner product and two squared norms; None where a norm is 0."""
    norms = math.sqrt(first) * math.sqrt(second)
    return max(-1.0, min(1.0, product / norms)) if norms > 0 else None


def _products(update: Update) -> Mapping[str, Sequence[Sequence[float]]]:
    found: Mapping[str, Sequence[Sequence[float]]] = update.extra.get(NAME, NO_EXTRA).values.get(PRODUCTS, {})
    return found


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1).double(), b.reshape(-1).double()))


class TaskGradients:
    """Adds up each task's gradients of the layers in which several tasks of this client share a value.

    It costs one copy of these layers per task, and nothing for a client with one task.
    """

    def __init__(self, bound: BoundModel, layers: Sequence[str]) -> None:
        self._bound = bound
        users = Counter(key for view in bound.views.values() for key in view.values())
        self._keys: dict[str, list[Key]] = {layer: [] for layer in layers}
        for key in bound.flat.spans:
            if users[key] > 1 and layer_of(key.name) in self._keys:
                self._keys[layer_of(key.name)].append(key)
        self._sums: dict[tuple[str, Key], Tensor] = {}

    def add(self, task: str, reached: Collection[Key]) -> None:
        """Take in the gradients that a backward pass of this task left."""
        for keys in self._keys.values():
            for key in keys:
                if key in reached:
                    gradient = self._bound.parameters[key].grad
                    assert gradient is not None
                    if (task, key) in self._sums:
                        self._sums[task, key].add_(gradient)
                    else:
                        self._sums[task, key] = gradient.clone()

    def inner_products(self, tasks: Sequence[str]) -> dict[str, list[list[float]]]:
        """For each layer, the products of every two of these tasks, in their order."""
        return {
            layer: [[self._product(keys, a, b) for b in tasks] for a in tasks]
            for layer, keys in self._keys.items()
            if keys
        }

    def _product(self, keys: Sequence[Key], a: str, b: str) -> float:
        both = [(self._sums[a, key], self._sums[b, key]) for key in keys if {(a, key), (b, key)} <= self._sums.keys()]
        return sum(float(torch.dot(x.reshape(-1).double(), y.reshape(-1).double())) for x, y in both)


class NothingMeasured(StackedMethod):
    """A client with one task has no inner products to send."""

    name = NAME
    knows_several_tasks = False


class MeasuredClient(LocalMethod):
    """A client with several tasks sends the inner products of its tasks' gradients in every layer that may move."""

    name = NAME
    stacked = NothingMeasured

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._layers = tuple(options["layers"])
        self._gradients: TaskGradients | None = None

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._gradients = TaskGradients(client.bound, self._layers)

    def task_gradient(self, task: str, reached: Collection[Key], gradients: Tensor) -> None:
        assert self._gradients is not None
        self._gradients.add(task, reached)

    def finish(self, tasks: Sequence[str]) -> Finished:
        assert self._gradients is not None
        products = self._gradients.inner_products(tasks)
        return Finished(sent=Extra({PRODUCTS: products}) if products else Extra())


def check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why what a client sent of its gradients cannot be: not of the layers that may move, or of no vectors."""
    products = extra.values.get(PRODUCTS, {})
    if extra.tensors or set(extra.values) - {PRODUCTS} or not isinstance(products, Mapping):
        return "its inner products are not those it was given to measure"
    if not set(products) <= set(options["layers"]) or not all(_are_products(one, tasks) for one in products.values()):
        return "its inner products are not those it was given to measure"
    return None


def _are_products(products: Any, tasks: Sequence[str]) -> bool:
    """Whether vectors can have these: a finite number for every two tasks, symmetric, none over the norms' product."""
    indices = range(len(tasks))
    if not isinstance(products, Sequence) or [len(row) for row in products] != [len(tasks)] * len(tasks):
        return False
    numbers = [value for row in products for value in row]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
        return False
    if any(products[i][i] < 0 for i in indices):
        return False
    norms = [math.sqrt(products[i][i]) for i in indices]
    # A little more, for rounding.
    return all(
        products[i][j] == products[j][i] and abs(products[i][j]) <= 1.001 * norms[i] * norms[j]
        for i in indices
        for j in indices
    )


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    adaptive = config.sharing.adaptive
    return None if adaptive is None else {"layers": list(movable_layers(adaptive, plan, names))}


def _open(setup: ServerSetup) -> AdaptiveSharing | None:
    adaptive = setup.config.sharing.adaptive
    if adaptive is None:
        return None
    layers = movable_layers(adaptive, setup.plan, list(setup.model.canonical()))
    return AdaptiveSharing(adaptive, layers, list(setup.tasks), setup.config.federation.average)


CAPABILITY = Capability(NAME, MeasuredClient, _client_options, _open, check_sent=check_sent)
