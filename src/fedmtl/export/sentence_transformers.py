"""A folder that sentence-transformers loads: `encode` gives the vectors that our heads see.

The encoder's states are pooled by their mean or their first position, as the tasks say. The head of a task on single
texts is one or two Dense modules, which leave the vector as it is and write the head's outputs beside it, under the
task's name. The head of a pair sees two texts at once, for which sentence-transformers has no module: what is carried
over of such a task is the vectors that it compares. Where tasks have layers of their own, every task has a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmtl.export.encoder import (
    POOLING,
    TaskValues,
    heads_of,
    new_folder,
    plain_config,
    plain_head,
    plain_values,
    save_tokenizer,
    save_values,
    write_modules,
)
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import SavedModel
from fedmtl.tasks.task import Task

ACTIVATIONS = {
    "relu": "torch.nn.modules.activation.ReLU",
    "tanh": "torch.nn.modules.activation.Tanh",
    "gelu": "torch.nn.modules.activation.GELU",
}
IDENTITY = "torch.nn.modules.linear.Identity"
VECTOR = "sentence_embedding"


def export_sentence_transformers(
    saved: SavedModel, bound: BoundModel, folder: Path, card: Callable[[str], str]
) -> dict[str, Path | str]:
    """Write the folder, or one for each task where their encoders differ; by task, its folder or why it has none.

    `card` makes the README.md from the lines that show how to use a folder.
    """
    weights = bound.weights()
    tasks = [plain_values(bound.use(name), name, view, weights) for name, view in bound.views.items()]
    reasons = {task.task: _reason(saved, task) for task in tasks}
    fitting = [task for task in tasks if reasons[task.task] is None]
    groups: dict[Any, list[TaskValues]] = {}
    for task in fitting:
        groups.setdefault((task.signature, saved.model.pools[task.task]), []).append(task)
    written: dict[str, Path | str] = {task: f"{task}: {reason}" for task, reason in reasons.items() if reason}
    if groups:
        with new_folder(folder) as hidden:
            for group in groups.values():
                # One encoder is the folder itself; of several, each task has one.
                for each in [group] if len(groups) == 1 else [[task] for task in group]:
                    inner = Path() if len(groups) == 1 else Path(each[0].task)
                    _write(hidden / inner, saved, each, card)
                    written |= {task.task: folder / inner for task in each}
    return {task: written[task] for task in bound.views}


def _reason(saved: SavedModel, values: TaskValues) -> str | None:
    task, pool = saved.tasks[values.task], saved.model.pools[values.task]
    if task.is_pair and not task.is_dual:
        return "reads two texts in one pass (`pair: cross`), so a text has no vector; write `--to hf` or `--to onnx`"
    if task.windows is not None:
        return (
            "reads long texts in windows (`model.windows`), which have no module there; write `--to hf` or `--to onnx`"
        )
    if pool not in POOLING:
        return f"pools by `{pool}`, which sentence-transformers has no module for; write `--to hf` or `--to onnx`"
    if values.has_adapters:
        return "has adapters (`model.adapters`) between the layers; write `--to hf` or `--to onnx`"
    return None


def _write(folder: Path, saved: SavedModel, tasks: Sequence[TaskValues], card: Callable[[str], str]) -> None:
    folder.mkdir(exist_ok=True)
    first = tasks[0]
    save_values(folder / "model.safetensors", first.encoder)
    save_tokenizer(saved.encoder, saved.max_length, folder)
    (folder / "config.json").write_text(json.dumps(plain_config(saved.encoder), indent=2))
    dense: dict[str, tuple[Mapping[str, Any], Mapping[str, Tensor]]] = {}
    labels: dict[str, Any] = {}
    for values in tasks:
        task = saved.tasks[values.task]
        if not task.is_pair:
            dense |= _dense(task, values, len(dense) + 2)
            labels[task.name] = {"kind": task.kind, "labels": list(task.labels), "outputs": _names(task, values)}
    layers = [(path, config) for path, (config, _) in dense.items()]
    pool = saved.model.pools[first.task]
    write_modules(folder, pool, saved.encoder.hidden_size, saved.max_length, layers)
    for path, (_, parts) in dense.items():
        save_values(folder / path / "model.safetensors", parts)
    if labels:
        (folder / "labels.json").write_text(json.dumps(labels, indent=2, ensure_ascii=False))
    (folder / "README.md").write_text(card(_usage(list(labels), saved)))


def _dense(task: Task, values: TaskValues, number: int) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Tensor]]]:
    """The Dense modules of a head, by their folder: each with its config and its values."""
    head = plain_head(task, values)
    made = {}
    source = VECTOR
    if task.head is not None:
        parts = heads_of(values)
        weight, bias = parts["hidden.weight"], parts["hidden.bias"]
        made[f"{number}_Dense"] = _layer(weight, bias, source, f"{task.name}.hidden", ACTIVATIONS[task.head.activation])
        source, number = f"{task.name}.hidden", number + 1
    made[f"{number}_Dense"] = _layer(head.weight.float(), head.bias.float(), source, task.name, IDENTITY)
    return made


def _layer(
    weight: Tensor, bias: Tensor, source: str, target: str, activation: str
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": True,
        "activation_function": activation,
        "module_input_name": source,
        "module_output_name": target,
    }
    return config, {"linear.weight": weight, "linear.bias": bias}


def _names(task: Task, values: TaskValues) -> list[str]:
    return list(plain_head(task, values).names)


def _usage(heads: Sequence[str], saved: SavedModel) -> str:
    lines = [
        "from sentence_transformers import SentenceTransformer",
        "",
        'model = SentenceTransformer("FOLDER")',
        'vectors = model.encode(["a fine film", "a dull film"])',
    ]
    if heads:
        lines.append(f'outputs = model.encode(["a fine film"], output_value=None)[0]["{heads[0]}"]')
    words = "```python\n" + "\n".join(lines) + "\n```"
    if heads:
        words += (
            "\n\nThe outputs of a classification are logits: `outputs.softmax(-1)` has the probabilities of the labels"
            " in `labels.json`. A regression's output is the score."
        )
    pairs = [name for name, task in saved.tasks.items() if task.is_dual]
    if pairs:
        words += (
            f"\n\nTasks on pairs ({', '.join(pairs)}) compare such vectors; their heads are not in this folder:"
            " `fedmtl export --to hf` and `--to onnx` have them."
        )
    return words
