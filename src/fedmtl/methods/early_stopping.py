"""Early stopping per task: all values that are the task's alone go back to its best round and stay there.

These are its head, its adapters and the layers that no other task shares. What it shares with others goes on moving,
and its clients go on training that through its head; so a stopped task's score may still change, and `--round best`
opens the whole model of its best round. A head that stays at a client stops as it is then: the server has no other.

A task's rounds count from the first one after warm-up in which it trains: before that its head says little, and the
best of those scores is an accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedmtl.capabilities import Capability
from fedmtl.federation.messages import Evaluation, Progress, State
from fedmtl.federation.server_method import ServerMethod, ServerSetup, Step
from fedmtl.runs.events import EarlyStopEvent
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights, owner_task
from fedmtl.tasks.task import Task

NAME = "early_stopping"


class EarlyStopping(ServerMethod):
    """Stops every task that has run out of patience.

    `first_rounds` gives each task's first round that counts. The state's extra has, for every task that may still stop,
    its values as they were in its best round.
    """

    name = NAME
    phase = "plan"

    def __init__(self, tasks: Mapping[str, Task], first_rounds: Mapping[str, int]) -> None:
        self._tasks = {name: task for name, task in tasks.items() if task.patience is not None}
        self.first_rounds = first_rounds

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        events = []
        for name, task in self._tasks.items():
            if state.progress[name].stopped_round is not None:
                continue
            state = self._remember(state, name)
            if _is_due(state.progress[name], task):
                progress = state.progress[name]
                state = _stop(state, name)
                events.append(
                    EarlyStopEvent(
                        round=state.round,
                        task=name,
                        best_round=progress.best_round,
                        score=progress.best_score,
                        stop_score=progress.scores[-1][1],
                    )
                )
        return Step(state, tuple(events))

    def _remember(self, state: State, task: str) -> State:
        """The state with the task's values of a best round; a round that does not count is none."""
        progress = state.progress[task]
        if state.round < self.first_rounds[task]:
            fresh = replace(progress, best_round=None, best_score=None)
            return replace(state, progress={**state.progress, task: fresh})
        if progress.best_round != state.round:
            return state
        values = {key: value for key, value in state.weights.items() if _belongs(key, task)}
        return _with_best(state, task, values)

    def check(self, extra: Extra) -> None:
        if extra.values or not set(extra.tensors) <= set(self._tasks):
            raise ValueError("early stopping has the best values of tasks with patience alone")


def _belongs(key: Key, task: str) -> bool:
    """Whether the server's value is of one task alone."""
    return key.scope == f"task:{task}" or owner_task(key.name) == task


def _with_best(state: State, task: str, values: Weights) -> State:
    known = state.extra.get(NAME, NO_EXTRA).tensors
    tensors = {name: found for name, found in known.items() if name != task} | ({task: values} if values else {})
    return state.with_extra(NAME, Extra(tensors=tensors))


def _is_due(progress: Progress, task: Task) -> bool:
    if progress.best_round is None:
        return False
    since = [round_number for round_number, _ in progress.scores if round_number > progress.best_round]
    return len(since) >= (task.patience or 0)


def _stop(state: State, task: str) -> State:
    best = state.extra.get(NAME, NO_EXTRA).slot(task)
    state = _with_best(state, task, {})
    plan = replace(state.plan, stopped=(*state.plan.stopped, task))
    # A layer that was the task's in its best round may be shared since then.
    restored = {key: value for key, value in best.items() if key in state.weights and _belongs(key, task)}

    def moving(values: Mapping[Key, Tensor]) -> Weights:
        return {key: value for key, value in values.items() if plan.trains(key)}

    return replace(
        state,
        plan=plan,
        weights={**state.weights, **restored},
        extra={name: extra.changed(moving) for name, extra in state.extra.items()},
        progress={**state.progress, task: replace(state.progress[task], stopped_round=state.round)},
    )


def _open(setup: ServerSetup) -> EarlyStopping | None:
    if all(task.patience is None for task in setup.tasks.values()):
        return None
    after_warmup = int(setup.config.training.warmup_rounds) + 1
    configured = setup.config.tasks
    first = {name: max(after_warmup, configured[name].from_round) for name in setup.tasks}
    return EarlyStopping(setup.tasks, first)


CAPABILITY = Capability(NAME, server=_open)
