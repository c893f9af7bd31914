"""Which settings each command honours; what it does not say yes to, `--set` refuses by name.

A command says for every key of the schema whether it honours the key, and where it does not what to do instead. A key
stands for all keys below it and `*` for any name. The longest that fits decides, and of two the refusal: with `model`
honoured and `model.pool` refused, it is the whole section but for its pool. A key that was forgotten is refused, and a
test finds it. The studies say the same in their `Study` records.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from pydantic import BaseModel

from fedmtl.config.errors import dotted
from fedmtl.config.file import with_overrides
from fedmtl.config.schema import MOVED, Config
from fedmtl.errors import ConfigError

Path = tuple[str, ...]


@dataclass(frozen=True)
class Honours:
    """The settings that a command honours, and for the others what to do instead.

    `values` are refused values of honoured keys. A config file may have any key, since one file serves several
    commands. The exception is `harmless`: refused keys that are refused in files too, each with the values that ask
    for nothing and are accepted everywhere.
    """

    command: str
    honoured: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def remedy(self, key: str) -> str | None:
        """What to do instead of setting a key of the schema; None where the command honours it."""
        fitting = self.decisions(key)
        return self.refused.get(max(fitting, key=_depth)) if fitting else "leave it out"

    def decisions(self, key: str) -> list[str]:
        """The entries of the command's table that are about a key."""
        path = _parts(key)
        return [
            entry
            for entry in (*self.refused, *self.honoured)
            if len(path) >= len(_parts(entry)) and _fits(path, _parts(entry))
        ]

    def check(self, overrides: Sequence[str], tasks: Sequence[str] | None = None) -> None:
        """Raise a ConfigError for an override that the command does not honour, such as one of a task beside `tasks`.

        An unknown key is left to the config, which knows what was meant.
        """
        for override in overrides:
            for path, value in _leaves(with_overrides({}, [override])):
                keys = _schema_keys(MOVED.get(path, path))
                if value == {} and any(self.remedy(key) is None for key in keys):
                    # An empty section sets none of the keys below it that are refused.
                    continue
                for key in keys:
                    self._check_one(dotted(path), key, value)
                if tasks is not None and path[0] == "tasks" and len(path) > 1 and path[1] not in tasks:
                    self._refuse(f"--set {dotted(path)}", f"its tasks are {', '.join(tasks)}")

    def check_file(self, config: Config) -> None:
        """Raise a ConfigError where a config has more than a harmless value of a key that is refused in files too."""
        for key, harmless in self.harmless.items():
            found: Any = config
            for part in _parts(key):
                found = getattr(found, part)
            if found not in harmless:
                self._refuse(key, self.refused[key])

    def _check_one(self, written: str, key: str, value: Any) -> None:
        remedy = self.remedy(key)
        if remedy is not None and value not in self.harmless.get(key, ()):
            self._refuse(f"--set {written}", remedy)
        for (named, refused), instead in self.values.items():
            if (named, refused) == (key, value):
                self._refuse(f"--set {written}={value}", instead)

    def _refuse(self, found: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{found}: `fedmtl {self.command}` does not honour it; {remedy}")


@cache
def config_keys() -> tuple[str, ...]:
    """Every key of the schema that has no keys below it, with `*` for names that the user gives."""
    return tuple(dict.fromkeys(dotted(path) for path in _paths(Config)))


def _paths(kind: Any) -> Iterator[Path]:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, about in kind.model_fields.items():
            yield from ((name, *rest) for rest in _paths(about.annotation))
    elif typing.get_origin(kind) is dict and _has_sections(members[1]):
        yield from (("*", *rest) for rest in _paths(members[1]))
    elif typing.get_origin(kind) is not dict and any(map(_has_sections, members)):
        for member in members:
            yield from _paths(member)
    else:
        yield ()


def _has_sections(kind: Any) -> bool:
    return any(_paths(kind))


def _parts(key: str) -> Path:
    return tuple(key.split("."))


def _depth(key: str) -> int:
    return len(_parts(key))


def _fits(path: Path, pattern: Path) -> bool:
    """Whether they are the same as far as both go."""
    return all(want in ("*", part) for part, want in zip(path, pattern, strict=False))


def _schema_keys(path: Path) -> list[str]:
    """The schema's keys that a path sets: the one it names, or all of a section; none for an unknown key."""
    return [key for key in config_keys() if _fits(path, _parts(key))]


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


EVERY = tuple(Config.model_fields)
CONFIG = Honours("config", EVERY)
_EXAMPLES = "it looks at the examples alone; leave it out"
CHECK = Honours(
    "check",
    (
        "data",
        "tasks.*.source",
        "tasks.*.text",
        "tasks.*.label",
        "tasks.*.kind",
        "tasks.*.labels",
        "tasks.*.score_range",
        "clients.*.tasks",
        "clients.*.source",
    ),
    {section: _EXAMPLES for section in EVERY if section != "data"},
)

# A run honours every other setting: what an engine cannot do it refuses itself, before round 1.
ONLY_SERVER = {"federation.join_timeout": "only `fedmtl server` waits for sites; set it there"}
RUN = Honours("run", EVERY, ONLY_SERVER)

_ALONE = "every client trains by itself there; leave it out, or write `--engine local`"
_STACKED = {"compute.stack": (None, 0), "compute.precision": ("auto", "fp32")}
SIMULATION = Honours(
    "run --engine flower",
    EVERY,
    {**ONLY_SERVER, "compute.stack": _ALONE, "compute.precision": _ALONE},
    harmless=_STACKED,
)

_AT_SITES = "sites train, each its client by itself; leave it out"
SERVER = Honours(
    "server",
    EVERY,
    {
        "clients.*.source": "a site names its files itself, with `fedmtl client --data`",
        "compute.stack": _AT_SITES,
        "compute.precision": _AT_SITES,
        "evaluation.baselines": "the texts are at the sites, and nothing can be fitted to them here; leave it out",
    },
    harmless={**_STACKED, "evaluation.baselines": ("auto", "none")},
)

_EPOCHS = "write --epochs-intermediate and --epochs-prediction"
_RATES = "write --rate-intermediate and --rate-prediction"
_NO_CLIENTS = "there are no clients and rounds in it; leave it out"
_OF_TEACHER = "the student answers as its teacher was trained to; train a teacher with it"
_PLAIN = "a student is a plain encoder with heads; leave it out"
_OWN_LOSS = "its losses are those of --weights and --temperature; leave it out"
DISTILL = Honours(
    "distill",
    (
        "seed",
        "output",
        "data",
        "model.encoder_dropout",
        "tasks.*.source",
        "tasks.*.text",
        "tasks.*.label",
        "tasks.*.train_samples",
        "tasks.*.val_samples",
        "clients.*.tasks",
        "clients.*.source",
        "training.batch_size",
        "training.head_rate",
        "training.optimizer",
        "training.momentum",
        "training.betas",
        "training.epsilon",
        "training.weight_decay",
        "training.max_grad_norm",
        "training.pruning",
        "training.task_schedule",
        "training.anneal",
        "training.task_temperature",
        "compute.device",
        "energy",
    ),
    {
        "mode": _NO_CLIENTS,
        "defaults": "it goes on with the settings of the teacher's run; leave it out",
        "model.server_model": "name the student with --student, the language model of --augment with mlm:FOLDER",
        "model.client_model": "name the student with --student",
        "model.initial": "write --start random",
        "model.start_from": "name the student with --student",
        "model.pool": _OF_TEACHER,
        "model.pair": _OF_TEACHER,
        "model.max_length": _OF_TEACHER,
        "model.windows": _OF_TEACHER,
        "model.head_dropout": _OF_TEACHER,
        "model.lora": _PLAIN,
        "model.adapters": _PLAIN,
        "tasks.*.kind": _OF_TEACHER,
        "tasks.*.labels": _OF_TEACHER,
        "tasks.*.score_range": _OF_TEACHER,
        "tasks.*.metric": _OF_TEACHER,
        "tasks.*.pair": _OF_TEACHER,
        "tasks.*.pool": _OF_TEACHER,
        "tasks.*.outputs": _OF_TEACHER,
        "tasks.*.class_weights": _OF_TEACHER,
        "tasks.*.dropout": _OF_TEACHER,
        "tasks.*.head": _OF_TEACHER,
        "tasks.*.auxiliary": _OF_TEACHER,
        "tasks.*.weight": "tasks count alike in it; leave it out",
        "tasks.*.learning_rate": _RATES,
        "tasks.*.batch_size": "all tasks have training.batch_size in it; set that",
        "tasks.*.patience": _NO_CLIENTS,
        "tasks.*.from_round": _NO_CLIENTS,
        "tasks.*.until_round": _NO_CLIENTS,
        "clients.*.from_round": _NO_CLIENTS,
        "clients.*.until_round": _NO_CLIENTS,
        "clients.*.tasks_from_round": _NO_CLIENTS,
        "partition": _NO_CLIENTS,
        "sharing": "all tasks share the student's encoder, each has its head; leave it out",
        "training.num_rounds": _EPOCHS,
        "training.local_epochs": _EPOCHS,
        "training.local_steps": _EPOCHS,
        "training.min_steps": _EPOCHS,
        "training.learning_rate": _RATES,
        "training.schedule": "a rate rises for a tenth of a stage, then falls; write --rate-prediction for its top",
        "training.warmup_rounds": "a rate rises for a tenth of a stage, then falls; leave it out",
        "training.step_rounds": "a rate rises for a tenth of a stage, then falls; leave it out",
        "training.step_factor": "a rate rises for a tenth of a stage, then falls; leave it out",
        "training.task_weight_in": "tasks count alike in it; leave it out",
        "training.keep": "a student is that of its last pass; leave it out",
        "training.keep_optimizer": _NO_CLIENTS,
        "training.proximal": _NO_CLIENTS,
        "training.logit_adjustment": _NO_CLIENTS,
        "training.gradients": "a step is of one task; leave it out",
        "training.loss_weighting": "tasks count alike in it; leave it out",
        "training.smart": _OWN_LOSS,
        "training.distillation": _OWN_LOSS,
        "federation": _NO_CLIENTS,
        "privacy": _NO_CLIENTS,
        "wire": _NO_CLIENTS,
        "evaluation": "a student is scored after every pass of the prediction stage; leave it out",
        "checkpoint": "every whole pass is saved, until the student is; leave it out",
        "compute.workers": "it trains in one process; leave it out",
        "compute.stack": "it trains in one process; leave it out",
        "compute.precision": "it computes in fp32; leave it out",
        "compute.encoder": "it chooses what computes the encoder; leave it out",
        "methods": _NO_CLIENTS,
        "track": "send the student when it is done, with `fedmtl track STUDENT --to NAME`",
    },
    values={("training.task_schedule", "joint"): "a step is of one task; write another schedule"},
)

_STARTS = "a pruned run starts with the model of the run it is named after; leave it out"
PRUNE = Honours(
    "prune",
    EVERY,
    {
        **ONLY_SERVER,
        "model.server_model": _STARTS,
        "model.client_model": _STARTS,
        "model.initial": _STARTS,
        "model.start_from": _STARTS,
        "training.num_rounds": "write --epochs, of which each is a round",
        "training.pruning.amount": "write --amount",
    },
)

COMMANDS = {known.command: known for known in (RUN, SIMULATION, CONFIG, CHECK, SERVER, DISTILL, PRUNE)}
