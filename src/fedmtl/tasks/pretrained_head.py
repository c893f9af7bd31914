"""`head: pretrained`: the head that an encoder's folder was saved with, by a class ...ForSequenceClassification.

Here is what the folder's config.json says of it; `model/multitask.py` loads its values. Nothing numeric is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.foreign import excerpt, read_json
from fedmtl.tasks.task import HiddenLayer, Task

CLASS = "ForSequenceClassification"


@dataclass(frozen=True)
class HeadLayout:
    """Where a class has its head: what it pools, the output layer, and the hidden layer with what follows it."""

    pool: Literal["pooler", "cls"]
    output: str
    hidden: str | None = None
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    dropout: str = "classifier_dropout"
    drops_before: bool = True


# By the `model_type` of a config.json.
LAYOUTS = {
    "bert": HeadLayout("pooler", "classifier"),
    "albert": HeadLayout("pooler", "classifier"),
    "distilbert": HeadLayout(
        "cls", "classifier", "pre_classifier", "relu", dropout="seq_classif_dropout", drops_before=False
    ),
    "roberta": HeadLayout("cls", "classifier.out_proj", "classifier.dense", "tanh"),
    "mpnet": HeadLayout("cls", "classifier.out_proj", "classifier.dense", "tanh"),
    "electra": HeadLayout("cls", "classifier.out_proj", "classifier.dense", "gelu"),
}


def with_pretrained_head(config: Config, task: Task) -> Task:
    """The task with the pooling and the hidden layer that the folder's class has; a ConfigError where it has none."""
    where = f"tasks.{task.name}.head"
    if task.kind != "classification":
        raise ConfigError(f"{where}: found pretrained on a task that is {task.kind_of.words}; leave it out")
    if task.is_dual:
        raise ConfigError(f"{where}: found pretrained with `pair: dual`, which no such head has; write `pair: cross`")
    if config.model.initial == "random":
        raise ConfigError(f"{where}: found pretrained with `model.initial: random`; leave one of them out")
    saved = _saved_config(config.model.server_model, where)
    layout = _layout(saved, config.model.server_model, where)
    if task.pool not in ("auto", layout.pool):
        key = "model.pool" if config.tasks[task.name].pool is None else f"tasks.{task.name}.pool"
        raise ConfigError(
            f"{where}: the head of {config.model.server_model} reads `pool: {layout.pool}`, found {key}={task.pool};"
            f" write tasks.{task.name}.pool={layout.pool}"
        )
    _check_labels(saved, config, task)
    hidden = None
    if layout.hidden is not None:
        behind = saved.get(layout.dropout)
        hidden = HiddenLayer(None, layout.activation, 0.1 if behind is None else float(behind))
    before = task.dropout if layout.drops_before or config.tasks[task.name].dropout is not None else 0.0
    return replace(task, pool=layout.pool, dropout=before, head=hidden, head_start="pretrained")


def written_out(task: Task) -> dict[str, Any]:
    """The keys of a config's task with the shape of such a head, for a run whose values come from elsewhere."""
    head = task.head
    shape = None if head is None else {"hidden": head.size, "activation": head.activation, "dropout": head.dropout}
    return {"head": shape, "pool": task.pool, "dropout": task.dropout}


def _saved_config(name: str, where: str) -> Mapping[str, Any]:
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{where}: found pretrained, and model.server_model, {name}, is no folder with a config.json; name one that"
            f" was saved as ...{CLASS}"
        )
    saved = read_json(folder / "config.json", "put back a copy of the file", ConfigError)
    return saved if isinstance(saved, dict) else {}


def _layout(saved: Mapping[str, Any], name: str, where: str) -> HeadLayout:
    classes = saved.get("architectures")
    found = str(classes[0]) if isinstance(classes, list) and classes else "nothing"
    if not found.endswith(CLASS):
        raise ConfigError(
            f"{where}: found pretrained, and {name} has no head: it was saved as {excerpt(found)}, not as"
            f" ...{CLASS}; leave it out for a fresh head"
        )
    kind = str(saved.get("model_type"))
    if kind not in LAYOUTS:
        raise ConfigError(
            f"{where}: found pretrained, and the head of {excerpt(kind)} is not known here; those of"
            f" {', '.join(LAYOUTS)} are"
        )
    return LAYOUTS[kind]


def _check_labels(saved: Mapping[str, Any], config: Config, task: Task) -> None:
    """Raise where the folder's labels are other ones; until the task's are known, nothing can be said."""
    where, name = f"tasks.{task.name}.head", config.model.server_model
    labels = saved.get("id2label")
    names = [str(label) for _, label in sorted(labels.items(), key=_number)] if isinstance(labels, dict) else []
    theirs = len(names) or 2
    ours = task.kind_of.num_outputs(task)
    if not task.labels:
        return
    if theirs != ours:
        raise ConfigError(
            f"{where}: the head of {name} has {theirs} outputs, and {task.name} has {ours} ({', '.join(task.labels)});"
            " leave `head` out for a fresh one"
        )
    folded = [label.casefold() for label in task.labels]
    known = [label.casefold() for label in names]
    if known != folded and sorted(known) == sorted(folded):
        raise ConfigError(
            f"{where}: the head of {name} has its labels in the order {', '.join(names)};"
            f" write tasks.{task.name}.labels in that order"
        )


def _number(entry: tuple[str, Any]) -> int:
    try:
        return int(entry[0])
    except ValueError:
        return 0
