"""A sharing plan that changes between rounds: layers in which tasks pull apart split, those in which they agree merge.

A layer's level may go from `all` over the groups to `task` and back. Two tasks that share it and disagree call for a
split, to the coarsest level at which no two that disagree share. Tasks that agree call for a merge. Splits begin at the
top and merges at the bottom, so that the layers below the first that is split are one pass for all tasks; one layer
moves in a round, as every move changes what the others are to be measured by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations

from fedmtl.config import AdaptiveSharingConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.agreement import Agreement, pair_name
from fedmtl.federation.messages import LayerDecision, LayerTrack, State
from fedmtl.sharing.keys import Weights, layer_of, owner_task
from fedmtl.sharing.plan import SharingPlan, group_depth, move

Layers = Mapping[str, tuple[str, ...]]


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
    for layer, own in layers.items():
        # Under LoRA a layer's weights are fixed; what trains in it may move.
        moving = [name for name in own if plan.level(name) != "fixed"] or own
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
        """The coarsest level at which all pairs that would come to share are known to agree."""
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
    tracks = {
        layer: _follow(state.sharing.get(layer, LayerTrack()), agreement.get(layer, {}), levels[layer], rule, state)
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
    return replace(state, sharing=tracks), decisions


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
    place, level = order.index(layer), levels[layer]
    if track.low:
        target = rule.split(level, track.agreement)
        stuck = target is not None and any(rule.is_finer(target, levels[above]) for above in order[place + 1 :])
        return target, "above" if stuck else None
    target = rule.merge(level, track.agreement)
    stuck = target is not None and any(rule.is_finer(levels[below], target) for below in order[:place])
    return target, "below" if stuck else None


def _moved(state: State, layer: str, names: Sequence[str], level: str, tasks: Sequence[str]) -> State:
    """The state with one layer at another level: its weights and optimizer state are copied or averaged."""
    is_partly_fixed = any(key.scope == "fixed" and layer_of(key.name) == layer for key in state.weights)
    plan = state.plan
    for pattern in names if is_partly_fixed else (f"{layer}.*",):
        plan = plan.with_rule(pattern, level)

    def carry(values: Weights, *, partial: bool) -> Weights:
        own = {key: value for key, value in values.items() if key.name in names}
        rest = {key: value for key, value in values.items() if key.name not in names}
        return {**rest, **move(own, state.plan, plan, tasks, partial=partial)}

    return replace(
        state,
        plan=plan,
        weights=carry(state.weights, partial=False),
        # A value that nobody returned yet has no state to carry.
        server_optimizer={slot: carry(dict(own), partial=True) for slot, own in state.server_optimizer.items()},
    )
