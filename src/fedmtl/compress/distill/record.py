"""What a distillation writes: its events, and how far it is.

The events are those of docs/run-folder.md, with a pass where a run has a round. The checkpoint is one file that is
written whole or not at all, after every pass.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fedmtl import __version__
from fedmtl.compress.distill.loop import Passed, Slots
from fedmtl.compress.distill.student import Student
from fedmtl.config import Config
from fedmtl.errors import FedmtlError
from fedmtl.model.tensor_files import SEPARATOR
from fedmtl.runs.events import Averages, DataEvent, EvaluationEvent, PlanEvent, RoundEvent, StartEvent
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.sharing.plan import HEADS, Key, Weights, owner_task
from fedmtl.sharing.weights import count_parameters, count_trainable, layer_counts, scope_counts
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.metrics import Sums, averages, evaluation_event, score
from fedmtl.tasks.task import Task, task_facts


def start_event(
    config: Config, student: Student, data: Mapping[str, TaskData], device: str, num_rounds: int
) -> StartEvent:
    return StartEvent(
        version=__version__,
        mode="distilled",
        seed=config.seed,
        synthetic=any(part.synthetic for part in data.values()),
        encoder=student.encoder.name,
        tasks={name: task_facts(task, student.model.pools[name]) for name, task in student.model.tasks.items()},
        device=device,
        workers=0,
        num_rounds=num_rounds,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def data_event(part: TaskData, num_train: int, num_added: int, truncated: int) -> DataEvent:
    return DataEvent(
        task=part.task.name,
        source=part.origin,
        train=num_train,
        augmented=num_added,
        validation=len(part.validation),
        truncated=truncated,
        validation_cut=part.validation_cut,
    )


def plan_event(student: Student, weights: Weights) -> PlanEvent:
    heads: dict[str, int] = {}
    for name, (module, leaf) in student.model.canonical().items():
        task = owner_task(name)
        if task is not None and name.startswith(HEADS):
            heads[task] = heads.get(task, 0) + getattr(module, leaf).numel()
    return PlanEvent(
        rules=[list(rule) for rule in student.plan.rules],
        scopes=scope_counts(weights),
        layers=layer_counts(student.model, student.plan),
        heads=heads,
        total=count_parameters(weights),
        trainable=count_trainable(weights),
        at_clients=0,
    )


def evaluation_events(number: int, tasks: Mapping[str, Task], sums: Mapping[str, Sums]) -> list[EvaluationEvent]:
    return [evaluation_event(number, tasks[name], task_sums) for name, task_sums in sums.items()]


def round_event(
    number: int, stage: str, passed: Passed, tasks: Mapping[str, Task], sums: Mapping[str, Sums], seconds: float
) -> RoundEvent:
    """A pass; averages are there where it was scored."""
    scores = {name: score(tasks[name], task_sums) for name, task_sums in sums.items()}
    overall, classification = averages(list(tasks.values()), scores) if scores else (None, None)
    return RoundEvent(
        round=number,
        stage=stage,
        clients=0,
        failures=0,
        losses=dict(passed.losses),
        seen=dict(passed.seen),
        samples=sum(passed.seen.values()),
        averages=Averages(overall=overall, classification=classification) if scores else None,
        seconds=seconds,
        bytes_up=0,
        bytes_down=0,
    )


def main_metrics(tasks: Mapping[str, Task], sums: Mapping[str, Sums]) -> dict[str, float | None]:
    """Each task's main metric."""
    return {name: score(task, sums[name]).metrics[task.metric] for name, task in tasks.items()}


@dataclass(frozen=True)
class Position:
    """After `epoch` passes of `stage`: all values, the masks of pruned ones, and the optimizer's state for the next."""

    stage: str = ""
    epoch: int = 0
    weights: Weights = field(default_factory=dict)
    optimizer: Slots = field(default_factory=dict)
    masks: Mapping[Key, Tensor] = field(default_factory=dict)


def checkpoint_path(run: RunFolder) -> Path:
    return run.checkpoints / "distill.pt"


def save_position(run: RunFolder, fingerprint: str, position: Position) -> None:
    data = io.BytesIO()
    named = {
        name: {SEPARATOR.join(key): value for key, value in values.items()}
        for name, values in (("weights", position.weights), ("masks", position.masks))
    }
    content = {**vars(position), **named, "fingerprint": fingerprint}
    torch.save(content, data)
    write_atomic(checkpoint_path(run), data.getvalue())


def load_position(run: RunFolder, fingerprint: str) -> Position:
    """Load the last saved position; one of other settings is an error, and a run without one begins anew."""
    path = checkpoint_path(run)
    if not path.exists():
        return Position()
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = content.pop("fingerprint")
        weights, masks = (
            {Key(*name.split(SEPARATOR, 1)): value for name, value in content.pop(part, {}).items()}
            for part in ("weights", "masks")
        )
        position = Position(**content, weights=weights, masks=masks)
        is_ours = isinstance(position.stage, str) and type(position.epoch) is int and position.epoch >= 0
        is_ours &= all(isinstance(value, Tensor) for value in (*weights.values(), *masks.values()))
        is_ours &= type(position.optimizer) is dict
    except Exception as error:  # torch raises many kinds for a file that it did not write
        raise FedmtlError(
            f"{path}: cannot be read as a checkpoint; delete the run and start without --resume"
        ) from error
    if not is_ours:
        raise FedmtlError(f"{path}: cannot be read as a checkpoint; delete the run and start without --resume")
    if found != fingerprint:
        raise FedmtlError(
            f"{run.name}: was begun with another teacher or other settings; give the same, or another --name"
        )
    return position
