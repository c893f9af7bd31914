"""A trained model on disk: the encoder's config, its tokenizer, all values by key, and the tasks.

A model folder may be anybody's. It is read as data: nothing in it runs, no pickle, no file outside it, and values that
fit the model which its files describe. A run may start from one (`model.start_from`), encoder and heads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError, FedmtlError, ModelError
from fedmtl.foreign import excerpt, parse_record, read_json, read_record
from fedmtl.model.bert.layout import BertValues, build_encoder, is_computed
from fedmtl.model.bert.plain_files import plain_config, plain_tokenizer
from fedmtl.model.encoder import Encoder, describe_encoder
from fedmtl.model.encoder_files import NO_CODE, check_encoder_files, check_inside, is_extended, quiet_transformers
from fedmtl.model.multitask import BoundModel, MultiTaskModel, build_model
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.runs.folder import write_atomic
from fedmtl.sharing.plan import LOG_VARIANCE, PlanRecord, SharingPlan, Weights, move, owner_task, weights_sha256
from fedmtl.tasks.task import Task, read_tasks

# The settings that say what is added to the encoder.
ADDED = ("lora", "adapters")
REMEDY = "put back a whole copy of the model folder"
# Sixteen gigabytes in memory.
MOST_PARAMETERS = 4 * 10**9
START = "model.start_from"


class ModelRecord(BaseModel):
    """The file tasks.json; older ones have no digest of the weights."""

    model_config = ConfigDict(extra="forbid", strict=True)

    encoder: str
    has_pooler: bool
    max_length: Annotated[int, Field(ge=1, le=1 << 20)]
    lora: dict[str, Any] | None = None
    adapters: dict[str, Any] | None = None
    plan: PlanRecord
    tasks: dict[str, dict[str, Any]]
    weights_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


@dataclass(frozen=True)
class SavedModel:
    """A model as loaded from a folder; `bind` makes it ready for predictions."""

    model: MultiTaskModel
    encoder: Encoder
    tasks: dict[str, Task]
    plan: SharingPlan
    weights: Weights
    max_length: int

    def bind(self, client: str = "", local: Weights | None = None, tasks: Sequence[str] | None = None) -> BoundModel:
        """Bind the model's values, for all tasks or those named; `local` are values that stayed at the client."""
        weights = {**self.weights, **(local or {})}
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
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    encoder.module.config.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    digest = save_tensors(folder / "weights.safetensors", {"weights": weights})
    record = {
        "encoder": encoder.name,
        "has_pooler": encoder.has_pooler,
        "max_length": config.max_length,
        **config.model_dump(include=set(ADDED)),
        "plan": plan.to_dict(),
        "tasks": {name: asdict(task) for name, task in tasks.items()},
        "weights_sha256": digest,
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


def read_model_record(folder: Path) -> ModelRecord:
    """What a model folder says of itself."""
    path = folder / "tasks.json"
    record = parse_record(ModelRecord, read_record(path, REMEDY, ModelError), str(path), REMEDY, ModelError)
    if not record.plan.has_its_groups:
        raise ModelError(f"{path}: has a rule of groups that it does not have; {REMEDY}")
    return record


def load_model(folder: Path, *, values_only: bool = False) -> SavedModel:
    """The model in a folder that `save_model` wrote; anything else in it is a FedmtlError of one line.

    With `values_only`, an encoder that `model.bert` computes comes without transformers' code, which takes longer to
    import than a model takes to answer; such a model answers, and cannot be exported.
    """
    if not (folder / "tasks.json").exists():
        raise ModelError(f"{folder}: holds no finished model; let the run end, or go on with `fedmtl run --resume`")
    check_inside(folder, folder)
    record = read_model_record(folder)
    tasks = read_tasks(record.tasks, str(folder / "tasks.json"), ModelError)
    weights = load_weights(folder, record)
    added = _added(folder, record)
    module, tokenizer = _load_encoder(folder, record.has_pooler if values_only and not is_extended(added) else None)
    try:
        encoder = describe_encoder(module, tokenizer, record.encoder, record.has_pooler)
        weighed = any(key.name.endswith(LOG_VARIANCE) for key in weights)
        model = build_model(encoder, tasks, 0, added, log_variances=weighed)
    except FedmtlError:
        raise
    except Exception as error:  # whatever an encoder's code raises for sizes that do not fit each other
        raise ModelError(f"{folder}: cannot be built ({excerpt(error)}); {REMEDY}") from error
    plan = record.plan.to_plan()
    _check_weights(folder, weights, model, plan)
    return SavedModel(model, encoder, tasks, plan, weights, record.max_length)


def load_weights(folder: Path, record: ModelRecord) -> Weights:
    """All values in a model folder, whose file is the one that the record names by its digest."""
    path = folder / "weights.safetensors"
    if record.weights_sha256 is not None:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
        if found != record.weights_sha256:
            raise ModelError(f"{path}: is broken, its sha256 is not that of tasks.json; {REMEDY}")
    return load_tensors(path).get("weights", {})


def _added(folder: Path, record: ModelRecord) -> ModelConfig:
    try:
        return ModelConfig.model_validate({name: getattr(record, name) for name in ADDED})
    except ValueError as error:
        raise ModelError(f"{folder}: cannot be built ({excerpt(error)}); {REMEDY}") from error


def _load_encoder(folder: Path, has_pooler: bool | None = None) -> tuple[Any, Any]:
    """The encoder with fresh values and its tokenizer, from files that are checked before transformers sees them.

    Where it is said whether it has a pooler, one that `model.bert` computes is only the shapes of its values.
    """
    check_encoder_files(folder, "the model", weights=False)
    if (folder / "tokenizer_config.json").is_file():
        for name, value in read_json(folder / "tokenizer_config.json", REMEDY, ModelError).items():
            if name.endswith("_file") and value is not None:
                raise ModelError(f"{folder / 'tokenizer_config.json'}: names a file ({name}); drop the key")
    plain = None if has_pooler is None else (plain_config(folder), plain_tokenizer(folder))
    try:
        if plain is not None and None not in plain and is_computed(plain[0]):
            config, tokenizer = plain
        else:
            transformers = quiet_transformers()
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **NO_CODE)
            tokenizer = None
        is_shapes = has_pooler is not None and is_computed(config)
        with torch.device("meta"):
            shapes = BertValues(config, bool(has_pooler)) if is_shapes else build_encoder(config)
            size = sum(parameter.numel() for parameter in shapes.parameters())
        if size > MOST_PARAMETERS:
            raise ModelError(f"{folder}: its config asks for {size:,} parameters; {MOST_PARAMETERS:,} are the most")
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **NO_CODE)
        return shapes if is_shapes else build_encoder(config), tokenizer
    except FedmtlError:
        raise
    except Exception as error:  # every library that a loader calls raises other kinds
        raise ModelError(f"{folder}: cannot be loaded ({excerpt(error)}); {REMEDY}") from error


def _check_weights(folder: Path, weights: Weights, model: MultiTaskModel, plan: SharingPlan) -> None:
    """Raise where a value is not one of the model's, or of another shape."""
    canonical = model.canonical()
    for key, value in weights.items():
        module, leaf = canonical.get(key.name, (None, ""))
        like = getattr(module, leaf) if module is not None else None
        if like is None or like.shape != value.shape or not value.is_floating_point():
            raise ModelError(f"{folder}: {excerpt(key.name)} does not fit the model its files describe; {REMEDY}")
    for name in canonical:
        plan.level(name)


def model_digest(folder: Path, saved: SavedModel) -> str:
    """Return a digest of what decides the predictions of a folder's model: its values, tasks and encoder config."""
    described = b"".join((folder / name).read_bytes() for name in ("tasks.json", "config.json"))
    return hashlib.sha256(weights_sha256(saved.weights).encode() + described).hexdigest()[:16]


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
    known = {key: value for key, value in found.items() if owner_task(key.name) in (None, *tasks)}
    _check_names(given, {key.name: tuple(value.shape) for key, value in known.items()}, fresh)
    moved = move(known, record.plan.to_plan(), plan, list(tasks))
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
