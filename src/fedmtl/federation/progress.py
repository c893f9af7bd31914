"""How far every task has come: its main metric by round, its best round, and the best round over all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedmtl.federation.messages import Evaluation, Progress, State
from fedmtl.sharing.keys import owner_task
from fedmtl.tasks.task import Task


def follow(state: State, tasks: Mapping[str, Task], evaluation: Evaluation) -> State:
    """The state with every task's progress after an evaluation."""
    progress = {
        name: _advance(state, task, state.progress.get(name, Progress()), evaluation) for name, task in tasks.items()
    }
    return replace(state, progress=progress, best_overall=_best_overall(state, evaluation))


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


def _best_overall(state: State, evaluation: Evaluation) -> tuple[int, float] | None:
    best = state.best_overall
    if evaluation.overall is None or (best is not None and evaluation.overall <= best[1]):
        return best
    return state.round, evaluation.overall
