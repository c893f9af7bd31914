"""What a client kept under a plan that has changed since: it moves as the server's values do.

Only the new plan is known here. A kept key that this plan gives to nobody is from before: a value that was split leaves
its state to each of its copies, and one that was merged gets the mean of those that went into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmtl.federation.error_feedback import RESIDUAL, RESIDUAL_ROWS
from fedmtl.model.keys import Key, Weights, owner_task
from fedmtl.model.plan import SharingPlan, mean_value, scope_tasks


def follow_plan(
    slots: Mapping[str, Weights], plan: SharingPlan, tasks: Sequence[str], client: str
) -> dict[str, Weights]:
    """The slots of client state under this plan's keys. What a task that rests would have got is dropped.

    So are residuals of token rows that do not fit each other, and what belongs to a value that is fixed now.
    """
    moved = {slot: _follow(values, plan, tasks, client) for slot, values in slots.items()}
    if RESIDUAL in moved:
        rows = moved.get(RESIDUAL_ROWS, {})
        were = {key.name for key in slots.get(RESIDUAL_ROWS, {})}
        moved[RESIDUAL] = {key: value for key, value in moved[RESIDUAL].items() if key.name not in were or key in rows}
    return moved


def _follow(values: Weights, plan: SharingPlan, tasks: Sequence[str], client: str) -> Weights:
    kept = {key: value for key, value in values.items() if _is_current(key, plan, client)}
    old: dict[str, list[Key]] = {}
    for key in values:
        if key not in kept:
            old.setdefault(key.name, []).append(key)
    for name, keys in old.items():
        owners = [task for task in tasks if owner_task(name) in (None, task)]
        for target in dict.fromkeys(plan.key(name, task, client) for task in owners):
            users = [task for task in owners if plan.key(name, task, client) == target]
            origins = [values[key] for key in keys if scope_tasks(plan, key.scope, users)]
            if target in kept or target.scope == "fixed" or not origins:
                continue
            if len({origin.shape for origin in origins}) > 1:
                continue
            mean = mean_value(origins)
            # Row numbers of two tables have no mean.
            if mean.dtype == origins[0].dtype:
                kept[target] = mean
    return kept


def _is_current(key: Key, plan: SharingPlan, client: str) -> bool:
    """Whether the plan still gives this key to some task."""
    kind, _, rest = key.scope.partition(":")
    if kind == "task":
        return plan.key(key.name, rest, client) == key
    if kind == "group":
        members = [task for depth in plan.groups for task, path in depth.items() if path == rest]
        return any(plan.key(key.name, task, client) == key for task in members)
    return plan.key(key.name, "", client) == key
