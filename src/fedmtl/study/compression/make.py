"""Cells of the setups of a study of compression."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from fedmtl.study.compression.asked import Asked
from fedmtl.study.compression.base import Base
from fedmtl.study.compression.cells import TEACHER, Setup
from fedmtl.study.derived import Distillation, Pruning
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Cell
from fedmtl.study.setups import Settings, cell_name, fits, merged

# A backward pass is two forward passes.
TRAINING = 3.0


def seeds_of(asked: Asked, name: str, every: Mapping[str, Setup]) -> tuple[int, ...]:
    """All seeds where the setup, or one that is made of it, fits `seed_rows`; else the first alone."""
    made = [child for child, setup in every.items() if setup.of == name]
    fitting = any(fits(one, asked.seed_rows) for one in (name, *made))
    return asked.seeds if fitting else asked.seeds[:1]


def make_cells(folder: StudyFolder, asked: Asked, base: Base, every: Mapping[str, Setup]) -> list[Cell]:
    """The cells of these setups; the first seed of every setup comes before the second of any."""
    own = {name: setup for name, setup in every.items() if name != TEACHER or base.teacher is None}
    return [
        _cell(folder, asked, base, name, setup, seed)
        for seed in asked.seeds
        for name, setup in own.items()
        if seed in seeds_of(asked, name, every)
    ]


def _cell(folder: StudyFolder, asked: Asked, base: Base, name: str, setup: Setup, seed: int) -> Cell:
    is_given = setup.of == TEACHER and base.teacher is not None
    source = str(base.teacher.path) if is_given and base.teacher else cell_name(setup.of or "", seed)
    after = () if setup.of is None or is_given else (source,)
    work = _work(asked, base, setup)
    named, overrides = cell_name(name, seed), [f"seed={seed}"]
    if is_given:
        overrides = [*asked.overrides, *overrides]
    if setup.student is not None:
        told = (*overrides, f"training.batch_size={asked.batch_size}")
        return Cell(named, Distillation(source, setup.student, told), work, after)
    if setup.cut is not None:
        return Cell(named, Pruning(source, setup.cut, asked.prune_epochs, tuple(overrides)), work, after)
    settings = merged(base.settings, {"seed": seed})
    if setup.only is not None:
        settings = {**settings, "tasks": {setup.only: base.settings["tasks"][setup.only]}}
    if setup.of is not None:
        settings = _going_on(settings, str(folder.cells / source), asked.prune_epochs)
    return Cell(named, settings, work, after)


def _going_on(settings: Settings, source: str, epochs: int) -> Settings:
    """The teacher for so many epochs more, as `fedmtl prune` trains what is left."""
    warmup = min(float(settings["training"].get("warmup_rounds") or 0), epochs)
    training = {"num_rounds": epochs, "local_epochs": 1, "local_steps": None, "warmup_rounds": warmup}
    return merged(settings, {"model": {"start_from": source}, "training": training})


def _work(asked: Asked, base: Base, setup: Setup) -> float:
    """Passes of one example through one of the teacher's layers; a guess that only the time left is made of."""
    layers = float(base.shapes.teacher.layers)
    share = 1 / len(base.metrics) if setup.only or (setup.of or "").startswith("single-") else 1.0
    if setup.student is None:
        epochs = asked.teacher_epochs if setup.of is None else asked.prune_epochs
        return share * epochs * layers * TRAINING
    large = base.shapes.large
    own = float(large.layers) if setup.student.student == str(large) else 1.0
    passes = setup.student.epochs
    augment = setup.student.augment
    copies = 1 + (mean(augment.copies_of(task) for task in base.metrics) if augment.sources else 0)
    asking = layers * (1 + passes.get("intermediate", 0))
    return share * copies * (asking + sum(passes.values()) * own * TRAINING)
