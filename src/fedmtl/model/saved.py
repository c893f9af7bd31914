"""A trained model on disk: the encoder's config, its tokenizer, all values by key, and the tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.binding import BoundModel
from fedmtl.model.encoder import Encoder, describe_encoder
from fedmtl.model.kept_heads import build_encoder
from fedmtl.model.keys import LOG_VARIANCE, Weights, weights_sha256
from fedmtl.model.multitask import MultiTaskModel, build_model
from fedmtl.model.plan import SharingPlan
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.runs import write_atomic
from fedmtl.tasks.task import Task

# The settings that say what is added to the encoder.
ADDED = ("lora", "adapters")


@dataclass(frozen=True)
class SavedModel:
    """What a folder holds; `bind` gives a model that answers."""

    model: MultiTaskModel
    encoder: Encoder
    tasks: dict[str, Task]
    plan: SharingPlan
    weights: Weights
    max_length: int

    def bind(self, client: str = "", own: Weights | None = None, tasks: Sequence[str] | None = None) -> BoundModel:
        """The model with its values in place, for all tasks or those named; `own` are values a client kept."""
        weights = {**self.weights, **(own or {})}
        return BoundModel(self.model, self.plan, list(tasks or self.tasks), client, weights)

    def missing(self, tasks: Sequence[str]) -> str | None:
        """The name of a value that these tasks need and that stayed at the clients."""
        views = self.plan.keys(self.model.canonical(), tasks, "")
        return next((key.name for view in views.values() for key in view.values() if key not in self.weights), None)


def save_model(
    folder: Path,
    encoder: Encoder,
    tasks: Mapping[str, Task],
    plan: SharingPlan,
    weights: Weights,
    config: ModelConfig,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encoder.module.config.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    save_tensors(folder / "weights.safetensors", {"weights": weights})
    record = {
        "encoder": encoder.name,
        "has_pooler": encoder.has_pooler,
        "max_length": config.max_length,
        **config.model_dump(include=set(ADDED)),
        "plan": plan.to_dict(),
        "tasks": {name: asdict(task) for name, task in tasks.items()},
    }
    write_atomic(folder / "tasks.json", json.dumps(record, indent=1).encode())


def model_folder(given: Path, setting: str) -> Path:
    """The folder of a finished model: the one given, or that of a run; `setting` is named where there is none."""
    for folder in (given, given / "model"):
        if (folder / "tasks.json").exists():
            return folder
    raise ConfigError(
        f"{setting}: {given} holds no finished model on this machine;"
        " name the folder of a run that ended, or its model/"
    )


def load_model(folder: Path) -> SavedModel:
    if not (folder / "tasks.json").exists():
        raise ModelError(f"{folder}: holds no finished model; let the run end, or go on with `fedmtl run --resume`")
    record = json.loads((folder / "tasks.json").read_text())
    module = build_encoder(AutoConfig.from_pretrained(folder))
    encoder = describe_encoder(module, AutoTokenizer.from_pretrained(folder), record["encoder"], record["has_pooler"])
    tasks = {name: _task(values) for name, values in record["tasks"].items()}
    weights = load_tensors(folder / "weights.safetensors").get("weights", {})
    weighed = any(key.name.endswith(LOG_VARIANCE) for key in weights)
    added = ModelConfig.model_validate({name: record.get(name) for name in ADDED})
    return SavedModel(
        build_model(encoder, tasks, 0, added, log_variances=weighed),
        encoder,
        tasks,
        SharingPlan.from_dict(record["plan"]),
        weights,
        record["max_length"],
    )


def model_digest(folder: Path, saved: SavedModel) -> str:
    """Names what the model in a folder answers: its values, its tasks and the encoder's config."""
    told = b"".join((folder / name).read_bytes() for name in ("tasks.json", "config.json"))
    return hashlib.sha256(weights_sha256(saved.weights).encode() + told).hexdigest()[:16]


def _task(values: dict[str, Any]) -> Task:
    # JSON has no tuples, and a Task is compared and hashed by them.
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Task(**given)
