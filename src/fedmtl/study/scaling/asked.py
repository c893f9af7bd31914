"""What a study of scaling is asked: a preset, and what replaces parts of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmtl.errors import ConfigError
from fedmtl.study.presets import preset_rates, read_preset
from fedmtl.study.rates import Rates
from fedmtl.study.setups import Settings
from fedmtl.tasks.builtin import BUILTIN

PRESETS = ("ours", "paper", "quick")
RANDOM = "random:"
# Where each of these options lies in a config.
SETTINGS = {
    "local_epochs": "training",
    "optimizer": "training",
    "learning_rate": "training",
    "batch_size": "training",
    "max_length": "model",
}
# How much longer than the fixed number of rounds a run may try to reach the target, as in the paper.
LONGER = 2


@dataclass(frozen=True)
class Asked:
    """All of it stands in study.yaml. Rounds are by task; `config` is what all cells have in common.

    `examples` and `validation` None are all there are. `score_on` official is a task's dev or test file, train a tenth
    cut from train. `rates` are learning rates by names of setups, over that of `config`. `overrides` change `config`,
    under what a cell is about.
    """

    preset: str
    encoders: tuple[str, ...]
    tasks: tuple[str, ...]
    clients: tuple[int, ...]
    seeds: tuple[int, ...]
    rounds: Mapping[str, int]
    threshold_rounds: Mapping[str, int]
    examples: int | None
    validation: int | None
    config: Mapping[str, Any]
    data: str | None = None
    score_on: str = "official"
    partition: str = "iid"
    rows: str = "*"
    seed_rows: str = "*"
    rates: Rates = ()
    overrides: tuple[str, ...] = field(default=())

    @property
    def is_quick(self) -> bool:
        return self.preset == "quick"


def make_asked(preset: str, given: Mapping[str, Any]) -> Asked:
    """The preset with what was given put over it; None is nothing. 0 examples or validation rows are all."""
    if preset not in PRESETS:
        raise ConfigError(f"--preset: found {preset}; write one of ours, paper")
    found = read_preset("scaling", preset)
    known = {name: value for name, value in given.items() if value is not None}
    config: Settings = copy.deepcopy(found.pop("config"))
    # A preset's rates belong to its own optimizer and rate.
    rates = () if {"learning_rate", "optimizer"} & known.keys() else preset_rates(found)
    for name, section in SETTINGS.items():
        if name in known:
            config.setdefault(section, {})[name] = known.pop(name)
    # A preset's threshold belongs to its own rounds.
    lasting = found.pop("threshold_rounds", None)
    threshold = known.pop("threshold_rounds", None if "rounds" in known else lasting)
    values = {**found, **known}
    tasks = tuple(values["tasks"])
    by_task = _by_task(values["rounds"], tasks)
    values |= {
        "tasks": tasks,
        "rounds": by_task,
        "threshold_rounds": {task: threshold or LONGER * own for task, own in by_task.items()},
        "config": config,
        "rates": (*rates, *known.get("rates", ())),
        **{name: values[name] or None for name in ("examples", "validation")},
        **{name: tuple(values[name]) for name in ("encoders", "clients", "seeds")},
    }
    asked = Asked(preset=preset, **values)
    _check(asked)
    return asked


def _by_task(rounds: int | Mapping[str, int], tasks: tuple[str, ...]) -> dict[str, int]:
    if isinstance(rounds, int):
        return dict.fromkeys(tasks, rounds)
    lacking = [task for task in tasks if task not in rounds]
    if lacking:
        raise ConfigError(f"--rounds: the preset has none for {lacking[0]}; write --rounds N")
    return {task: rounds[task] for task in tasks}


def _check(asked: Asked) -> None:
    for option, listed in (("--encoders", asked.encoders), ("--tasks", asked.tasks), ("--seeds", asked.seeds)):
        if not listed:
            raise ConfigError(f"{option}: found none; write some with commas between")
    if not asked.clients or min(asked.clients) < 1:
        raise ConfigError("--clients: found none, or less than 1; write such as 1,2,4,8,16,32")
    for task in asked.tasks:
        if task not in BUILTIN or BUILTIN[task].kind != "classification":
            raise ConfigError(f"--tasks: {task} is no built-in classification; write such as imdb,ag_news")
        if asked.threshold_rounds[task] < asked.rounds[task]:
            raise ConfigError(
                f"--threshold-rounds: found {asked.threshold_rounds[task]}, fewer than the {asked.rounds[task]} of"
                " --rounds; write as many or more"
            )
    if asked.examples is not None and asked.examples < max(asked.clients):
        raise ConfigError(f"--examples: found {asked.examples} for {max(asked.clients)} clients; write more")
    if asked.is_quick and asked.data is not None:
        raise ConfigError("--data: --quick is on embedded data; leave one of them out")
    labels = [encoder_label(encoder) for encoder in asked.encoders]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"--encoders: two are called {twice}, and cells are named by it; rename a folder")
    read_partition(asked.partition)


def encoder_label(encoder: str) -> str:
    """What an encoder is called: the last part of a folder or a hub's name; with random values, `random:` before it."""
    kind = RANDOM if encoder.startswith(RANDOM) else ""
    return kind + Path(encoder.removeprefix(kind)).name


def encoder_settings(encoder: str) -> Settings:
    """The section `model` of an encoder: its own values, or random ones of the same shape."""
    name = encoder.removeprefix(RANDOM)
    return {"server_model": name, "initial": "pretrained" if name == encoder else "random"}


def read_partition(text: str) -> Settings:
    """`iid`, or `dirichlet:0.5` as the section `partition`."""
    kind, sign, alpha = text.partition(":")
    try:
        if kind == "iid" and not sign:
            return {"kind": "iid"}
        if kind == "dirichlet" and float(alpha) > 0:
            return {"kind": "dirichlet", "alpha": float(alpha)}
    except ValueError:
        pass
    raise ConfigError(f"--partition: found {text}; write iid, or such as dirichlet:0.5")
