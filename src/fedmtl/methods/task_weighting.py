"""Task weights that follow validation: dynamic weight averaging of Liu et al. 2019, End-to-End Multi-Task Learning.

Where we differ: the paper compares training losses of two epochs. Here it is the validation error, 1 minus the main
metric, of the last two rounds that were scored, as that is what every task has on one scale. An error below `floor`
counts as `floor`, so a task that is nearly solved does not swing, and a ratio over MOST counts as MOST.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedmtl.capabilities import Capability
from fedmtl.config import TaskWeightingConfig
from fedmtl.federation.messages import ClientId, ClientInfo, Progress, State
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup
from fedmtl.runs.events import TaskWeightsEvent

NAME = "task_weighting"
MOST = 2.0


class TaskWeighting(ServerMethod):
    """Multiplies task weights by what follows from the tasks' progress; `weights` are those of the config."""

    name = NAME

    def __init__(self, settings: TaskWeightingConfig, weights: Mapping[str, float]) -> None:
        self._settings, self._weights = settings, weights

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        factors = progress_factors(self._settings, state.progress)
        weights = {task: weight * factors.get(task, 1.0) for task, weight in self._weights.items()}
        return RoundSettings(factors, events=(TaskWeightsEvent(round=state.round + 1, weights=dict(weights)),))


def progress_factors(settings: TaskWeightingConfig, progress: Mapping[str, Progress]) -> dict[str, float]:
    """What each task's weight is multiplied by in the next round; a task that was scored less than twice counts 1.

    The factors of the others have the mean 1, and none is over exp(MOST / temperature) times another.
    """
    ratios = {task: _ratio(task_progress, settings.floor) for task, task_progress in progress.items()}
    known = {task: math.exp(ratio / settings.temperature) for task, ratio in ratios.items() if ratio is not None}
    total = sum(known.values())
    return {task: len(known) * known[task] / total if task in known else 1.0 for task in progress}


def _ratio(progress: Progress, floor: float) -> float | None:
    """The last error over the one before: under 1 where the task got better."""
    errors = [max(1.0 - score, floor) for _, score in progress.scores if score is not None]
    return min(errors[-1] / errors[-2], MOST) if len(errors) > 1 else None


def _open(setup: ServerSetup) -> TaskWeighting | None:
    settings = setup.config.federation.task_weighting
    if settings.kind == "fixed":
        return None
    return TaskWeighting(settings, {name: task.weight for name, task in setup.tasks.items()})


CAPABILITY = Capability(NAME, server=_open)
