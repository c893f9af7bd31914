"""Early stopping per task: its head is fixed at its best round, its sites go on training the encoder through it.

Adapters are fixed with the head they were trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedmtl.federation.messages import Evaluation, Progress, State
from fedmtl.sharing.keys import ADAPTERS, HEADS, owner_task
from fedmtl.sharing.plan import move
from fedmtl.tasks.task import Task


def follow(state: State, tasks: Mapping[str, Task], evaluation: Evaluation) -> tuple[State, tuple[str, ...]]:
    """The state with every task's progress, and heads fixed of those that ran out of patience just now."""
    progress = {
        name: _advance(state, task, state.progress.get(name, Progress()), evaluation) for name, task in tasks.items()
    }
    state = replace(state, progress=progress, best_overall=_best_overall(state, evaluation))
    stopped = tuple(name for name, task in tasks.items() if _is_due(progress[name], task))
    for name in stopped:
        state = _fix_head(state, name, list(tasks))
    return state, stopped


def _advance(state: State, task: Task, progress: Progress, evaluation: Evaluation) -> Progress:
    score = evaluation.scores[task.name].metrics.get(task.metric) if task.name in evaluation.scores else None
    progress = replace(progress, scores=(*progress.scores, (state.round, score)))
    if progress.stopped_round is not None or score is None:
        return progress
    if progress.best_score is not None and score <= progress.best_score:
        return progress
    head = {}
    if task.patience is not None:
        head = {key: value for key, value in state.weights.items() if owner_task(key.name) == task.name}
    return replace(progress, best_round=state.round, best_score=score, best_head=head)


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
    slots = {
        slot: {key: value for key, value in values.items() if owner_task(key.name) != task}
        for slot, values in state.server_optimizer.items()
    }
    stopped = replace(progress, stopped_round=state.round, best_head={})
    return replace(
        state,
        plan=plan,
        weights=weights,
        server_optimizer=slots,
        progress={**state.progress, task: stopped},
    )


def _best_overall(state: State, evaluation: Evaluation) -> tuple[int, float] | None:
    best = state.best_overall
    if evaluation.overall is None or (best is not None and evaluation.overall <= best[1]):
        return best
    return state.round, evaluation.overall
