"""Early stopping per task: its head is fixed at its best round, and its clients go on training the encoder through it.

Adapters are fixed with the head they were trained with. Which round was a task's best is followed by the core
(`federation/server.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.federation.messages import Evaluation, Progress, State
from fedmtl.federation.server_method import ServerMethod, ServerSetup, Step
from fedmtl.runs.events import EarlyStopEvent
from fedmtl.sharing.plan import ADAPTERS, HEADS, Key, Weights, move, owner_task
from fedmtl.tasks.task import Task

NAME = "early_stopping"


class EarlyStopping(ServerMethod):
    """Fixes the head of every task that has run out of patience."""

    name = NAME
    phase = "plan"

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        due = [name for name, task in self._tasks.items() if _is_due(state.progress[name], task)]
        for name in due:
            state = _fix_head(state, name, list(self._tasks))
        events = [
            EarlyStopEvent(
                round=state.round,
                task=name,
                best_round=state.progress[name].best_round,
                score=state.progress[name].best_score,
            )
            for name in due
        ]
        return Step(state, tuple(events))


def _is_due(progress: Progress, task: Task) -> bool:
    if task.patience is None or progress.stopped_round is not None or progress.best_round is None:
        return False
    since = [round_number for round_number, _ in progress.scores if round_number > progress.best_round]
    return len(since) >= task.patience


def _fix_head(state: State, task: str, tasks: Sequence[str]) -> State:
    plan = state.plan.with_rule(f"{HEADS}{task}.*", "fixed")
    if any(key.name.startswith(f"{ADAPTERS}{task}.") for key in state.weights):
        plan = plan.with_rule(f"{ADAPTERS}{task}.*", "fixed")
    progress = state.progress[task]
    weights = move({**state.weights, **progress.best_head}, state.plan, plan, tasks)

    def others(values: Mapping[Key, Tensor]) -> Weights:
        return {key: value for key, value in values.items() if owner_task(key.name) != task}

    stopped = replace(progress, stopped_round=state.round, best_head={})
    return replace(
        state,
        plan=plan,
        weights=weights,
        extra={name: extra.changed(others) for name, extra in state.extra.items()},
        progress={**state.progress, task: stopped},
    )


def _open(setup: ServerSetup) -> EarlyStopping | None:
    return EarlyStopping(setup.tasks) if any(task.patience is not None for task in setup.tasks.values()) else None


CAPABILITY = Capability(NAME, server=_open)
