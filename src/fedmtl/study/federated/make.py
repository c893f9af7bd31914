"""Cells of the setups: what all have in common, each one's data and learning rate, and what comes first."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmtl.config.file import with_absolute_paths, with_overrides
from fedmtl.errors import ConfigError
from fedmtl.study.federated.asked import Asked
from fedmtl.study.federated.cells import FIRST, MODES, VARIANTS, Setup
from fedmtl.study.folder import StudyFolder
from fedmtl.study.grid import Cell
from fedmtl.study.setups import Settings, cell_name, fits, merged
from fedmtl.tasks.sources import find_table, read_table

# Fewer of similarity, as in the real data: weights by examples then differ from equal ones.
QUICK_SAMPLES = (96, 96, 48)


@dataclass(frozen=True)
class Base:
    """What all cells have in common, and how many training examples each task has."""

    settings: Settings
    sizes: Mapping[str, int]


def open_base(folder: StudyFolder, asked: Asked) -> Base:
    """The settings of configs/glue-dual.yaml on the user's data; to choose rates, on its train files alone."""
    if asked.quick:
        sizes = dict(zip(asked.tasks, QUICK_SAMPLES, strict=True))
        tasks = {task: {"train_samples": size, "val_samples": 40} for task, size in sizes.items()}
        return Base(_settings(asked, {"source": "embedded"}, tasks), sizes)
    if asked.data is None:
        raise ConfigError("--data: missing; name a folder with sst2, qqp and stsb, or write --quick")
    files = {task: _train_file(Path(asked.data), task) for task in asked.tasks}
    root = _copied(files, folder.path / "data/train") if asked.choose else Path(asked.data)
    settings = _settings(asked, {"root": str(root), "source": "files"}, {task: {} for task in asked.tasks})
    return Base(settings, {task: len(read_table(file)) for task, file in files.items()})


def _settings(asked: Asked, data: Settings, tasks: Settings) -> Settings:
    model: Settings = {"server_model": asked.encoder, "pair": "dual", "pool": "mean"}
    training = {"batch_size": 64, "learning_rate": 4e-4, "schedule": "linear", "warmup_rounds": 0.25}
    if asked.quick:
        # As the demonstration: a tiny encoder learns something of pairs in a few passes.
        model["encoder_dropout"] = 0.0
        training |= {"batch_size": 8, "learning_rate": 1e-3}
    base = {
        "model": model,
        "data": data,
        "tasks": tasks,
        # By examples alone, similarity would have a twentieth of the say in the encoder.
        "federation": {"average": "tasks"},
        "training": training,
    }
    return with_overrides(with_absolute_paths(base, Path.cwd()), asked.overrides)


def _train_file(root: Path, task: str) -> Path:
    found = find_table(root / task, ["train"])
    if found is None:
        raise ConfigError(f"--data: {root / task} has no train file; put train.tsv.gz there")
    return found


def _copied(files: Mapping[str, Path], root: Path) -> Path:
    """A folder with the train files alone, so that no run can see a dev set."""
    for task, file in files.items():
        target = root / task / file.name
        if not target.exists() or target.stat().st_size != file.stat().st_size:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return root


def seeds_of(asked: Asked, setup: Setup, wanted: Sequence[Setup]) -> tuple[int, ...]:
    """All seeds where one of the setups that share its cell fits `seed_rows`; else the first alone."""
    sharing = [setup.name, *(one.name for one in wanted if one.cell == setup.cell)]
    return asked.seeds if any(fits(name, asked.seed_rows) for name in sharing) else asked.seeds[:1]


def make_cells(asked: Asked, base: Base, every: Mapping[str, Setup], wanted: Sequence[Setup]) -> list[Cell]:
    """The cells of the wanted setups, each once; what is asked for first comes first with all its seeds.

    Among these the longest begin, so that none is left to run alone at the end.
    """
    used = list(dict.fromkeys(setup.cell for setup in wanted))
    order = [
        (_stage(every[name]), -every[name].point.rounds, number, at, name, seed)
        for number, seed in enumerate(asked.seeds)
        for at, name in enumerate(used)
        if seed in seeds_of(asked, every[name], wanted)
    ]
    return [_cell(asked, base, every[name], seed) for *_, name, seed in sorted(order)]


def _stage(setup: Setup) -> int:
    if setup.kind not in MODES:
        return 2
    return 0 if setup.point.name in FIRST else 1


def _cell(asked: Asked, base: Base, setup: Setup, seed: int) -> Cell:
    point = setup.point
    settings = merged(merged(base.settings, point.settings), VARIANTS.get(setup.kind, {}))
    most = point.samples * point.clients if point.samples else max(base.sizes.values())
    sizes = {task: min(size, most) for task, size in base.sizes.items()}
    tasks: Settings = {task: {"train_samples": size} for task, size in sizes.items() if point.samples}
    rate = point.rate or asked.rate(setup.name, setup.kind)
    training = {} if rate is None else {"training": {"learning_rate": rate}}
    settings = merged(merged(settings, {"mode": setup.mode, "seed": seed, "tasks": tasks}), training)
    settings = with_overrides(settings, asked.overrides_of(setup.name, setup.kind))
    return Cell(cell_name(setup.name, seed), settings, work=float(point.rounds * sum(sizes.values())))
