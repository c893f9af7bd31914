"""Every model for transformers: one folder per task of its plain classes where they can hold it, and one of our own.

Where they cannot, or where there are several tasks, `every-task/` has all heads behind one pass of the encoder, with a
small modelling file beside the weights (`modeling_fedmtl.py`) that needs torch and transformers alone; it loads with
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.

`AutoModelForSequenceClassification` puts layers between the encoder and the last linear one. What
our model does instead is written into those layers:

* `pooler`: BERT and ALBERT have it; their head is then ours as it stands. RoBERTa and MPNet have none, but
  their head begins with the same two steps (dense, tanh).
* `cls` before a tanh: it is linear near 0, so it gets a small multiple of its input and the head takes it back.
* `cls` before a ReLU or GELU: f(z) - f(-z) = z for both, so that layer computes our outputs, each with both
  signs, and the last one takes the differences.
* A head of tags is alike there: `AutoModelForTokenClassification` has one linear layer on every token.
* A head's hidden layer on the first token becomes the layer that the class has there, where activation and width are
  the same: ReLU in DistilBERT, tanh in BERT, ALBERT, RoBERTa and MPNet, GELU in ELECTRA.
* `mean`, `pair: dual`, adapters and heads behind a normalisation have no counterpart there.

The kind of task says what its head is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from fedmtl.errors import ModelError
from fedmtl.export.encoder import (
    TaskValues,
    heads_of,
    new_folder,
    plain_config,
    plain_head,
    plain_values,
    save_tokenizer,
    save_values,
)
from fedmtl.model.bert.layout import WORDS
from fedmtl.model.encoder_files import NO_CODE
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import SavedModel
from fedmtl.model.windows import LEAF, learns_windows
from fedmtl.sharing.plan import ADAPTERS, HEADS
from fedmtl.tasks.kinds.protocol import PlainHead
from fedmtl.tasks.task import Task, windows_of

# tanh(x) is x within one rounding of float32 for |x| under 3e-4, so hidden states may reach 300. A power of
# two: multiplying by it and dividing again loses nothing.
SMALL = 2.0**-20

Linear = tuple[Tensor, Tensor]
Values = Mapping[str, Tensor]
Build = Callable[[Any, Values, Linear], None]


# An output that no score in a range has.
FAR = 1e6
EVERY_TASK = "every-task"
MODELING = Path(__file__).with_name("modeling_fedmtl.py")
PLAIN_USAGE = """```python
from transformers import pipeline

answer = pipeline("text-classification", model="FOLDER")
answer(EXAMPLE)
```"""
PLAIN_USAGE_BY_WORD = """```python
from transformers import pipeline

tag = pipeline("token-classification", model="FOLDER", aggregation_strategy="first")
tag(EXAMPLE)
```"""
USAGE = """```python
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModel.from_pretrained("FOLDER", trust_remote_code=True)
model.answer(tokenizer, EXAMPLE)
```

This model has a modelling file of its own, `modeling_fedmtl.py`, which `trust_remote_code=True` runs; it needs torch
and transformers alone. Read it first: it is short."""
Card = Callable[[str], str]


@dataclass(frozen=True)
class HfExport:
    """What was written for transformers.

    `folders` has for every task the folder that answers it: one of a plain class, or `every_task`, which needs
    `trust_remote_code=True`. `reasons` says why plain classes cannot hold a task.
    """

    folders: dict[str, Path]
    every_task: Path | None
    reasons: dict[str, str]


def export_hf(saved: SavedModel, bound: BoundModel, folder: Path, card: Card | None = None) -> HfExport:
    """Write every task; `card` makes a folder's README.md from the lines that show how to use it."""
    weights = bound.weights()
    tasks = {name: plain_values(bound.use(name), name, view, weights) for name, view in bound.views.items()}
    folders: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for name, values in tasks.items():
        try:
            folders[name] = _export_task(saved, values, folder / name, card)
        except ModelError as error:
            reasons[name] = str(error)
    every = None
    if reasons or len(tasks) > 1:
        every = folder / next(name for name in (EVERY_TASK, f"{EVERY_TASK}s") if name not in tasks)
        _export_every_task(saved, list(tasks.values()), every, card)
    return HfExport({name: folders.get(name, every or folder) for name in tasks}, every, reasons)


def _export_task(saved: SavedModel, plain: TaskValues, folder: Path, card: Card | None) -> Path:
    task, kind, pool = saved.tasks[plain.task], saved.encoder.module.config.model_type, saved.model.pools[plain.task]
    if task.is_dual:
        raise ModelError("pairs are encoded apart (`pair: dual`)")
    if pool == "mean":
        raise ModelError("pooled by the mean")
    if task.windows is not None:
        raise ModelError("long texts are read in windows (`model.windows`)")
    if plain.has_adapters:
        raise ModelError("has adapters (`model.adapters`)")
    build = LAYOUTS.get((kind, pool)) if task.head is None else _with_hidden_layer(saved, task)
    if pool == WORDS and task.head is None and kind in ON_TOKENS:
        build = _on_tokens
    if build is None:
        raise ModelError(f"{kind} with `pool: {pool}` has no equal in plain transformers")
    head = plain_head(task, plain)
    if head.problem_type is None:
        raise ModelError(f"is {task.kind_of.words}, which plain transformers do not have")
    config = AutoConfig.for_model(**plain_config(saved.encoder))
    _describe(config, head)
    # A head of tags is on every token, with nothing between.
    auto = getattr(transformers, f"AutoModelFor{head.architecture}")
    classifier = auto.from_config(config, dtype=torch.float32, **NO_CODE).eval()
    with torch.no_grad():
        _copy_encoder(classifier, plain.values)
        build(classifier, plain.values, (head.weight, head.bias))
    with new_folder(folder) as hidden:
        classifier.save_pretrained(hidden)
        save_tokenizer(saved.encoder, saved.max_length, hidden)
        if card is not None:
            example = '{"text": "a fine film", "text_pair": "a good movie"}' if task.is_pair else '"a fine film"'
            usage = PLAIN_USAGE_BY_WORD if task.kind_of.by_word else PLAIN_USAGE
            (hidden / "README.md").write_text(card(usage.replace("EXAMPLE", example)))
    return folder


def _export_every_task(saved: SavedModel, tasks: Sequence[TaskValues], folder: Path, card: Card | None) -> None:
    """Write all heads and all values of the encoder, each once, with the modelling file."""
    from fedmtl.export.modeling_fedmtl import DOT, FedmtlConfig, FedmtlModel

    passes: dict[Any, list[int]] = {}
    for index, values in enumerate(tasks):
        # A task's adapters are part of its pass.
        passes.setdefault((values.signature, values.task if values.has_adapters else ""), []).append(index)
    adapted = [values for values in tasks if values.has_adapters]
    first, state = tasks[0], {f"encoder.{name}": value for name, value in tasks[0].encoder.items()}
    described = []
    for number, members in enumerate(passes.values()):
        lead = tasks[members[0]]
        apart = [name for name in lead.encoder if lead.origins[name] != first.origins[name]]
        state |= {f"values.{number}.{name.replace('.', DOT)}": lead.values[name] for name in apart}
        which = adapted.index(lead) if lead.has_adapters else None
        described.append({"heads": members, "values": apart, "adapters": which})
    heads = []
    for index, values in enumerate(tasks):
        task, head = saved.tasks[values.task], plain_head(saved.tasks[values.task], values)
        heads.append(_head_record(saved, task, head))
        state |= {f"heads.{index}.weight": head.weight.float(), f"heads.{index}.bias": head.bias.float()}
        if learns_windows(task):
            state[f"windows.{index}.weight"] = heads_of(values)[LEAF]
        hidden = {name: value for name, value in heads_of(values).items() if name.startswith("hidden.")}
        state |= {f"hidden.{index}.{name.removeprefix('hidden.')}": value for name, value in hidden.items()}
    for index, values in enumerate(adapted):
        prefix = f"{ADAPTERS}{values.task}."
        own = {name.removeprefix(prefix): value for name, value in values.values.items() if name.startswith(prefix)}
        state |= {f"adapters.{index}.{name}": value for name, value in own.items()}
    windows = windows_of(saved.tasks)
    config = FedmtlConfig(
        encoder_config=plain_config(saved.encoder),
        has_pooler=saved.encoder.has_pooler,
        inputs=sorted(saved.model.accepts),
        heads=heads,
        passes=described,
        adapters=_adapters_record(saved, [values.task for values in adapted]),
        windows=None if windows is None else asdict(windows),
        auto_map={name: f"{MODELING.stem}.Fedmtl{name.removeprefix('Auto')}" for name in ("AutoConfig", "AutoModel")},
        architectures=["FedmtlModel"],
        dtype="float32",
    )
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in FedmtlModel(config).named_parameters()}
    found = {name: value.shape for name, value in state.items()}
    assert found == shapes, (
        f"the modelling file has other values: {sorted(set(found.items()) ^ set(shapes.items()))[:4]}"
    )
    with new_folder(folder) as hidden_folder:
        config.save_pretrained(hidden_folder)
        save_values(hidden_folder / "model.safetensors", state)
        save_tokenizer(saved.encoder, saved.max_length, hidden_folder)
        shutil.copyfile(MODELING, hidden_folder / MODELING.name)
        if card is not None:
            one = any(len(saved.tasks[values.task].text) == 1 for values in tasks)
            example = '["a fine film"]' if one else '["a fine film"], ["a good movie"]'
            (hidden_folder / "README.md").write_text(card(USAGE.replace("EXAMPLE", example)))


def _head_record(saved: SavedModel, task: Task, head: PlainHead) -> dict[str, Any]:
    width = saved.encoder.hidden_size
    layer = None if task.head is None else {"size": task.head.size or width, "activation": task.head.activation}
    return {
        "name": task.name,
        "texts": len(task.text),
        "dual": task.is_dual,
        "pool": saved.model.pools[task.name],
        "features": 4 * width + 1 if task.is_dual else width,
        "hidden": layer,
        "weighs_windows": learns_windows(task),
        "outputs": len(head.bias),
        "problem_type": head.problem_type,
        "labels": list(head.names),
        "range": _range(task) if head.problem_type == "regression" else None,
    }


def _range(task: Task) -> list[float] | None:
    """What scores are cut to, where the kind of task cuts them; None where a score is what the head says."""
    kind, scale = task.kind_of, task.kind_of.scale(task)
    far = [kind.answer(task, np.array([output])).score for output in (-FAR, FAR)]
    return None if scale is None or far != list(scale) else list(scale)


def _adapters_record(saved: SavedModel, tasks: Sequence[str]) -> dict[str, Any] | None:
    adapters: Any = saved.model.adapters
    if not tasks:
        return None
    one = adapters._modules[tasks[0]]
    layers = []
    for kind, parts in zip(one.kinds, one.layer, strict=True):
        shared = [name for name in one.shared if name not in parts and (kind == "pals" or name != "attention")]
        size = (parts if "encoder" in parts else one.shared)["encoder"].out_features
        layers.append({"kind": kind, "size": size, "shared": shared})
    heads = [part.num_heads for part in one.modules() if hasattr(part, "num_heads")]
    path, norm = adapters.paths
    width = saved.encoder.hidden_size
    about = {"path": path, "norm": norm, "width": width, "number": len(tasks)}
    return {**about, "heads": heads[0] if heads else 1, "layers": layers}


def _with_hidden_layer(saved: SavedModel, task: Task) -> Build:
    kind, pool = saved.encoder.module.config.model_type, saved.model.pools[task.name]
    layer, width = task.head, saved.encoder.hidden_size
    assert layer is not None
    if pool == WORDS:
        raise ModelError("its head has a hidden layer on every word, which plain transformers do not have")
    activation, find = HIDDEN_LAYOUTS.get(kind, ("", None))
    if find is None:
        raise ModelError(f"its head has a hidden layer, which {kind} has no equal of in plain transformers")
    if (pool, layer.activation, layer.size or width) != ("cls", activation, width):
        raise ModelError(
            f"its head's hidden layer is {layer.size or width} wide with {layer.activation} on `pool: {pool}`; plain"
            f" transformers' {kind} has one that is {width} wide with {activation} on `pool: cls`"
        )

    def build(model: Any, values: Values, head: Linear) -> None:
        hidden, last = find(model)
        _set(hidden, *(values[f"{HEADS}{task.name}.hidden.{leaf}"] for leaf in ("weight", "bias")))
        _set(last, *head)

    return build


def _describe(config: Any, head: PlainHead) -> None:
    config.num_labels = len(head.bias)
    if head.architecture == "SequenceClassification":
        config.problem_type = head.problem_type
    config.id2label = dict(enumerate(head.names))
    config.label2id = {name: index for index, name in enumerate(head.names)}


def _copy_encoder(classifier: Any, values: Values) -> None:
    inner = classifier.base_model
    for name, parameter in inner.named_parameters():
        if name in values:
            parameter.copy_(values[name])
        elif "pooler" not in name:
            raise ModelError(f"the exported model has a parameter {name} that ours lacks")


def _set(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)


def _set_small_identity(layer: Any) -> None:
    width = layer.weight.shape[0]
    _set(layer, SMALL * torch.eye(width), torch.zeros(width))


def _set_split(layer: Any, last: Any, head: Linear) -> None:
    weight, bias = head
    num, width = len(bias), layer.weight.shape[0]
    if 2 * num > width:
        raise ModelError(f"{num} labels do not fit: the layer before the last takes at most {width // 2}")
    _set(layer, torch.zeros_like(layer.weight), torch.zeros_like(layer.bias))
    layer.weight[: 2 * num].copy_(torch.cat([weight, -weight]))
    layer.bias[: 2 * num].copy_(torch.cat([bias, -bias]))
    _set(last, torch.zeros_like(last.weight), torch.zeros_like(last.bias))
    last.weight[:, : 2 * num].copy_(torch.cat([torch.eye(num), -torch.eye(num)], dim=1))


def _through_pooler(model: Any, values: Values, head: Linear) -> None:
    _set(model.classifier, *head)


def _pooler_in_head(model: Any, values: Values, head: Linear) -> None:
    _set(model.classifier.dense, values["pooler.dense.weight"], values["pooler.dense.bias"])
    _set(model.classifier.out_proj, *head)


def _bert_cls(model: Any, values: Values, head: Linear) -> None:
    _set_small_identity(model.base_model.pooler.dense)
    _set(model.classifier, head[0] / SMALL, head[1])


def _albert_cls(model: Any, values: Values, head: Linear) -> None:
    _set_small_identity(model.base_model.pooler)
    _set(model.classifier, head[0] / SMALL, head[1])


def _tanh_head_cls(model: Any, values: Values, head: Linear) -> None:
    _set_small_identity(model.classifier.dense)
    _set(model.classifier.out_proj, head[0] / SMALL, head[1])


def _gelu_head_cls(model: Any, values: Values, head: Linear) -> None:
    _set_split(model.classifier.dense, model.classifier.out_proj, head)


def _relu_head_cls(model: Any, values: Values, head: Linear) -> None:
    _set_split(model.pre_classifier, model.classifier, head)


def _on_tokens(model: Any, values: Values, head: Linear) -> None:
    _set(model.classifier, *head)


LAYOUTS: dict[tuple[str, str], Build] = {
    ("bert", "pooler"): _through_pooler,
    ("albert", "pooler"): _through_pooler,
    ("roberta", "pooler"): _pooler_in_head,
    ("mpnet", "pooler"): _pooler_in_head,
    ("bert", "cls"): _bert_cls,
    ("albert", "cls"): _albert_cls,
    ("roberta", "cls"): _tanh_head_cls,
    ("mpnet", "cls"): _tanh_head_cls,
    ("electra", "cls"): _gelu_head_cls,
    ("distilbert", "cls"): _relu_head_cls,
}
# Those whose class for tokens has one linear layer behind the last norm.
ON_TOKENS = ("bert", "albert", "roberta", "mpnet", "electra", "distilbert")

# Kind of encoder -> the activation of the hidden layer on the first token, and where that layer and the last one are.
HIDDEN_LAYOUTS: dict[str, tuple[str, Callable[[Any], tuple[Any, Any]]]] = {
    "distilbert": ("relu", lambda model: (model.pre_classifier, model.classifier)),
    "bert": ("tanh", lambda model: (model.base_model.pooler.dense, model.classifier)),
    "albert": ("tanh", lambda model: (model.base_model.pooler, model.classifier)),
    "roberta": ("tanh", lambda model: (model.classifier.dense, model.classifier.out_proj)),
    "mpnet": ("tanh", lambda model: (model.classifier.dense, model.classifier.out_proj)),
    "electra": ("gelu", lambda model: (model.classifier.dense, model.classifier.out_proj)),
}
