"""The averaged model learns from a teacher at the server, on texts without labels, after every round.

Ensemble distillation (Lin et al. 2020) with a finished model in the ensemble's place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedmtl.config import Config, DistillationConfig
from fedmtl.errors import ConfigError
from fedmtl.experiment.teacher import Teacher, open_teacher
from fedmtl.federation.messages import Refinement, State
from fedmtl.federation.server import Refine
from fedmtl.model.binding import BoundModel, Buffers
from fedmtl.model.encoder import Encoder
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.runs.event_lines import Observer
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import SharingPlan
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.sources import read_texts
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import token_cache, tokenize
from fedmtl.training.local import train
from fedmtl.training.settings import LocalSettings, with_one_loss

TEXTS = "training.distillation.texts"


class ServerDistillation:
    """Trains a state's weights towards the teacher; what comes out follows from the state and the seed alone."""

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

    def __call__(self, state: State) -> tuple[State, Refinement]:
        started = time.perf_counter()
        going = {
            name: shard
            for name, shard in self._shards.items()
            if name not in state.progress or state.progress[name].stopped_round is None
        }
        if not going:
            return state, Refinement({}, 0, 0.0)
        self._model.to(self._device)
        bound = BoundModel(
            self._model, state.plan, list(going), "", state.weights, device=self._device, buffers=self._buffers
        )
        seed = derive_seed(self._seed, "server_distillation", state.round)
        trained = train(
            bound,
            going,
            self._settings,
            round_number=state.round,
            seed=seed,
            device=self._device,
            pruned=state.pruned,
        )
        moved = {key: value.cpu().clone() for key, value in bound.values().items() if key in bound.flat.places}
        seconds = time.perf_counter() - started
        return replace(state, weights={**state.weights, **moved}), Refinement(trained.losses, trained.steps, seconds)


def open_server_distillation(
    config: Config,
    encoder: Encoder,
    model: MultiTaskModel,
    plan: SharingPlan,
    settings: LocalSettings,
    device: str,
    observe: Observer,
) -> Refine | None:
    """What the server does after a round's mean; None where it has no teacher."""
    told = config.training.distillation
    teacher = open_teacher(config, "server", model.tasks, device, observe)
    if told is None or teacher is None:
        return None
    if any(plan.level(name) == "client" for name in model.canonical()):
        raise ConfigError(
            "training.distillation.where: found server, but the sharing plan keeps values at the clients;"
            " write `clients`"
        )
    shards = {name: _shard(config, model.tasks[name], told.texts, teacher, encoder) for name in teacher.tasks}
    return ServerDistillation(model, shards, _settings(told, settings, shards), config.seed, torch.device(device))


def _settings(told: DistillationConfig, settings: LocalSettings, shards: Mapping[str, Shard]) -> LocalSettings:
    """The clients' settings for so many batches of the teacher's outputs alone."""
    rate = told.learning_rate
    return replace(
        with_one_loss(settings, {"weight": 1.0, "temperature": told.temperature, "tasks": list(shards)}),
        steps=told.steps,
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
    labels = np.zeros(len(texts[0]), dtype=np.float32 if task.is_regression else np.int64)
    return Shard(tokens, labels, np.arange(len(labels), dtype=np.int64), teacher.outputs(task, texts))
