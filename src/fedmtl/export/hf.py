"""One folder per task that plain transformers loads, with the same predictions.

`AutoModelForSequenceClassification` puts layers between the encoder and the last linear one. What
our model does instead is written into those layers:

* `pooler`: BERT and ALBERT have it; their head is then ours as it stands. RoBERTa and MPNet have none, but
  their head begins with the same two steps (dense, tanh).
* `cls` before a tanh: it is linear near 0, so it gets a small multiple of its input and the head takes it back.
* `cls` before a ReLU or GELU: f(z) - f(-z) = z for both, so that layer computes our outputs, each with both
  signs, and the last one takes the differences.
* A head's hidden layer on the first token becomes the layer that the class has there, where activation and width are
  the same: ReLU in DistilBERT, tanh in BERT, ALBERT, RoBERTa and MPNet, GELU in ELECTRA.
* `mean`, `pair: dual`, adapters and heads behind a normalisation have no counterpart there and are refused.

LoRA's matrices are multiplied and added to the layers they belong to. The kind of task says what its head is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedmtl.errors import ModelError
from fedmtl.model.bert.layout import has_fewer_heads
from fedmtl.model.encoder_files import NO_CODE
from fedmtl.model.lora import merge
from fedmtl.model.multitask import BoundModel, MultiTaskModel
from fedmtl.model.saved import SavedModel
from fedmtl.sharing.plan import ADAPTERS, HEADS, owner_task
from fedmtl.tasks.kinds.protocol import PlainHead
from fedmtl.tasks.task import Task

# tanh(x) is x within one rounding of float32 for |x| under 3e-4, so hidden states may reach 300. A power of
# two: multiplying by it and dividing again loses nothing.
SMALL = 2.0**-20

Linear = tuple[Tensor, Tensor]
Values = Mapping[str, Tensor]
Build = Callable[[Any, Values, Linear], None]


def export_hf(saved: SavedModel, bound: BoundModel, folder: Path) -> dict[str, Path | str]:
    """Write every task that can be; the folder of each, or the reason why it has none."""
    if has_fewer_heads(saved.encoder.module.config):
        raise ModelError(
            f"{saved.encoder.name}: heads were removed from its attention, which plain transformers cannot load;"
            " write `--to onnx`"
        )
    written: dict[str, Path | str] = {}
    for name, task in saved.tasks.items():
        try:
            written[name] = _export_task(saved, bound, task, folder / name)
        except ModelError as error:
            written[name] = f"{name}: {error}"
    return written


def _export_task(saved: SavedModel, bound: BoundModel, task: Task, folder: Path) -> Path:
    kind = saved.encoder.module.config.model_type
    pool = saved.model.pools[task.name]
    if task.is_dual:
        raise ModelError(
            "pairs are encoded apart (`pair: dual`), which plain transformers cannot do; train with `pair: cross`"
        )
    if pool == "mean":
        raise ModelError("pooled by the mean, which plain transformers cannot do; train with `pool: cls`")
    build = LAYOUTS.get((kind, pool)) if task.head is None else _with_hidden_layer(saved, task)
    if build is None:
        raise ModelError(f"{kind} with `pool: {pool}` has no equal in plain transformers; train with another `pool`")
    values = _plain_values(bound.use(task.name), task)
    head = _plain_head(task, values)
    config = type(saved.encoder.module.config).from_dict(saved.encoder.module.config.to_dict())
    _describe(config, head)
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, **NO_CODE).eval()
    with torch.no_grad():
        _copy_encoder(classifier, values)
        build(classifier, values, (head.weight, head.bias))
    classifier.save_pretrained(folder)
    _save_tokenizer(saved, folder)
    return folder


def _with_hidden_layer(saved: SavedModel, task: Task) -> Build:
    kind, pool = saved.encoder.module.config.model_type, saved.model.pools[task.name]
    layer, width = task.head, saved.encoder.hidden_size
    assert layer is not None
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


def _save_tokenizer(saved: SavedModel, folder: Path) -> None:
    """A tokenizer that gives the inputs our encoder gets, and with `truncation=True` cuts where we do."""
    saved.encoder.tokenizer.save_pretrained(folder)
    names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in saved.model.accepts]
    AutoTokenizer.from_pretrained(
        folder, model_input_names=names, model_max_length=saved.max_length, local_files_only=True, **NO_CODE
    ).save_pretrained(folder)


def _plain_values(model: MultiTaskModel, task: Task) -> Values:
    """Return the model's values by canonical name, with LoRA's matrices merged into the layers they were added to."""
    parameters = model.canonical()
    if any(owner_task(name) == task.name for name in parameters if name.startswith(ADAPTERS)):
        raise ModelError(
            "has adapters (`model.adapters`), which plain transformers cannot compute; train with `model.lora`"
        )
    values = {name: getattr(module, leaf).detach() for name, (module, leaf) in parameters.items()}
    return values if model.lora is None else merge(values, model.lora)


def _plain_head(task: Task, values: Values) -> PlainHead:
    """The head in double precision: two outputs for two labels, a score in the task's range."""
    weight, bias = (values[f"{HEADS}{task.name}.{leaf}"].double() for leaf in ("weight", "bias"))
    head = task.kind_of.plain_head(task, weight, bias)
    if head is None:
        raise ModelError(f"is {task.kind_of.words}, which plain transformers do not have")
    return head


def _describe(config: Any, head: PlainHead) -> None:
    config.num_labels = len(head.bias)
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

# Kind of encoder -> the activation of the hidden layer on the first token, and where that layer and the last one are.
HIDDEN_LAYOUTS: dict[str, tuple[str, Callable[[Any], tuple[Any, Any]]]] = {
    "distilbert": ("relu", lambda model: (model.pre_classifier, model.classifier)),
    "bert": ("tanh", lambda model: (model.base_model.pooler.dense, model.classifier)),
    "albert": ("tanh", lambda model: (model.base_model.pooler, model.classifier)),
    "roberta": ("tanh", lambda model: (model.classifier.dense, model.classifier.out_proj)),
    "mpnet": ("tanh", lambda model: (model.classifier.dense, model.classifier.out_proj)),
    "electra": ("gelu", lambda model: (model.classifier.dense, model.classifier.out_proj)),
}
