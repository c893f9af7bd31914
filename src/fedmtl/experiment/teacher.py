"""A finished model that others learn from, and what it says of their texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.model.binding import BoundModel
from fedmtl.model.multitask import num_outputs
from fedmtl.model.saved import SavedModel, load_model, model_digest, model_folder
from fedmtl.runs.event_lines import Observer
from fedmtl.runs.events import TeacherEvent
from fedmtl.tasks.batches import Shard, save_outputs
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import token_cache, tokenize
from fedmtl.training.predict import predict

TEACHER = "training.distillation.teacher"


class Teacher:
    """Outputs of a finished model in the form of a student's own, kept beside the tokens and computed once.

    It has its own tokenizer, length and way with pairs; only texts and the meaning of labels are in common.
    """

    def __init__(
        self,
        saved: SavedModel,
        digest: str,
        tasks: tuple[str, ...],
        cache: Path,
        device: torch.device,
        observe: Observer,
    ) -> None:
        self.tasks = tasks
        self._saved, self._digest, self._cache, self._device, self._observe = saved, digest, cache, device, observe
        self._bound: BoundModel | None = None

    def outputs(self, task: Task, texts: tuple[list[str], ...]) -> Path | None:
        """The file of its outputs for these texts, one row each; None for a task it does not teach."""
        if task.name not in self.tasks:
            return None
        own = self._saved.tasks[task.name]
        tokens, _ = tokenize(own, texts, self._saved.encoder.tokenizer, self._saved.max_length, self._cache)
        path = tokens.with_name(f"{tokens.name}-{self._digest}-{task.name}-{num_outputs(task)}.npy")
        if not path.exists():
            count = len(texts[0])
            self._observe(TeacherEvent(task=task.name, examples=count))
            kind = np.float32 if own.is_regression else np.int64
            shard = Shard(tokens, np.zeros(count, dtype=kind), np.arange(count, dtype=np.int64))
            found, _ = predict(self._model(), task.name, shard, 64, self._device)
            save_outputs(path, in_form_of(task, own, found))
        return path

    def _model(self) -> BoundModel:
        if self._bound is None:
            saved = self._saved
            saved.model.to(self._device)
            self._bound = BoundModel(
                saved.model, saved.plan, self.tasks, "", saved.weights, device=self._device, read=True
            )
        return self._bound


def open_teacher(
    config: Config, where: str, tasks: Mapping[str, Task], device: str, observe: Observer = lambda event: None
) -> Teacher | None:
    """The config's teacher, checked against the tasks at hand; None where nobody is taught."""
    told = config.training.distillation
    if told is None or told.where != where:
        return None
    given = Path(told.teacher)
    folder = model_folder(given, TEACHER)
    saved = load_model(folder)
    taught = tuple(name for name in tasks if told.tasks is None or name in told.tasks)
    for name in taught:
        _check(tasks[name], saved, given)
    return Teacher(saved, model_digest(folder, saved), taught, token_cache(config.data), torch.device(device), observe)


def in_form_of(student: Task, teacher: Task, outputs: np.ndarray) -> np.ndarray:
    """The same answers with as many outputs as the student has: one logit is the difference of two."""
    if num_outputs(student) == num_outputs(teacher):
        return outputs
    if num_outputs(student) == 1:
        return np.diff(outputs, axis=1)
    return np.concatenate([np.zeros_like(outputs), outputs], axis=1)


def _check(task: Task, saved: SavedModel, given: Path) -> None:
    """Raise a ConfigError where the teacher does not answer what the task asks."""
    name = task.name
    if name not in saved.tasks:
        raise ConfigError(
            f"{TEACHER}: {given} has no task {name}, it has {', '.join(saved.tasks)};"
            " name those it teaches in training.distillation.tasks"
        )
    own = saved.tasks[name]
    for words, ours, theirs in (
        ("kind", task.kind, own.kind),
        ("labels", task.labels, own.labels),
        ("score range", task.score_range, own.score_range),
        ("number of texts", len(task.text), len(own.text)),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{TEACHER}: {name} has the {words} {_words(theirs)} in {given} and {_words(ours)} here;"
                " both must have the same, in the same order"
            )
    missing = saved.missing([name])
    if missing is not None:
        raise ConfigError(f"{TEACHER}: in {given} `{missing}` stayed at the clients; take a model that is whole")


def _words(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
