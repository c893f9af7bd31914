"""A model that fedmtl trained, for transformers: one encoder, a head for each task, and what tasks have apart.

This file lies beside the weights of an exported model and needs torch and transformers alone:

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model.answer(tokenizer, ["a fine film"])                           # tasks that read one text
    model.answer(tokenizer, ["a fine film"], ["a good movie"])         # tasks that read two
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

ACTIVATIONS: dict[str, Any] = {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}
COSINE_SCALE = 10.0
# A word of a text, for heads that tag each: a run of letters and digits, or one sign.
WORD = re.compile(r"\w+|[^\w\s]")
# A parameter's name in a list of parameters may have no dot.
DOT = "/"


class FedmtlConfig(PretrainedConfig):
    """`encoder_config` is the encoder's own; `heads` are the tasks; `passes` say which tasks are computed together."""

    model_type = "fedmtl"

    def __init__(
        self,
        encoder_config: dict[str, Any] | None = None,
        has_pooler: bool = False,
        inputs: Sequence[str] = ("input_ids", "attention_mask"),
        heads: Sequence[dict[str, Any]] = (),
        passes: Sequence[dict[str, Any]] = (),
        adapters: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.encoder_config, self.has_pooler, self.inputs = encoder_config, has_pooler, list(inputs)
        self.heads, self.passes, self.adapters = list(heads), list(passes), adapters
        super().__init__(**others)


@dataclass
class FedmtlOutput(ModelOutput):
    """By task: the head's outputs (logits of the labels, or the score), and the vector of every text.

    A head with `words` for its pool has both for every token.
    """

    logits: dict[str, Tensor] | None = None
    vectors: dict[str, Tensor] | None = None


class SmallAttention(nn.Module):
    """The attention of projected attention layers: it ends with the heads side by side."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.num_heads = num_heads

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, mask.bool()[:, None, None, :])
        return mixed.transpose(1, 2).flatten(2)


class TaskAdapters(nn.Module):
    """One task's adapter for every layer; `shared` has the parts that its layers share."""

    def __init__(self, layers: Sequence[Mapping[str, Any]], width: int, num_heads: int) -> None:
        super().__init__()
        self.kinds = [layer["kind"] for layer in layers]
        self.shared, self.layer = nn.ModuleDict(), nn.ModuleList()
        for layer in layers:
            size, parts = layer["size"], nn.ModuleDict()
            for name in ("encoder", "attention", "decoder") if layer["kind"] == "pals" else ("encoder", "decoder"):
                owner = self.shared if name in layer["shared"] else parts
                if name not in owner:
                    made = {"encoder": (width, size), "decoder": (size, width)}
                    owner[name] = SmallAttention(size, num_heads) if name == "attention" else nn.Linear(*made[name])
            self.layer.append(parts)

    def forward(self, number: int, hidden: Tensor, mask: Tensor) -> Tensor:
        parts: Any = self.layer[number]
        find = {**dict(self.shared.items()), **dict(parts.items())}
        small = find["encoder"](hidden)
        if self.kinds[number] == "pals":
            return F.gelu(find["decoder"](find["attention"](small, mask)))
        output: Tensor = find["decoder"](F.gelu(small))
        return output


class FedmtlModel(PreTrainedModel):
    """Answers every task; tasks whose encoder is the same share its pass."""

    config_class = FedmtlConfig

    def __init__(self, config: FedmtlConfig) -> None:
        super().__init__(config)
        known = dict(config.encoder_config or {})
        self.encoder = AutoModel.from_config(AutoConfig.for_model(known.pop("model_type"), **known))
        if not config.has_pooler and hasattr(self.encoder, "pooler"):
            self.encoder.pooler = None
        shapes = {name: value.shape for name, value in self.encoder.named_parameters()}
        # What a pass has for itself of the encoder's values.
        self.values = nn.ModuleList(
            nn.ParameterDict({name.replace(".", DOT): torch.empty(shapes[name]) for name in each["values"]})
            for each in config.passes
        )
        self.hidden = nn.ModuleList(
            nn.Linear(head["features"], head["hidden"]["size"]) if head["hidden"] else nn.Identity()
            for head in config.heads
        )
        self.heads = nn.ModuleList(
            nn.Linear(head["hidden"]["size"] if head["hidden"] else head["features"], head["outputs"])
            for head in config.heads
        )
        self._used: tuple[nn.Module, Tensor] | None = None
        self._number, self._input = -1, torch.empty(0)
        self.adapters = nn.ModuleList(self._adapters(config.adapters))
        self.post_init()

    def _adapters(self, about: dict[str, Any] | None) -> list[nn.Module]:
        """Hook the adapters of every task that has some into the encoder's layers."""
        if about is None:
            return []
        layers: Any = self.encoder.get_submodule(about["path"])
        for layer in layers:
            layer.register_forward_pre_hook(self._keep, with_kwargs=True)
            layer.get_submodule(about["norm"]).register_forward_pre_hook(self._add)
        return [TaskAdapters(about["layers"], about["width"], about["heads"]) for _ in range(about["number"])]

    def _keep(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._used is not None:
            self._number += 1
            self._input = given[0] if given else named["hidden_states"]

    def _add(self, norm: nn.Module, given: tuple[Tensor, ...]) -> Tensor | None:
        if self._used is None:
            return None
        adapters, mask = self._used
        added: Tensor = adapters(self._number, self._input, mask)
        return given[0] + added

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        second: Mapping[str, Tensor] | None = None,
        tasks: Sequence[str] | None = None,
    ) -> FedmtlOutput:
        """Compute the heads of these tasks; without names, of all that take what is given.

        A task with `dual` reads the two texts apart: the inputs of the other one are `second`. Any other task reads
        one sequence, in which the two texts of a pair stand one behind the other.
        """
        first = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        given: list[Mapping[str, Tensor | None]] = [first] if second is None else [first, dict(second)]
        logits: dict[str, Tensor] = {}
        vectors: dict[str, Tensor] = {}
        for number, about in enumerate(self.config.passes):
            wanted = [index for index in about["heads"] if self._is_wanted(index, len(given), tasks)]
            states = [self._encode(number, inputs) for inputs in given] if wanted else []
            for index in wanted:
                head = self.config.heads[index]
                pooled = torch.stack([_pool(head["pool"], *state) for state in states], 1)
                vectors[head["name"]] = pooled if head["dual"] else pooled[:, 0]
                logits[head["name"]] = self._outputs(index, pooled)
        return FedmtlOutput(logits=logits, vectors=vectors)

    def _is_wanted(self, index: int, num_given: int, tasks: Sequence[str] | None) -> bool:
        head = self.config.heads[index]
        if tasks is not None and head["name"] not in tasks:
            return False
        if head["dual"] != (num_given == 2):
            if tasks is not None:
                raise ValueError(
                    f"{head['name']}: takes {'two inputs, give `second`' if head['dual'] else 'one input'}"
                )
            return False
        return True

    def _encode(self, number: int, inputs: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor]:
        mask = inputs.get("attention_mask")
        if mask is None:
            ids = inputs["input_ids"]
            assert ids is not None, "input_ids are needed"
            mask = torch.ones_like(ids)
        offered = {**inputs, "attention_mask": mask}
        taken = {name: offered[name] for name in self.config.inputs if offered.get(name) is not None}
        about: Any = self.config.passes[number]
        own: Any = self.values[number]
        values = {name: own[name.replace(".", DOT)] for name in about["values"]}
        self._used = None if about["adapters"] is None else (self.adapters[about["adapters"]], mask)
        self._number = -1
        try:
            output = torch.func.functional_call(self.encoder, values, (), taken)
        finally:
            self._used, self._input = None, torch.empty(0)
        return output.last_hidden_state, getattr(output, "pooler_output", None), mask

    def _outputs(self, index: int, pooled: Tensor) -> Tensor:
        head, features = self.config.heads[index], pooled[:, 0]
        if head["dual"]:
            u, v = pooled.unbind(1)
            cosine = COSINE_SCALE * F.cosine_similarity(u, v, dim=-1).unsqueeze(-1)
            features = torch.cat([u, v, (u - v).abs(), u * v, cosine], dim=-1)
        if head["hidden"]:
            features = ACTIVATIONS[head["hidden"]["activation"]](self.hidden[index](features))
        output: Tensor = self.heads[index](features)
        return output

    @torch.inference_mode()
    def answer(
        self, tokenizer: Any, texts: Sequence[str], second: Sequence[str] | None = None
    ) -> list[dict[str, dict[str, Any]]]:
        """For every text, or pair of texts, the answer of each task that reads as many, by the task's name."""
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        columns = [list(texts)] if second is None else [list(texts), list(second)]
        fitting = [head for head in self.config.heads if head["texts"] == len(columns)]
        joined, apart = ([head["name"] for head in fitting if head["dual"] is dual] for dual in (False, True))
        found: dict[str, Tensor] = {}
        spans: list[Any] = [None] * len(texts)
        if joined:
            encoded = tokenizer(*columns, **options, return_offsets_mapping=True)
            spans = encoded.pop("offset_mapping").tolist()
            found |= self(**encoded, tasks=joined).logits
        if apart:
            first, other = (tokenizer(column, **options) for column in columns)
            found |= self(**first, second=other, tasks=apart).logits
        rows: list[dict[str, dict[str, Any]]] = [{} for _ in texts]
        for head in self.config.heads:
            if head["name"] in found:
                for row, outputs, text, letters in zip(rows, found[head["name"]], texts, spans, strict=True):
                    of_words = head["pool"] == "words"
                    row[head["name"]] = _read_words(head, outputs, text, letters) if of_words else _read(head, outputs)
        return rows


def _pool(kind: str, hidden: Tensor, pooled: Tensor | None, mask: Tensor) -> Tensor:
    if kind == "pooler":
        assert pooled is not None, "this encoder has no pooler"
        return pooled
    if kind == "words":
        return hidden
    if kind == "cls":
        return hidden[:, 0]
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)


def _read_words(
    head: Mapping[str, Any], outputs: Tensor, text: str, letters: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The spans that are tagged, by the tag of each word's first token; `letters` are those of every token."""
    found: list[dict[str, Any]] = []
    at, open_kind = 0, ""
    for match in WORD.finditer(text):
        while at < len(letters) and (letters[at][1] <= match.start() or letters[at][0] == letters[at][1]):
            at += 1
        if at == len(letters) or letters[at][0] >= match.end():
            # Cut off, or nothing to the tokenizer.
            open_kind = ""
            continue
        shares = outputs[at].double().softmax(-1)
        share, number = shares.max(-1)
        prefix, _, kind = head["labels"][int(number)].partition("-")
        if kind and (prefix == "B" or kind != open_kind):
            found.append({"start": match.start(), "end": match.end(), "label": kind, "probability": float(share)})
        elif kind:
            found[-1]["end"] = match.end()
            found[-1]["probability"] = min(found[-1]["probability"], float(share))
        open_kind = kind
    return {"entities": [{**each, "text": text[each["start"] : each["end"]]} for each in found]}


def _read(head: Mapping[str, Any], outputs: Tensor) -> dict[str, Any]:
    """A label with every label's probability, a score, or the outputs as they are.

    Of a task whose texts may have several labels, every label has a probability of its own.
    """
    if head["problem_type"] == "regression":
        score = float(outputs[0])
        return {"score": min(max(score, head["range"][0]), head["range"][1]) if head["range"] else score}
    if head["problem_type"] is None:
        return {"outputs": outputs.tolist()}
    if head["problem_type"] == "multi_label_classification":
        return {"probabilities": dict(zip(head["labels"], outputs.double().sigmoid().tolist(), strict=True))}
    shares = dict(zip(head["labels"], outputs.double().softmax(-1).tolist(), strict=True))
    return {"label": max(shares, key=lambda label: shares[label]), "probabilities": shares}
