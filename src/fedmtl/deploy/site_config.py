"""The server's config as a site takes it: nothing in it may name a file, a folder or a dataset that is then opened.

A site opens what its owner named on the command line or in its policy, and what is in the package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmtl.capabilities import BUILT_IN, TASK_KINDS, check_methods, unprotected
from fedmtl.config import ClientConfig, Config, HeadConfig
from fedmtl.config.file import config_from
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.deploy.tasks import check_deployable, configured_tasks
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.federation.handshake import Welcome
from fedmtl.federation.policy import TaskPolicy
from fedmtl.model.encoder_files import SHIPPED
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.resolve import known_task, resolve_task
from fedmtl.tasks.sources import find_table
from fedmtl.tasks.task import Task, client_sources

RANDOM_NAME = re.compile(r"random-([0-9]{1,2})x([0-9]{1,4})")
# As on the hub: nothing that could be a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
MOST = {
    "model.max_length": 8192,
    # Each is a sequence to compute, and they may overlap in all but a token.
    "model.windows.most": 256,
    "training.num_rounds": 1_000_000,
    "training.local_epochs": 10_000,
    "training.local_steps": 1_000_000,
    "training.batch_size": 65_536,
    "evaluation.batch_size": 65_536,
    # Their names are listed, to find out which part of the package's examples is this site's.
    "federation.clients_per_task": 100_000,
    "data.validation_fraction": 0.5,
    "model.lora.rank": 4096,
    "model.adapters.size": 4096,
}
# Less shows single examples, or a text's tokens one after the other.
LEAST = {"data.validation_fraction": 0.01, "model.max_length": 16}
MOST_LAYERS, MOST_WIDTH = 48, 2048
MOST_HIDDEN = 4096
# A step that large says more of its first batch than of all others.
MOST_RATE = 10.0
# Of what was learned before, a step may take back this share; with more, an update is of its last batches.
MOST_PULL = 0.1


def welcomed_config(welcome: Welcome) -> Config:
    """The config of a welcome, checked as any other, with every task's labels as the server names them."""
    config = config_from(dict(welcome.config))
    check_deployable(config)
    named = config.model_dump()
    for name, task in config.tasks.items():
        labels = welcome.terms.labels.get(name)
        if labels and task.labels is not None and task.labels != labels:
            raise ConfigError(f"tasks.{name}.labels: the server names other labels beside its config").coded(
                "config_unusable", name
            )
        named["tasks"][name]["labels"] = labels or task.labels
    return config_from(named)


def site_config(config: Config, settings: SiteSettings) -> Config:
    """Return the welcomed config as far as it concerns this site, with the site's files, encoder, teacher and cache."""
    _check_bounds(config)
    kinds = [task.kind for task in config.tasks.values() if task.kind not in (None, *TASK_KINDS)]
    named = [*(name for name in config.methods if name not in BUILT_IN), *kinds]
    foreign = [name for name in named if name not in settings.policy.methods]
    if foreign:
        raise PolicyError(
            f"the server's config switches on {foreign[0]}, which is not part of fedmtl; name it under methods in the"
            " policy if it is installed here"
        ).coded("policy_methods")
    check_methods(config)
    reason = unprotected(settings.policy, config)
    if reason is not None:
        raise PolicyError(reason).coded("policy_privacy")
    if settings.policy.require.secure_aggregation is not None and config.privacy.secure_aggregation is None:
        raise PolicyError(
            "the server's config does not sum updates under masks (privacy.secure_aggregation), which the policy"
            " requires (require.secure_aggregation)"
        ).coded("policy_protection")
    for name in settings.tasks:
        _check_task(config, name, settings)
    tasks = {name: config.tasks[name] for name in config.tasks if name in settings.tasks}
    changes: dict[str, Any] = {
        "tasks": {name: task.model_copy(update={"source": _source(config, name, settings)})
                  for name, task in tasks.items()},
        "clients": _clients(config, settings),
        "model": config.model.model_copy(update={**_encoder(config, settings), "start_from": None}),
        "data": config.data.model_copy(update={"root": settings.root, "cache": None}),
        "output": "runs",
    }  # fmt: skip
    if settings.root is not None:
        changes["data"] = changes["data"].model_copy(update={"source": "files"})
    elif config.data.source == "files":
        # Of the server's files there are none here; what remains is a dataset that the policy names.
        changes["data"] = changes["data"].model_copy(update={"source": "auto"})
    changes["training"] = config.training.model_copy(update={"distillation": _distillation(config, settings)})
    taken = config.model_copy(update=changes)
    for name in tasks:
        _check_columns(resolve_task(taken, name), settings.policy.tasks.get(name, TaskPolicy()))
    return taken


def _check_task(config: Config, name: str, settings: SiteSettings) -> None:
    if name not in config.tasks:
        raise ConfigError(f"--tasks: found {name}, the server's tasks are {', '.join(config.tasks)}").coded(
            "task_unknown"
        )
    if settings.policy.tasks and name not in settings.policy.tasks:
        raise PolicyError(f"the policy's tasks are {', '.join(settings.policy.tasks)}, not {name}").coded(
            "policy_tasks", name
        )
    try:
        known_task(config, name)
    except ConfigError as error:
        if "labels: found nothing" not in str(error):
            raise
        raise PolicyError(
            f"the server names no labels for {name}, and this site tells it none; its config needs tasks.{name}.labels"
        ).coded("labels_missing", name) from error


def _source(config: Config, name: str, settings: SiteSettings) -> Any:
    """Where the task's shared examples come from: nowhere, the package, or a dataset that the policy names."""
    if name in settings.files:
        return None
    if settings.root is not None and name in BUILTIN:
        if not BUILTIN[name].is_package_only and find_table(Path(settings.root) / name, ["train"]) is None:
            raise PolicyError(
                f"--data: {settings.root} has no train file of {name}; put train.tsv.gz into {name}/ there, or write"
                f" `--data {name}=FILE`"
            ).coded("policy_source", name)
        return None
    given, builtin = config.tasks[name].source, BUILTIN.get(name)
    wanted = given.hub if given else None
    if given is None and builtin is not None:
        if builtin.embedded and (builtin.hub is None or config.data.source == "embedded"):
            return None
        wanted = builtin.hub.dataset if builtin.hub else None
    if wanted is not None and wanted in settings.policy.hub_datasets and _is_on_the_hub(wanted):
        return given
    found = "a file" if given and given.train else f"the dataset {wanted}" if wanted else "nothing"
    raise PolicyError(
        f"--data: nothing for {name}, for which the server's config names {found}; write `--data {name}=FILE`"
        + (", or name the dataset under hub_datasets in the policy" if wanted else "")
    ).coded("policy_source", name)


def _is_on_the_hub(name: str) -> bool:
    """Whether a name can only be the hub's: libraries take a folder of that name first."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _encoder(config: Config, settings: SiteSettings) -> dict[str, str | None]:
    if settings.model is not None:
        return {"server_model": settings.model, "client_model": None}
    name = config.model.server_model
    random = RANDOM_NAME.fullmatch(name)
    if random is not None and (int(random[1]) > MOST_LAYERS or int(random[2]) > MOST_WIDTH):
        raise PolicyError(
            f"the server's config names the encoder {name}; a site takes at most random-{MOST_LAYERS}x{MOST_WIDTH}"
        ).coded("policy_encoder")
    if not (name in SHIPPED or random) and not (name in settings.policy.encoders and _is_on_the_hub(name)):
        raise PolicyError(
            f"the server's config names the encoder {name!r}; give --model FOLDER, or name it under encoders in the"
            " policy if it is on the hub"
        ).coded("policy_encoder")
    return {"server_model": name, "client_model": None}


def _distillation(config: Config, settings: SiteSettings) -> Any:
    distillation = config.training.distillation
    if distillation is None or distillation.where != "clients":
        return None
    if settings.policy.teacher is None:
        raise PolicyError(
            "the server's config has this site learn from a finished model; name its folder under teacher in the policy"
        ).coded("policy_teacher")
    return distillation.model_copy(update={"teacher": settings.policy.teacher, "texts": []})


def _clients(config: Config, settings: SiteSettings) -> dict[str, ClientConfig]:
    """Return this client with its files, and the other clients among whom the rest of the examples are dealt."""
    dealt = [task for task in settings.tasks if task not in settings.files]
    configured = configured_tasks(config)
    mine = configured.get(settings.client, ())
    for task in dealt:
        if settings.root is None and (task not in mine or settings.client in client_sources(config, task)):
            raise PolicyError(
                f"--data: found nothing for {task}, and the server's config deals {settings.client} none of it;"
                f" write `--data {task}=FILE`"
            ).coded("policy_source", task)
    sharing: dict[str, list[str]] = {}
    for client, client_tasks in configured.items() if set(dealt) <= set(mine) else ():
        others = [task for task in client_tasks if task in dealt and client not in client_sources(config, task)]
        if client != settings.client and others:
            sharing[client] = others
    sharing[settings.client] = [task for task in config.tasks if task in settings.tasks]
    # In the config's order: examples are dealt by it.
    order = dict.fromkeys([*(name for name in config.clients or configured if name in sharing), *sharing])
    return {
        name: ClientConfig.model_validate(
            {"tasks": sharing[name], "source": dict(settings.files) if name == settings.client else {}}
        )
        for name in order
    }


def _check_columns(task: Task, allowed: TaskPolicy) -> None:
    """Raise where the policy names other columns, labels or score ranges than the server's config."""
    for key, ours, theirs in (
        ("text", allowed.text and tuple(allowed.text), task.text),
        ("label", allowed.label, task.label),
    ):
        if ours is not None and ours != theirs:
            raise PolicyError(
                f"tasks.{task.name}.{key}: the server's config names {_words(theirs)}, the policy {_words(ours)}"
            ).coded("policy_columns", task.name)
    for key, mine, offered in (
        ("labels", allowed.labels and tuple(allowed.labels), task.labels),
        ("score_range", allowed.score_range, task.kind_of.scale(task)),
    ):
        if mine is not None and mine != offered:
            raise PolicyError(
                f"tasks.{task.name}.{key}: the server names {_words(offered)}, the policy {_words(mine)}"
            ).coded("policy_labels", task.name)
    if task.label in task.text:
        raise PolicyError(f"tasks.{task.name}: the server's config names {task.label} as text and as label").coded(
            "policy_columns", task.name
        )


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value or "none")


def _check_bounds(config: Config) -> None:
    plain = config.model_dump()
    for bounds, words in ((MOST, "at most"), (LEAST, "at least")):
        for path, bound in bounds.items():
            found = _value(plain, path)
            if found is not None and (found > bound if bounds is MOST else found < bound):
                raise PolicyError(f"{path}: the server's config says {found}, a site takes {words} {bound}").coded(
                    "policy_bounds"
                )
    training = config.training
    rates = [training.learning_rate, *(task.learning_rate or 0.0 for task in config.tasks.values())]
    sizes = [task.batch_size or 0 for task in config.tasks.values()]
    if max(rates) * max(1.0, training.head_rate) > MOST_RATE or max(sizes) > MOST["training.batch_size"]:
        raise PolicyError(
            f"training.learning_rate: the server's config has steps of {max(rates) * max(1.0, training.head_rate):g},"
            f" or batches of {max(sizes)}; a site takes at most {MOST_RATE:g} and {MOST['training.batch_size']}"
        ).coded("policy_bounds")
    for name, task in config.tasks.items():
        if isinstance(task.head, HeadConfig) and (task.head.hidden or 0) > MOST_HIDDEN:
            raise PolicyError(
                f"tasks.{name}.head.hidden: the server's config says {task.head.hidden}, a site takes at most"
                f" {MOST_HIDDEN}"
            ).coded("policy_bounds", name)
    steady = 1.0 - training.momentum if training.optimizer == "sgd" else 1.0
    pull = max(rates) * max(1.0, training.head_rate) * (training.proximal + training.weight_decay)
    if pull > MOST_PULL * steady:
        raise PolicyError(
            f"training.proximal: the server's config has each step take back {pull / steady if steady else 1:g} of"
            f" those before it, learning_rate times proximal and weight_decay; a site takes at most {MOST_PULL:g}"
        ).coded("policy_bounds")


def _value(config: Any, path: str) -> Any:
    """What a config says under a dotted key; None where a section on the way is empty."""
    for key in path.split("."):
        config = None if config is None else config[key]
    return config


def all_tasks(config: Config, site_tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return every task of the run: the model's shape also depends on those that this site has no examples of."""
    return {name: site_tasks[name] if name in site_tasks else known_task(config, name) for name in config.tasks}
