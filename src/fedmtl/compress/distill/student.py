"""The student: the teacher's tasks on a smaller encoder."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedmtl.compress.distill.intermediate import attention_layers
from fedmtl.compress.distill.settings import DEFAULT_MAP, DistillSettings
from fedmtl.compress.general import General, read_general, read_projections
from fedmtl.config import ModelConfig, SharingConfig
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.bert.layout import NUM_HEADS_KEY, build_encoder
from fedmtl.model.encoder import Encoder, describe_encoder, load_encoder, with_dropout
from fedmtl.model.encoder_files import encoder_folder
from fedmtl.model.multitask import MultiTaskModel, build_model, wants_pooler
from fedmtl.model.saved import SavedModel
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import SharingPlan, owner_task, plan_from_config

SHAPE = re.compile(r"(\d+)x(\d+)")
LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Student:
    """A student before its training; all tasks share its encoder, each has its head. `start` says where it begins.

    `general` is the record of the general distillation that its folder comes from, and `projections` its values.
    """

    encoder: Encoder
    model: MultiTaskModel
    plan: SharingPlan
    start: str
    general: General | None = None
    projections: Mapping[str, Tensor] = field(default_factory=dict)


def build_student(settings: DistillSettings, teacher: SavedModel, config: ModelConfig, seed: int) -> Student:
    """A student whose bits follow from the settings, the teacher and the seed."""
    shape = SHAPE.fullmatch(settings.student)
    plain = config.model_copy(update={"lora": None, "adapters": None, "max_length": teacher.max_length})
    if shape is None:
        if settings.start == "teacher":
            raise ConfigError(
                f"--start teacher: {settings.student} comes with weights; leave it out, or give --student LxH"
            )
        encoder = _from_files(settings, plain, teacher, seed)
    else:
        encoder = _of_shape(int(shape[1]), int(shape[2]), teacher, plain, seed)
    model = build_model(encoder, teacher.tasks, seed)
    plan = plan_from_config(SharingConfig())
    if shape is None:
        if settings.start == "random":
            return Student(encoder, model, plan, settings.start)
        folder = encoder_folder(settings.student)
        general, projections = read_general(folder), read_projections(folder)
        return Student(encoder, model, plan, "its files", general, projections)
    start = settings.start or ("teacher" if encoder.hidden_size == teacher.encoder.hidden_size else "random")
    if start == "teacher":
        _copy_layers(model, teacher, settings)
    return Student(encoder, model, plan, start)


def _from_files(settings: DistillSettings, config: ModelConfig, teacher: SavedModel, seed: int) -> Encoder:
    named = config.model_copy(
        update={"server_model": settings.student, "initial": "random" if settings.start == "random" else "pretrained"}
    )
    try:
        return load_encoder(named, seed, wants_pooler(teacher.tasks))
    except ModelError as error:
        if str(error).startswith("model.max_length"):
            raise ModelError(
                f"--student {settings.student}: has fewer positions than the {teacher.max_length} tokens that the"
                f" teacher reads; pretrain it with --max-length {teacher.max_length}"
            ) from error
        raise ModelError(str(error).replace("model.server_model", "--student")) from error


def follow_general(settings: DistillSettings, student: Student, teacher: SavedModel) -> DistillSettings:
    """The settings with the layer map of the student's general distillation; a ConfigError where the stages do not fit.

    Without the intermediate stage there is nothing that has to fit.
    """
    general = student.general
    if general is None or "intermediate" not in settings.epochs:
        return settings
    above = teacher.encoder.module.config
    name = f"--student {settings.student}"
    if student.encoder.tokenizer.get_vocab() != teacher.encoder.tokenizer.get_vocab():
        raise ConfigError(
            f"{name}: was pretrained with the vocabulary of {general.teacher}, and the teacher has another; pretrain it"
            " from the teacher's encoder with --vocab teacher, or write --stages prediction"
        )
    if general.teacher_width != above.hidden_size:
        raise ConfigError(
            f"{name}: was pretrained from a teacher {general.teacher_width} wide, and this one is {above.hidden_size}"
            " wide; pretrain it from this teacher's encoder, or write --stages prediction"
        )
    if settings.layer_map is not None:
        return settings
    if general.teacher_layers != above.num_hidden_layers:
        raise ConfigError(
            f"{name}: was pretrained from {general.teacher_layers} layers ({','.join(map(str, general.hidden_map))}),"
            f" and the teacher has {above.num_hidden_layers}; give a --layer-map, or pretrain it from this teacher's"
            " encoder"
        )
    return replace(settings, layer_map=general.hidden_map)


def _of_shape(layers: int, width: int, teacher: SavedModel, config: ModelConfig, seed: int) -> Encoder:
    """An encoder of the teacher's kind with fresh values; its heads are as many as the teacher's where that divides."""
    above: Any = teacher.encoder.module.config
    heads = int(above.num_attention_heads)
    if width % heads:
        heads = max(1, width // 64)
    if layers < 1 or width < 1 or width % heads:
        raise ConfigError(f"--student {layers}x{width}: cannot be built; take a width divisible by 64")
    architecture = copy.deepcopy(above)
    for name in ("intermediate_size", "hidden_dim"):
        if hasattr(above, name):
            setattr(architecture, name, getattr(above, name) * width // above.hidden_size)
    architecture.num_hidden_layers, architecture.hidden_size, architecture.num_attention_heads = layers, width, heads
    if getattr(above, "layer_types", None) is not None:
        # How far a layer of ModernBERT looks.
        architecture.layer_types = above.layer_types[:layers]
    if heads != above.num_attention_heads and hasattr(architecture, NUM_HEADS_KEY):
        delattr(architecture, NUM_HEADS_KEY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "student"))
        module = build_encoder(with_dropout(architecture, config))
    return describe_encoder(module, teacher.encoder.tokenizer, f"{layers}x{width}", teacher.encoder.has_pooler)


def _copy_layers(model: MultiTaskModel, teacher: SavedModel, settings: DistillSettings) -> None:
    """Give the student the teacher's embeddings, mapped layers, pooler and heads."""
    above = teacher.encoder.module.config
    if model.encoder.config.hidden_size != above.hidden_size:
        raise ConfigError(
            f"--start teacher: the student is {model.encoder.config.hidden_size} wide and its teacher"
            f" {above.hidden_size}; write --start random, or a student of the same width"
        )
    if teacher.model.lora is not None or teacher.model.adapters is not None:
        raise ConfigError("--start teacher: the teacher has LoRA or adapters beside its layers; write --start random")
    layers = attention_layers(
        above.num_hidden_layers, model.encoder.config.num_hidden_layers, settings.layer_map or DEFAULT_MAP
    )
    views = teacher.plan.keys(teacher.model.canonical(), list(teacher.tasks), "")
    first = next(iter(teacher.tasks))
    with torch.no_grad():
        for name, (module, leaf) in model.canonical().items():
            source = LAYER.sub(lambda found: f"{found[1]}{layers[int(found[2])]}{found[3]}", name, count=1)
            task = owner_task(name)
            if source not in views[first]:
                # A head's name, or a layer that all layers share, as in ALBERT.
                source = name
            if task is None and len({view[source] for view in views.values()}) > 1:
                raise ConfigError(f"--start teacher: the teacher's tasks do not share `{source}`; write --start random")
            getattr(module, leaf).copy_(teacher.weights[views[task or first][source]])
