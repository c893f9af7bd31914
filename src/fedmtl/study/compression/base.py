"""What all cells of a study of compression have in common: data, teacher, shapes and setups."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.config import Config
from fedmtl.config.file import config_from, load_config, with_absolute_paths, with_overrides
from fedmtl.errors import ConfigError, RunNotFound
from fedmtl.model.encoder_files import encoder_folder
from fedmtl.runs.folder import RunFolder, find_run, read_events, write_atomic
from fedmtl.study.compression.asked import TASKS, Asked
from fedmtl.study.compression.cells import Setup, Shape, Shapes, setups
from fedmtl.study.folder import StudyFolder, is_done
from fedmtl.study.setups import Settings
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.embedded import ADJECTIVES, NOUNS, PEOPLE, VERBS
from fedmtl.tasks.sources import find_table

QUICK_TASKS = ("sst2", "qqp", "stsb")
RANDOM = re.compile(r"random-(\d+)x(\d+)")


@dataclass(frozen=True)
class Base:
    """The teacher's settings, every task's main metric, and every setup there is; `teacher` is a run that was given."""

    settings: Settings
    metrics: dict[str, str]
    shapes: Shapes
    setups: dict[str, Setup]
    has_augmentation: bool
    teacher: RunFolder | None = None

    def config(self) -> Config:
        return config_from(dict(self.settings))


def open_base(folder: StudyFolder, asked: Asked) -> Base:
    """Read what is given: a teacher, or an encoder and data."""
    teacher = None if asked.teacher is None else _given(asked.teacher)
    settings = _settings(asked) if teacher is None else _settings_of(teacher, asked)
    metrics = _metrics(settings) if teacher is None else _metrics_of(teacher)
    encoder = teacher.model if teacher is not None else None
    shapes = Shapes(read_shape(settings["model"]["server_model"], encoder))
    sources = asked.augment or ((f"wordnet:{_write_synonyms(folder)}",) if asked.quick else ())
    every = setups(shapes, list(metrics), asked.distilling(sources))
    return Base(settings, metrics, shapes, every, bool(sources), teacher)


def _given(name: str) -> RunFolder:
    run = find_run(name)
    if not is_done(run):
        raise RunNotFound(f"--teacher {name}: is not finished; let it end, or go on with `fedmtl run --resume`")
    return RunFolder(run.path.absolute())


def _settings(asked: Asked) -> Settings:
    model: Settings = {"server_model": asked.encoder}
    if asked.quick:
        tasks: Settings = {task: {"train_samples": 80, "val_samples": 60} for task in asked.tasks or QUICK_TASKS}
        data: Settings = {"source": "embedded"}
        # As the demonstration: a tiny encoder learns something of pairs in a few passes.
        model |= {"pair": "dual", "pool": "mean", "encoder_dropout": 0.0}
    else:
        assert asked.data is not None, "checked before"
        tasks = {task: {} for task in asked.tasks or _tasks_in(Path(asked.data))}
        data = {"root": asked.data, "source": "files"}
    settings = {
        "mode": "centralized",
        "model": model,
        "data": data,
        "tasks": tasks,
        "training": {
            "num_rounds": asked.teacher_epochs,
            "local_epochs": 1,
            "batch_size": 8 if asked.quick else 32,
            "learning_rate": 1e-3 if asked.quick else 5e-5,
            "head_rate": 1.0 if asked.quick else 10.0,
            "schedule": "linear",
            "warmup_rounds": 0.1,
        },
        # Some rows cannot train in a stack, which on a GPU is in bf16: a row must not differ by that.
        "compute": {"stack": 0},
    }
    return with_overrides(with_absolute_paths(settings, Path.cwd()), asked.overrides)


def _settings_of(teacher: RunFolder, asked: Asked) -> Settings:
    found: Settings = load_config(teacher.config, list(asked.overrides)).model_dump()
    return found


def _tasks_in(root: Path) -> list[str]:
    found = [task for task in TASKS if find_table(root / task, ["train"]) is not None]
    if not found:
        raise ConfigError(f"--data: {root} has none of {', '.join(TASKS)}; put such as sst2/train.tsv.gz there")
    return found


def _metrics(settings: Settings) -> dict[str, str]:
    tasks = {task: about or {} for task, about in settings["tasks"].items()}
    unknown = next((task for task, about in tasks.items() if task not in BUILTIN and "metric" not in about), None)
    if unknown is not None:
        raise ConfigError(f"--tasks: {unknown} is not built in; train a run with it, and give that as --teacher")
    return {task: about.get("metric") or BUILTIN[task].metric for task, about in tasks.items()}


def _metrics_of(teacher: RunFolder) -> dict[str, str]:
    start = next(event for event in read_events(teacher) if event["event"] == "start")
    return {task: about["metric"] for task, about in start["tasks"].items()}


def read_shape(encoder: str, folder: Path | None = None) -> Shape:
    """Layers and width of an encoder, from its config."""
    made = RANDOM.fullmatch(encoder)
    if made is not None and folder is None:
        return Shape(int(made[1]), int(made[2]))
    place = (folder or encoder_folder(encoder)) / "config.json"
    told = json.loads(place.read_text()) if place.is_file() else _from_hub(encoder)
    layers, width = (told.get(key) for key in ("num_hidden_layers", "hidden_size"))
    if not layers or not width:
        raise ConfigError(f"--encoder {encoder}: its config has no num_hidden_layers and hidden_size; take another")
    return Shape(int(layers), int(width))


def _from_hub(encoder: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(encoder, trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--encoder {encoder}: is neither a folder nor on the hub; give a folder") from error
    return found


def _write_synonyms(folder: StudyFolder) -> Path:
    """Synonyms of the embedded texts' words, for a miniature of augmentation."""
    tables = {"n": (*PEOPLE, *NOUNS), "v": VERBS, "a": ADJECTIVES}
    lines = [
        f"{word}\t{part}\t{'|'.join(other for other in row if other != word)}"
        for part, table in tables.items()
        for row in table
        for word in row
        if " " not in word
    ]
    path = folder.path / "data/synonyms.tsv"
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path
