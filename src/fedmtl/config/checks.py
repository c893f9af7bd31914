"""Settings that are fine alone and impossible together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedmtl.config import AdaptersConfig, Config
from fedmtl.config.errors import did_you_mean, shown
from fedmtl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LEVEL = re.compile(r"all|group(\.[1-9][0-9]*)?|task|client|fixed")


def check_config(config: Config) -> None:
    """Raise a ConfigError that names the key where two settings contradict each other."""
    _check_names("tasks", config.tasks)
    _check_names("clients", config.clients)
    _check_model(config)
    _check_rounds(config)
    _check_tasks(config)
    _check_labels(config)
    _check_several_tasks(config)
    _check_distillation(config)
    _check_pruning(config)
    if config.partition.kind == "column" and config.partition.column is None:
        raise ConfigError("partition.column: missing; partition.kind `column` needs the name of a column")
    depth = _check_groups(config.sharing.groups, config.tasks)
    _check_rules(config.sharing.rules, depth)
    _check_adaptive(config, depth)


def _check_names(path: str, names: Iterable[str]) -> None:
    # They stand in scopes, parameter names, file names and `--set` paths, each with its own separators.
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: found the name {shown(name)}; use letters from a to z, digits, `_` and `-`,"
                " 64 at most, and begin with a letter or a digit"
            )


def _check_model(config: Config) -> None:
    client, server = config.model.client_model, config.model.server_model
    if client is not None and client != server:
        raise ConfigError(
            f"model.client_model: found {shown(client)}, model.server_model is {shown(server)};"
            " encoders that are averaged must be equal, so give both the same value or leave client_model out"
        )
    if config.model.adapters is not None:
        _check_adapters(config.model.adapters, config.tasks)


def _check_adapters(adapters: AdaptersConfig, tasks: Mapping[str, Any]) -> None:
    for task in adapters.tasks or ():
        if task not in tasks:
            raise ConfigError(f"model.adapters.tasks: unknown task {shown(task)}; {did_you_mean(task, list(tasks))}")
    if adapters.kind == "mixed" and adapters.share != "none":
        raise ConfigError(
            f"model.adapters.share: found {adapters.share}, but `mixed` says itself what is shared; leave it out"
        )
    if adapters.kind == "low_rank" and adapters.share == "all":
        raise ConfigError("model.adapters.share: found all, but `low_rank` has no attention; write `projections`")
    if adapters.kind != "low_rank" and adapters.size is not None and adapters.size % adapters.heads:
        raise ConfigError(
            f"model.adapters.heads: found {adapters.heads}, which does not divide the size, {adapters.size}"
        )


def _check_rounds(config: Config) -> None:
    training, federation = config.training, config.federation
    if training.warmup_rounds > training.num_rounds:
        raise ConfigError(
            f"training.warmup_rounds: found {training.warmup_rounds:g}, it must be at most"
            f" training.num_rounds, which is {training.num_rounds}"
        )
    sampled = federation.clients_per_round
    if sampled is not None and sampled < federation.min_clients:
        raise ConfigError(
            f"federation.clients_per_round: found {sampled}, it must be at least"
            f" federation.min_clients, which is {federation.min_clients}"
        )
    spans = {f"tasks.{name}": task for name, task in config.tasks.items()}
    for path, span in (spans | {f"clients.{name}": client for name, client in config.clients.items()}).items():
        if span.until_round is not None and span.until_round < span.from_round:
            raise ConfigError(
                f"{path}.until_round: found {span.until_round}, it must be at least"
                f" {path}.from_round, which is {span.from_round}"
            )


def _check_tasks(config: Config) -> None:
    for name, task in config.tasks.items():
        if task.score_range is not None and task.score_range[0] >= task.score_range[1]:
            low, high = task.score_range
            raise ConfigError(
                f"tasks.{name}.score_range: found [{low:g}, {high:g}], the first must be less than the second"
            )
        twice = _first_repeated(task.labels or [])
        if twice is not None:
            raise ConfigError(f"tasks.{name}.labels: {shown(twice)} stands there twice; keep one")


def _check_labels(config: Config) -> None:
    for name, given in config.tasks.items():
        if config.training.logit_adjustment and given.class_weights == "balanced":
            raise ConfigError(
                f"tasks.{name}.class_weights: found balanced with training.logit_adjustment; both make up for a"
                " client's shares of labels, so keep one"
            )


def _check_several_tasks(config: Config) -> None:
    training = config.training
    if training.gradients == "pcgrad" and training.task_schedule != "joint":
        raise ConfigError(
            f"training.gradients: pcgrad compares the tasks of one step, training.task_schedule is"
            f" {training.task_schedule}; write `task_schedule: joint`"
        )
    rates = {name: task.learning_rate or training.learning_rate for name, task in config.tasks.items()}
    if training.task_schedule == "joint" and len(set(rates.values())) > 1:
        found = ", ".join(f"{rate:g} for {name}" for name, rate in rates.items())
        raise ConfigError(
            f"training.task_schedule: a joint step has one learning rate, found {found};"
            " write one learning rate, training.learning_rate"
        )
    weighted = [name for name, task in config.tasks.items() if task.weight != 1.0]
    if training.loss_weighting == "uncertainty" and training.task_weight_in == "loss" and weighted:
        raise ConfigError(
            f"training.loss_weighting: uncertainty learns what tasks.{weighted[0]}.weight is to say of the loss;"
            " write `task_weight_in: averaging` or leave the weight out"
        )


def _check_distillation(config: Config) -> None:
    told = config.training.distillation
    if told is None:
        return
    path = "training.distillation"
    for task in told.tasks or ():
        if task not in config.tasks:
            raise ConfigError(f"{path}.tasks: unknown task {shown(task)}; {did_you_mean(task, list(config.tasks))}")
    if told.where == "clients" and told.texts:
        raise ConfigError(
            f"{path}.texts: clients learn from their own examples; write `where: server`, or leave it out"
        )
    if told.where == "server" and not told.texts:
        raise ConfigError(f"{path}.texts: missing; `where: server` needs files of texts without labels")


def _check_pruning(config: Config) -> None:
    told, path = config.training.pruning, "training.pruning"
    if told is None:
        return
    if config.model.lora is not None:
        raise ConfigError(f"{path}: found with model.lora, whose encoder does not train; leave one of them out")
    if config.mode == "local":
        raise ConfigError(f"{path}: found with mode local, where no weight is the server's to prune; take another mode")
    if config.sharing.adaptive is not None:
        raise ConfigError(f"{path}: found with sharing.adaptive, where merging would revive weights; leave one out")
    last = told.start_round + told.rounds - 1
    if last > config.training.num_rounds:
        raise ConfigError(
            f"{path}.rounds: found {told.rounds} from start_round {told.start_round}, that is up to round {last};"
            f" training.num_rounds is {config.training.num_rounds}"
        )


def _check_rules(rules: list[dict[str, str]], depth: int) -> None:
    for number, rule in enumerate(rules):
        path = f"sharing.rules.{number}"
        if len(rule) != 1:
            raise ConfigError(f"{path}: has {len(rule)} patterns, a rule is one; write `- pattern: level`")
        ((pattern, level),) = rule.items()
        if not _LEVEL.fullmatch(level):
            levels = ["all", "group", "group.N", "task", "client", "fixed"]
            raise ConfigError(f"{path}.{pattern}: found {shown(level)}; {did_you_mean(level, levels)}")
        if level.startswith("group"):
            _check_group_level(f"{path}.{pattern}", level, depth)


def _check_group_level(path: str, level: str, depth: int) -> None:
    if depth == 0:
        raise ConfigError(
            f"{path}: level `{level}` needs groups; name them, such as `sharing.groups: {{pair: [a, b]}}`"
        )
    wanted = int(level.partition(".")[2] or 1)
    if wanted > depth:
        raise ConfigError(f"{path}: found `{level}`, sharing.groups is {depth} deep; use at most `group.{depth}`")


def _check_adaptive(config: Config, depth: int) -> None:
    adaptive = config.sharing.adaptive
    if adaptive is None:
        return
    if config.mode != "federated":
        raise ConfigError(
            f"sharing.adaptive: found with mode {config.mode}, whose plan is what it is compared by;"
            " write `mode: federated`, or `adaptive: null`"
        )
    if len(config.tasks) < 2:
        raise ConfigError("sharing.adaptive: found with one task; layers split between tasks, so name two or more")
    if adaptive.split_below >= adaptive.merge_above:
        raise ConfigError(
            f"sharing.adaptive.split_below: found {adaptive.split_below:g}, it must be less than merge_above, which is"
            f" {adaptive.merge_above:g}"
        )
    for level in adaptive.levels or ():
        if not _LEVEL.fullmatch(level) or level in ("client", "fixed"):
            raise ConfigError(
                f"sharing.adaptive.levels: found {shown(level)}; {did_you_mean(level, ['all', 'group', 'task'])}"
            )
        if level.startswith("group"):
            _check_group_level("sharing.adaptive.levels", level, depth)
    twice = _first_repeated(adaptive.levels or [])
    if twice is not None:
        raise ConfigError(f"sharing.adaptive.levels: {shown(twice)} stands there twice; keep one")


def _check_groups(groups: Mapping[str, Any], tasks: Mapping[str, Any]) -> int:
    """The depth of the tree of groups; 0 is no groups."""
    found: dict[str, str] = {}
    deepest = 0
    for names, members in _walk(groups, ()):
        path = ".".join(("sharing.groups", *names))
        deepest = max(deepest, len(names))
        for task in members:
            if task not in tasks:
                raise ConfigError(f"{path}: unknown task {shown(task)}; {did_you_mean(task, list(tasks))}")
            if task in found:
                raise ConfigError(f"{path}: {task} is in {found[task]} too; a task is in one group of a depth")
            found[task] = path
    return deepest


def _walk(groups: Mapping[str, Any], outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every group that lists tasks: its name after those of the groups around it, and the tasks."""
    _check_names(".".join(("sharing.groups", *outer)), map(str, groups))
    for name, members in groups.items():
        names = (*outer, str(name))
        if isinstance(members, Mapping) and members:
            yield from _walk(members, names)
        elif isinstance(members, list) and members:
            yield names, [str(member) for member in members]
        else:
            path = ".".join(("sharing.groups", *names))
            raise ConfigError(f"{path}: found {shown(members)}, it must be a list of tasks or groups of them")


def _first_repeated(words: list[str]) -> str | None:
    return next((word for index, word in enumerate(words) if word in words[:index]), None)
