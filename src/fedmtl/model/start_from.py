"""A run that starts with the values of a finished one, encoder and heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError
from fedmtl.model.keys import Weights, owner_task
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.model.plan import SharingPlan, move
from fedmtl.model.saved import load_weights, model_folder, read_model_record
from fedmtl.tasks.task import Task, read_tasks

START = "model.start_from"


def start_weights(config: ModelConfig, fresh: Weights, plan: SharingPlan, model: MultiTaskModel) -> Weights:
    """The values that a run with this plan starts with: `fresh` ones, or those of `model.start_from`.

    A value that was shared more widely is copied, one that was shared less is the mean of those there were. Tasks that
    only the finished model has are left out. Any other difference is a ConfigError that names the first one.
    """
    if config.start_from is None:
        return fresh
    given = Path(config.start_from)
    folder = model_folder(given, START)
    record = read_model_record(folder)
    tasks = model.tasks
    _check_tasks(given, read_tasks(record.tasks, str(folder / "tasks.json"), ConfigError), tasks)
    if any(plan.level(name) == "client" for name in model.canonical()):
        raise ConfigError(
            f"{START}: the sharing plan keeps values at the clients, which a finished model does not reach;"
            " take another plan, or start from server_model"
        )
    found = load_weights(folder, record)
    own = {key: value for key, value in found.items() if owner_task(key.name) in (None, *tasks)}
    _check_names(given, {key.name: tuple(value.shape) for key, value in own.items()}, fresh)
    moved = move(own, record.plan.to_plan(), plan, list(tasks))
    return {key: moved[key] for key in fresh}


def _check_tasks(given: Path, saved: Mapping[str, Task], tasks: Mapping[str, Task]) -> None:
    for name, task in tasks.items():
        if name not in saved:
            raise ConfigError(f"{START}: {given} has no task {name}, it has {', '.join(saved)}; leave {name} out")
        labels = list(saved[name].labels)
        if labels != list(task.labels):
            raise ConfigError(
                f"{START}: {name} has the labels {labels} in {given} and {list(task.labels)} here;"
                " both must have the same, in the same order"
            )


def _check_names(given: Path, saved: Mapping[str, tuple[int, ...]], fresh: Weights) -> None:
    shapes = {key.name: tuple(value.shape) for key, value in fresh.items()}
    for name in (*shapes, *saved):
        ours, theirs = shapes.get(name), saved.get(name)
        if ours != theirs:
            raise ConfigError(
                f"{START}: `{name}` is {theirs or 'not there'} in {given} and {ours or 'not there'} here;"
                " write the model section that it was trained with"
            )
