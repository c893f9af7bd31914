"""A finished model as teacher while a federation trains: knowledge distillation (Hinton et al. 2015).

Clients learn what the teacher says of their examples, or the server has the averaged model learn from it on texts
without labels after every round: ensemble distillation (Lin et al. 2020) with a finished model for the ensemble.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.capabilities import Capability, constraints, local_methods
from fedmtl.config import Config, DistillationConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import State
from fedmtl.federation.server_method import ServerMethod, ServerSetup, Step
from fedmtl.model.encoder import Encoder
from fedmtl.model.multitask import BoundModel, Buffers, MultiTaskModel
from fedmtl.model.saved import SavedModel, load_model, model_digest, model_folder
from fedmtl.runs.event_lines import Observer
from fedmtl.runs.events import DistillationEvent, TeacherEvent
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Extra, SharingPlan
from fedmtl.tasks.batches import Shard, save_outputs
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.sources import read_texts
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import token_cache, tokenize
from fedmtl.timing import timed
from fedmtl.training.distillation import outputs_loss
from fedmtl.training.local import predict, train
from fedmtl.training.local_method import LocalClient, LocalMethod, LocalMethods, LocalSettings, LocalStep, with_methods

NAME = "distillation"
TEACHER, TEXTS = "training.distillation.teacher", "training.distillation.texts"


class Distilled(LocalMethod):
    """Has the outputs of some tasks resemble a teacher's, which lie beside the tokens, instead of the labels alone."""

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._weight, self._temperature = float(options["weight"]), options["temperature"]
        self._tasks = frozenset(options["tasks"])
        self._client: LocalClient | None = None

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._client = client

    def fit(self, step: LocalStep, outputs: Tensor) -> Tensor | None:
        if step.task not in self._tasks:
            return None
        assert self._client is not None
        answers = torch.from_numpy(self._client.shards[step.task].teacher_outputs(step.batch)).to(self._client.device)
        resembling = outputs_loss(self._client.bound.model.tasks[step.task], answers, outputs, self._temperature)
        if self._weight == 1.0:
            return resembling
        return (1.0 - self._weight) * step.labelled(outputs) + self._weight * resembling


def options_of(weight: float, temperature: float, tasks: Sequence[str]) -> dict[str, Any]:
    """What a client must know of its teacher: how its outputs count, and for which tasks."""
    return {"weight": weight, "temperature": temperature, "tasks": list(tasks)}


class ServerDistillation(ServerMethod):
    """Trains a state's weights towards the teacher; what comes out follows from the state and the seed alone."""

    name = NAME

    def __init__(
        self,
        model: MultiTaskModel,
        shards: Mapping[str, Shard],
        settings: LocalSettings,
        seed: int,
        device: torch.device,
    ) -> None:
        self._model, self._shards, self._settings, self._seed, self._device = model, shards, settings, seed, device
        self._buffers = Buffers()

    @timed("teaching", whole=True)
    def after_aggregation(self, before: State, after: State) -> Step:
        started = time.perf_counter()
        state, losses, steps = self._train(after)
        seconds = time.perf_counter() - started
        return Step(state, (DistillationEvent(round=state.round, losses=dict(losses), steps=steps, seconds=seconds),))

    def _train(self, state: State) -> tuple[State, dict[str, float], int]:
        going = {
            name: shard
            for name, shard in self._shards.items()
            if name not in state.progress or state.progress[name].stopped_round is None
        }
        if not going:
            return state, {}, 0
        self._model.to(self._device)
        bound = BoundModel(
            self._model, state.plan, list(going), "", state.weights, device=self._device, buffers=self._buffers
        )
        trained = train(
            bound,
            going,
            self._settings,
            round_number=state.round,
            seed=derive_seed(self._seed, "server_distillation", state.round),
            device=self._device,
            # What other methods hold the weights to at clients holds here too.
            methods=LocalMethods(local_methods(self._settings.methods), state.extra),
        )
        moved = {key: value.cpu().clone() for key, value in bound.weights().items() if key in bound.flat.spans}
        return replace(state, weights={**state.weights, **moved}), trained.losses, trained.steps


def _open(setup: ServerSetup) -> ServerDistillation | None:
    """What the server does after a round's mean; None where it has no teacher."""
    config, model = setup.config, setup.model
    distillation = config.training.distillation
    teacher = open_teacher(config, "server", model.tasks, setup.device, setup.observe)
    if distillation is None or teacher is None:
        return None
    if any(setup.plan.level(name) == "client" for name in model.canonical()):
        raise ConfigError(
            "training.distillation.where: found server, but the sharing plan keeps values at the clients;"
            " write `clients`"
        )
    texts = distillation.texts
    shards = {name: _shard(config, model.tasks[name], texts, teacher, setup.encoder) for name in teacher.tasks}
    settings = _settings(distillation, setup.settings, shards)
    return ServerDistillation(model, shards, settings, config.seed, torch.device(setup.device))


def _settings(distillation: DistillationConfig, settings: LocalSettings, shards: Mapping[str, Shard]) -> LocalSettings:
    """The clients' settings for so many batches of the teacher's outputs alone, with the clients' constraints."""
    rate = distillation.learning_rate
    return replace(
        with_methods(
            settings, {**constraints(settings.methods), NAME: options_of(1.0, distillation.temperature, list(shards))}
        ),
        steps=distillation.steps,
        learning_rates={name: rate or settings.learning_rates[name] for name in shards},
        keep_optimizer=False,
        task_schedule="even",
    )


def _shard(config: Config, task: Task, files: list[str], teacher: Teacher, encoder: Encoder) -> Shard:
    """All texts that the files have for a task, each set once; labels are not known and not read."""
    found = [rows for file in files if (rows := read_texts(Path(file), task.text)) is not None]
    texts = tuple([text for rows in found for text in rows[number]] for number in range(len(task.text)))
    if not texts[0]:
        kind = "pairs of texts" if task.is_pair else "texts"
        raise ConfigError(
            f"{TEXTS}: no file has {kind} for {task.name} ({', '.join(task.text)}); add one,"
            " or name other tasks in training.distillation.tasks"
        )
    tokens, _ = tokenize(task, texts, encoder.tokenizer, config.model.max_length, token_cache(config.data))
    labels = task.kind_of.blank_labels(len(texts[0]))
    return Shard(tokens, labels, np.arange(len(labels), dtype=np.int64), teacher.outputs(task, texts))


class Teacher:
    """Computes a finished model's outputs once, in the form of a student's, and saves them beside the tokens.

    It has another tokenizer, length and way with pairs; only texts and the meaning of labels are in common.
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
        teacher_task = self._saved.tasks[task.name]
        tokens, _ = tokenize(teacher_task, texts, self._saved.encoder.tokenizer, self._saved.max_length, self._cache)
        path = tokens.with_name(f"{tokens.name}-{self._digest}-{task.name}-{task.kind_of.num_outputs(task)}.npy")
        if not path.exists():
            count = len(texts[0])
            self._observe(TeacherEvent(task=task.name, examples=count))
            shard = Shard(tokens, teacher_task.kind_of.blank_labels(count), np.arange(count, dtype=np.int64))
            found, _ = predict(self._model(), task.name, shard, 64, self._device)
            rows = found.values if isinstance(found, Sequences) else found
            save_outputs(path, task.kind_of.in_form_of(task, teacher_task, rows))
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
    """The config's teacher, checked against the tasks at hand; None where there is no teacher."""
    distillation = config.training.distillation
    if distillation is None or distillation.where != where:
        return None
    given = Path(distillation.teacher)
    folder = model_folder(given, TEACHER)
    saved = load_model(folder)
    names = tuple(name for name in tasks if distillation.tasks is None or name in distillation.tasks)
    for name in names:
        _check(tasks[name], saved, given)
    return Teacher(saved, model_digest(folder, saved), names, token_cache(config.data), torch.device(device), observe)


def _check(task: Task, saved: SavedModel, given: Path) -> None:
    """Raise a ConfigError where the teacher does not answer what the task asks."""
    name = task.name
    if name not in saved.tasks:
        raise ConfigError(
            f"{TEACHER}: {given} has no task {name}, it has {', '.join(saved.tasks)};"
            " name those it teaches in training.distillation.tasks"
        )
    teacher_task = saved.tasks[name]
    for words, ours, theirs in (
        ("kind", task.kind, teacher_task.kind),
        ("labels", task.labels, teacher_task.labels),
        ("score range", task.score_range, teacher_task.score_range),
        ("number of texts", len(task.text), len(teacher_task.text)),
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


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    distillation = config.training.distillation
    if distillation is None or distillation.where != "clients":
        return None
    return options_of(distillation.weight, distillation.temperature, distillation.tasks or list(config.tasks))


CAPABILITY = Capability(NAME, Distilled, _client_options, _open)
