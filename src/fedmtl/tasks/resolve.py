"""From a task's config and the built-in table to the `Task` everybody else sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fedmtl.config import Config, TaskConfig
from fedmtl.errors import ConfigError
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask
from fedmtl.tasks.membership import own_sources, task_clients
from fedmtl.tasks.task import Task

Kind = Literal["classification", "regression"]

MAIN_METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
}


def resolve_task(config: Config, name: str, found: Sequence[str] = ()) -> Task:
    """The task with every key filled in: the user's, else the built-in one, else `model`'s default.

    `found` are the labels in the training data, for a classification that names none; until they
    are known its `labels` are empty. `outputs` is the width of the head.
    """
    given = config.tasks[name]
    _check_splits(config, name)
    kind, defaults = _defaults(config, name, given)
    text = _text(name, given, defaults)
    labels = _labels(name, given, kind, defaults, found)
    return Task(
        name=name,
        kind=kind,
        text=text,
        label=_required(name, "label", given.label or defaults.label, "label: COLUMN"),
        metric=_metric(name, given, kind, defaults),
        labels=labels,
        score_range=_score_range(name, given, kind, defaults),
        pair=_pair(name, given, text) or config.model.pair,
        pool=given.pool or config.model.pool,
        outputs=_outputs(name, given, kind, labels),
        class_weights=_class_weights(name, given, kind, labels),
        weight=given.weight,
        learning_rate=given.learning_rate,
        batch_size=given.batch_size,
        dropout=config.model.head_dropout if given.dropout is None else given.dropout,
        patience=given.patience,
        auxiliary=given.auxiliary,
    )


def brings_all(config: Config, name: str) -> bool:
    """Whether a task's examples are all in its clients' own files: each has a source, the task has none."""
    given = config.tasks[name]
    return given.source is None and len(own_sources(config, name)) == len(task_clients(config)[name])


def builtin_in_use(config: Config, name: str) -> BuiltinTask | None:
    """The built-in task a name stands for; under `data.source: embedded`, its embedded counterpart."""
    builtin = BUILTIN.get(name)
    given = config.tasks[name]
    if builtin is None or given.source or brings_all(config, name):
        return builtin
    if config.data.source == "files" and config.data.root is None and builtin.hub is not None:
        raise ConfigError("data.root: found nothing with `source: files`, write `root: FOLDER`")
    if config.data.source != "embedded":
        return builtin
    if builtin.embedded is None:
        embedded = [task for task, entry in BUILTIN.items() if entry.embedded]
        raise ConfigError(
            f"data.source: found embedded, and {name} is not embedded (only {', '.join(embedded)} are); "
            f"write `source: auto`, or remove {name}"
        )
    return BUILTIN[builtin.embedded]


def _defaults(config: Config, name: str, given: TaskConfig) -> tuple[Kind, BuiltinTask]:
    """The task's kind and the defaults that fit it; an own task's are empty."""
    builtin = builtin_in_use(config, name)
    if builtin is None:
        if given.kind is None:
            raise ConfigError(
                f"tasks.{name}.kind: found nothing, and {name} is not built in ({', '.join(BUILTIN)} are); "
                "write `kind: classification` or `kind: regression`"
            )
        _check_source(config, name, given)
        return given.kind, BuiltinTask(given.kind, text=(), metric="", label="")
    if given.kind is None or given.kind == builtin.kind:
        return builtin.kind, builtin
    return given.kind, replace(builtin, labels=(), score_range=None, metric="")


def _check_source(config: Config, name: str, given: TaskConfig) -> None:
    if given.source or brings_all(config, name):
        return
    without = [client for client in task_clients(config)[name] if client not in own_sources(config, name)]
    raise ConfigError(
        f"tasks.{name}.source: found nothing, and {without[0]} has no file of its own; "
        "write `source: {train: FILE}` or `source: {hub: OWNER/NAME}`"
    )


def _check_splits(config: Config, name: str) -> None:
    """No run may train on a test split or choose its best round by one."""
    sources = {f"clients.{client}.source.{name}": source for client, source in own_sources(config, name).items()}
    if given := config.tasks[name].source:
        sources[f"tasks.{name}.source"] = given
    for where, source in sources.items():
        for key, split in (
            ("train_split", source.train_split),
            ("validation_split", source.validation_split),
        ):
            if split and split.startswith("test"):
                raise ConfigError(
                    f"{where}.{key}: found {split}, and test splits are not for training and tuning; "
                    "write another split, or remove it (validation is then cut from train)"
                )


def _required(name: str, key: str, value: str, remedy: str) -> str:
    if not value:
        raise ConfigError(f"tasks.{name}.{key}: found nothing, and {name} is not built in; write `{remedy}`")
    return value


def _text(name: str, given: TaskConfig, defaults: BuiltinTask) -> tuple[str, ...]:
    text = tuple(given.text or defaults.text)
    if not text:
        _required(name, "text", "", "text: [COLUMN]` or `text: [COLUMN, COLUMN]")
    return text


def _pair(name: str, given: TaskConfig, text: tuple[str, ...]) -> Literal["cross", "dual"] | None:
    if given.pair and len(text) == 1:
        raise ConfigError(
            f"tasks.{name}.pair: found {given.pair}, and the task has one text column ({text[0]}); "
            "write a second one under `text`, or remove it"
        )
    return given.pair


def _labels(name: str, given: TaskConfig, kind: Kind, defaults: BuiltinTask, found: Sequence[str]) -> tuple[str, ...]:
    if kind == "regression":
        if given.labels:
            raise ConfigError(f"tasks.{name}.labels: found on a regression; write `score_range: [LOW, HIGH]` instead")
        return ()
    labels = tuple(given.labels or defaults.labels or found)
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise ConfigError(f"tasks.{name}.labels: found {twice[0]!r} twice, write each label once")
    return labels


def _score_range(name: str, given: TaskConfig, kind: Kind, defaults: BuiltinTask) -> tuple[float, float]:
    where = f"tasks.{name}.score_range"
    if kind == "classification":
        if given.score_range:
            raise ConfigError(f"{where}: found on a classification; remove it, or write `kind: regression`")
        return 0.0, 1.0
    scores = given.score_range or defaults.score_range
    if scores is None:
        raise ConfigError(
            f"{where}: found nothing, and a regression needs its lowest and highest score; "
            "write `score_range: [0, 5]` for scores from 0 to 5"
        )
    if not scores[0] < scores[1]:
        raise ConfigError(f"{where}: found [{scores[0]:g}, {scores[1]:g}], write the lower score first")
    return scores


def _metric(name: str, given: TaskConfig, kind: Kind, defaults: BuiltinTask) -> str:
    metric = given.metric or defaults.metric or MAIN_METRICS[kind][0]
    if metric not in MAIN_METRICS[kind]:
        raise ConfigError(
            f"tasks.{name}.metric: found {metric} on a {kind}, write one of {', '.join(MAIN_METRICS[kind])}"
        )
    return metric


def _outputs(name: str, given: TaskConfig, kind: Kind, labels: tuple[str, ...]) -> int:
    width = 1 if kind == "regression" else len(labels) or 2
    if given.outputs is None or given.outputs == width or (given.outputs == 1 and width == 2):
        return given.outputs or width
    what = "a regression" if kind == "regression" else f"{width} classes"
    raise ConfigError(
        f"tasks.{name}.outputs: found {given.outputs} on {what}, write it for two classes only or remove it"
    )


def _class_weights(
    name: str, given: TaskConfig, kind: Kind, labels: tuple[str, ...]
) -> Literal["none", "balanced"] | tuple[float, ...]:
    where, weights = f"tasks.{name}.class_weights", given.class_weights
    if kind == "regression" and weights != "none":
        raise ConfigError(f"{where}: found on a regression, which has no classes; write `none` or remove it")
    if not isinstance(weights, list):
        return weights
    if labels and len(weights) != len(labels):
        raise ConfigError(
            f"{where}: found {len(weights)} weights for {len(labels)} labels, write one for each of {', '.join(labels)}"
        )
    return tuple(weights)
