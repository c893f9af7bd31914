"""Which rule combines the updates of which scope: `federation.aggregation.scopes`.

Each rule sees of every update what it is to combine, and nothing else. What a rule remembers is split by scope as well:
a value whose scope has come under another rule, because its layer was moved, starts there without a past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from fedmtl.config import AggregationConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.aggregators.within_tasks import FEWEST
from fedmtl.federation.messages import ClientInfo, Update
from fedmtl.runs.events import AggregationEvent, ScopeRule
from fedmtl.sharing.plan import Extra, Key, SharingPlan, Weights

MakeRule = Callable[[Weights, Extra], Aggregator]


@dataclass(frozen=True)
class ByScope:
    """Makes the rule of a round from rules by pattern; the last pattern is `*`, the rule of all other scopes."""

    rules: Sequence[tuple[str, MakeRule]]

    def __call__(self, before: Weights, extra: Extra) -> Aggregator:
        return _RulesOfScopes(self, before, extra)

    def number(self, scope: str) -> int:
        """The position of the rule that a scope is combined by."""
        return next(number for number, (pattern, _) in enumerate(self.rules) if fnmatchcase(scope, pattern))

    def part(self, extra: Extra, number: int) -> Extra:
        """What one of the rules remembered, of the scopes that are its own now."""
        prefix = f"{number}."
        tensors = {
            slot.removeprefix(prefix): {key: value for key, value in values.items() if self.number(key.scope) == number}
            for slot, values in extra.tensors.items()
            if slot.startswith(prefix)
        }
        return Extra(extra.values.get(str(number), {}), {slot: values for slot, values in tensors.items() if values})

    def check(self, extra: Extra) -> None:
        """Raise unless every rule could have remembered its part."""
        known = [str(number) for number in range(len(self.rules))]
        if set(extra.values) - set(known) or any(slot.partition(".")[0] not in known for slot in extra.tensors):
            raise ValueError("it is of other rules")
        for number, (_, rule) in enumerate(self.rules):
            check_of(rule)(self.part(extra, number))


class _RulesOfScopes:
    def __init__(self, by_scope: ByScope, before: Weights, extra: Extra) -> None:
        self._by_scope = by_scope
        self._rules = [rule(before, by_scope.part(extra, number)) for number, (_, rule) in enumerate(by_scope.rules)]

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        keys: dict[int, list[Key]] = {}
        for key in update.delta:
            keys.setdefault(self._by_scope.number(key.scope), []).append(key)
        for number, of_rule in keys.items():
            self._rules[number].add(replace(update, delta=_Part(update.delta, of_rule)), weights)

    def result(self) -> Weights:
        return {key: value for rule in self._rules for key, value in rule.result().items()}

    def remember(self) -> Extra:
        values: dict[str, Any] = {}
        tensors: dict[str, Mapping[Key, Tensor]] = {}
        for number, rule in enumerate(self._rules):
            extra = rule.remember()
            if extra.values:
                values[str(number)] = extra.values
            tensors |= {f"{number}.{slot}": found for slot, found in extra.tensors.items()}
        return Extra(values, tensors)


class _Part(Mapping[Key, Tensor]):
    """Some values of a delta; like the whole, each is decoded when it is looked at."""

    def __init__(self, whole: Mapping[Key, Tensor], keys: Sequence[Key]) -> None:
        self._whole, self._keys = whole, dict.fromkeys(keys)

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self._whole[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


def check_of(rule: Callable[..., Aggregator]) -> Callable[[Extra], None]:
    """What raises where an extra is not one that the rule remembered; a rule without a check remembers nothing."""
    # A rule with options is a partial of its class.
    found: Callable[[Extra], None] = getattr(getattr(rule, "func", rule), "check", _no_state)
    return found


def _no_state(extra: Extra) -> None:
    if extra:
        raise ValueError("this rule remembers nothing")


def check_patterns(aggregation: AggregationConfig, scopes: Sequence[str]) -> None:
    """Raise a ConfigError for a pattern that no scope is left for; `scopes` are all that a server may ever combine."""
    left = list(scopes)
    for pattern in aggregation.scopes:
        matched = [scope for scope in left if fnmatchcase(scope, pattern)]
        if not matched:
            first = any(fnmatchcase(scope, pattern) for scope in scopes)
            why = "a pattern before it takes them all" if first else f"there are {', '.join(scopes) or 'none'}"
            raise ConfigError(f"federation.aggregation.scopes: `{pattern}` matches no scope that is combined; {why}")
        left = [scope for scope in left if scope not in matched]


def combined_scopes(plan: SharingPlan, names: Sequence[str], tasks: Sequence[str], moves: bool) -> list[str]:
    """The scopes that a server combines under a plan; those that layers may come under too where a plan `moves`."""
    views = plan.keys(names, tasks, "").values()
    found = dict.fromkeys(key.scope for view in views for key in view.values())
    if moves:
        found |= dict.fromkeys(f"group:{path}" for depth in plan.groups for path in depth.values())
    return [scope for scope in found if scope != "fixed" and not scope.startswith("client:")]


def aggregation_event(
    aggregation: AggregationConfig, plan: SharingPlan, names: Sequence[str], clients: Mapping[str, ClientInfo]
) -> AggregationEvent:
    """What combines each scope, over how many clients, and where a rule that is no mean has too few of them."""
    scopes: dict[tuple[str, ...], list[str]] = {}
    counts: dict[str, int] = {}
    for info in clients.values():
        tasks = tuple(info.num_examples)
        if tasks not in scopes:
            scopes[tasks] = combined_scopes(plan, names, tasks, moves=False)
        for scope in scopes[tasks]:
            counts[scope] = counts.get(scope, 0) + 1
    # Sites come in any order.
    counts = dict(sorted(counts.items()))
    rules = {scope: aggregation.rule_of(scope) for scope in counts}
    helpless = [scope for scope, count in counts.items() if count < FEWEST and rules[scope] != "mean"]
    return AggregationEvent(
        round=0,
        scopes={scope: ScopeRule(rule=rules[scope], clients=count) for scope, count in counts.items()},
        helpless=helpless,
    )
