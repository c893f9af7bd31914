"""From a task's config and the built-in table to the `Task` everybody else sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fedmtl.capabilities import task_kind, task_kinds
from fedmtl.config import ClientConfig, Config, ModelConfig, TaskConfig
from fedmtl.errors import ConfigError
from fedmtl.tasks.builtin import BUILTIN, BuiltinTask
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.pretrained_head import with_pretrained_head
from fedmtl.tasks.task import HiddenLayer, Task, Windows, client_sources, task_clients


def resolve_task(config: Config, name: str, found: Sequence[str] = ()) -> Task:
    """The task with every key filled in: the user's, else the built-in one, else `model`'s default.

    `found` are the labels in the training data, for a classification that names none; until they
    are known its `labels` are empty. `outputs` is the width of the head.
    """
    given = config.tasks[name]
    kind, defaults = _defaults(config, name, given)
    text = _text(name, given, defaults, kind)
    labels = kind.labels(name, given, defaults, found)
    task = Task(
        name=name,
        kind=kind.name,
        text=text,
        label=_required(name, "label", given.label or defaults.label or kind.columns[1], "label: COLUMN"),
        metric=_metric(name, given, kind, defaults),
        labels=labels,
        score_range=kind.score_range(name, given, defaults),
        pair=_pair(name, given, text) or config.model.pair,
        pool=given.pool or config.model.pool,
        outputs=kind.outputs(name, given, labels),
        class_weights=kind.checked_class_weights(name, given, labels),
        weight=given.weight,
        learning_rate=given.learning_rate,
        batch_size=given.batch_size,
        dropout=config.model.head_dropout if given.dropout is None else given.dropout,
        patience=given.patience,
        auxiliary=given.auxiliary,
        head=_head(given),
        windows=_windows(config.model),
    )
    return with_pretrained_head(config, task) if given.head == "pretrained" else task


def known_task(config: Config, name: str, labels: Sequence[str] = ()) -> Task:
    """A task without looking at examples; its labels are the config's unless they are given."""
    alone = ClientConfig.model_validate({"tasks": [name], "source": {name: "unread"}})
    task = config.tasks[name].model_copy(update={"source": None})
    resolved = resolve_task(config.model_copy(update={"tasks": {name: task}, "clients": {"site": alone}}), name, labels)
    if resolved.kind_of.has_labels and not resolved.labels:
        raise ConfigError(
            f"tasks.{name}.labels: found nothing, and the server has no examples to find them in;"
            " write the labels in order"
        )
    return resolved


def check_tasks(config: Config) -> list[str]:
    """Resolve every task as a run does, without its examples; a mistake is the run's ConfigError.

    A task without a source can only be run over sites: what is returned says so, a line for each.
    """
    only_over_sites = []
    for name, given in config.tasks.items():
        try:
            resolve_task(config, name)
        except ConfigError as error:
            if given.source or name in BUILTIN:
                raise
            try:
                known_task(config, name)
            except ConfigError:
                raise error from None
            only_over_sites.append(f"{error}; `fedmtl server` takes it as it is, its sites bring the examples")
    return only_over_sites


def brings_all(config: Config, name: str) -> bool:
    """Whether a task's examples are all in files that its clients bring: each has a source, the task has none."""
    given = config.tasks[name]
    return given.source is None and len(client_sources(config, name)) == len(task_clients(config)[name])


def builtin_in_use(config: Config, name: str) -> BuiltinTask | None:
    """The built-in task a name stands for; under `data.source: embedded`, its embedded counterpart.

    Its labels are those of the name wherever the examples are: a site with files and a server without any agree.
    """
    builtin = BUILTIN.get(name)
    given = config.tasks[name]
    if builtin is None or given.source or brings_all(config, name):
        return builtin
    has_root = config.data.root is not None and config.data.source != "hub"
    if not has_root and builtin.hub is None and builtin.embedded is None:
        raise ConfigError(
            f"data.root: found nothing, and {name} is neither embedded nor on the hub; write `root: FOLDER` (with"
            f" {name}/train.tsv in it), or `tasks.{name}.source: {{train: FILE}}`"
        )
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
    return replace(BUILTIN[builtin.embedded], labels=builtin.labels)


def _defaults(config: Config, name: str, given: TaskConfig) -> tuple[TaskKind, BuiltinTask]:
    """The task's kind and the defaults that fit it; those of a task that is not built in are empty."""
    builtin, where = builtin_in_use(config, name), f"tasks.{name}.kind"
    if builtin is None:
        if given.kind is None:
            raise ConfigError(
                f"{where}: found nothing, and {name} is not built in ({', '.join(BUILTIN)} are); "
                f"write {' or '.join(f'`kind: {kind}`' for kind in task_kinds())}"
            )
        kind = task_kind(given.kind, where)
        _check_source(config, name, given)
        return kind, BuiltinTask(given.kind, text=(), metric="", label="")
    if given.kind is None or given.kind == builtin.kind:
        return task_kind(builtin.kind), builtin
    kind = task_kind(given.kind, where)
    if _has_embedded_examples(config, name, builtin) and kind.by_word != task_kind(builtin.kind).by_word:
        raise ConfigError(
            f"{where}: found {kind.name}, and the embedded examples of {name} are of kind {builtin.kind}; leave it out,"
            f" or write `tasks.{name}.source: {{train: FILE}}`"
        )
    return kind, replace(builtin, labels=(), score_range=None, metric="")


def _has_embedded_examples(config: Config, name: str, builtin: BuiltinTask) -> bool:
    """Whether a built-in task's examples are those of the package."""
    if config.tasks[name].source or brings_all(config, name):
        return False
    has_root = config.data.root is not None and config.data.source != "hub"
    return config.data.source == "embedded" or (builtin.hub is None and not has_root)


def _check_source(config: Config, name: str, given: TaskConfig) -> None:
    if given.source or brings_all(config, name):
        return
    without = [client for client in task_clients(config)[name] if client not in client_sources(config, name)]
    raise ConfigError(
        f"tasks.{name}.source: found nothing, and {without[0]} has no file of its own; "
        "write `source: {train: FILE}` or `source: {hub: OWNER/NAME}`"
    )


def _windows(config: ModelConfig) -> Windows | None:
    given = config.windows
    return None if given is None else Windows(given.stride, given.most, given.pool)


def _required(name: str, key: str, value: str, remedy: str) -> str:
    if not value:
        raise ConfigError(f"tasks.{name}.{key}: found nothing, and {name} is not built in; write `{remedy}`")
    return value


def _text(name: str, given: TaskConfig, defaults: BuiltinTask, kind: TaskKind) -> tuple[str, ...]:
    text = tuple(given.text or defaults.text or kind.columns[0])
    if not text:
        _required(name, "text", "", "text: [COLUMN]` or `text: [COLUMN, COLUMN]")
    if kind.by_word:
        _check_by_word(name, given, kind, text)
    return text


def _check_by_word(name: str, given: TaskConfig, kind: TaskKind, text: tuple[str, ...]) -> None:
    """Raise a ConfigError for a key that means nothing where every word has an answer."""
    if len(text) > 1:
        raise ConfigError(f"tasks.{name}.text: found {len(text)} columns on {kind.words}, whose texts are one; name it")
    if given.pool is not None:
        raise ConfigError(f"tasks.{name}.pool: found on {kind.words}, whose head reads every word; remove it")


def _pair(name: str, given: TaskConfig, text: tuple[str, ...]) -> Literal["cross", "dual"] | None:
    if given.pair and len(text) == 1:
        raise ConfigError(
            f"tasks.{name}.pair: found {given.pair}, and the task has one text column ({text[0]}); "
            "write a second one under `text`, or remove it"
        )
    return given.pair


def _head(given: TaskConfig) -> HiddenLayer | None:
    if given.head is None or given.head == "pretrained":
        return None
    return HiddenLayer(given.head.hidden, given.head.activation, given.head.dropout)


def _metric(name: str, given: TaskConfig, kind: TaskKind, defaults: BuiltinTask) -> str:
    metric = given.metric or defaults.metric or kind.main_metrics[0]
    if metric not in kind.main_metrics:
        raise ConfigError(
            f"tasks.{name}.metric: found {metric} on {kind.words}, write one of {', '.join(kind.main_metrics)}"
        )
    return metric
