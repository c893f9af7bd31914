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
    """`encoder_config` is the encoder's own; `heads` are the tasks; `passes` say which tasks are computed together.

    `windows` says how texts that are longer than a sequence are cut into several, and how their vectors become one.
    """

    model_type = "fedmtl"

    def __init__(
        self,
        encoder_config: dict[str, Any] | None = None,
        has_pooler: bool = False,
        inputs: Sequence[str] = ("input_ids", "attention_mask"),
        heads: Sequence[dict[str, Any]] = (),
        passes: Sequence[dict[str, Any]] = (),
        adapters: dict[str, Any] | None = None,
        windows: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.windows = windows
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
        width = self.encoder.config.hidden_size
        # What a task that learnt it weighs the windows of a text by.
        self.windows = nn.ModuleList(
            nn.Linear(width, 1, bias=False) if head.get("weighs_windows") else nn.Identity() for head in config.heads
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
        windows: Tensor | None = None,
    ) -> FedmtlOutput:
        """Compute the heads of these tasks; without names, of all that take what is given.

        A task with `dual` reads the two texts apart: the inputs of the other one are `second`. Any other task reads
        one sequence, in which the two texts of a pair stand one behind the other. Where a text is several sequences,
        `windows` (texts, most of one) has the rows of each, filled up with -1; those of second texts are in `second`.
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
                vector = [_pool(head["pool"], *state) for state in states]
                if windows is not None and head["pool"] != "words":
                    rows = [windows] if second is None else [windows, second["windows"]]
                    vector = [self._join(index, one, of_texts) for one, of_texts in zip(vector, rows, strict=True)]
                pooled = torch.stack(vector, 1)
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

    def _join(self, index: int, vectors: Tensor, windows: Tensor) -> Tensor:
        """One vector for every text from those of its windows."""
        is_there, of_texts = (windows >= 0).unsqueeze(-1), vectors[windows.clamp(min=0)]
        kind = self.config.windows["pool"]
        if kind == "max":
            return of_texts.masked_fill(~is_there, -torch.inf).amax(1)
        scores = self.windows[index](of_texts) if kind == "attention" else torch.zeros_like(of_texts[..., :1])
        shares = scores.masked_fill(~is_there, -torch.inf).softmax(1)
        return (of_texts * shares).sum(1)

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
        columns = [list(texts)] if second is None else [list(texts), list(second)]
        fitting = [head for head in self.config.heads if head["texts"] == len(columns)]
        joined, apart = ([head["name"] for head in fitting if head["dual"] is dual] for dual in (False, True))
        found: dict[str, Any] = {}
        spans: list[Any] = [None] * len(texts)
        if joined:
            encoded, spans, central = self._tokens(tokenizer, columns)
            found |= self(**encoded, tasks=joined).logits
            if central is not None:
                for head in fitting:
                    if head["pool"] == "words":
                        found[head["name"]] = _of_tokens(found[head["name"]], central)
        if apart:
            (first, _, _), (other, _, _) = (self._tokens(tokenizer, [column]) for column in columns)
            found |= self(**first, second=other, tasks=apart).logits
        rows: list[dict[str, dict[str, Any]]] = [{} for _ in texts]
        for head in self.config.heads:
            if head["name"] in found:
                for row, outputs, text, letters in zip(rows, found[head["name"]], texts, spans, strict=True):
                    of_words = head["pool"] == "words"
                    row[head["name"]] = _read_words(head, outputs, text, letters) if of_words else _read(head, outputs)
        return rows

    def _tokens(
        self, tokenizer: Any, columns: Sequence[list[str]]
    ) -> tuple[dict[str, Tensor], list[Any], list[list[tuple[int, int] | None]] | None]:
        """What `forward` takes of these texts, the letters of each token, and of windows where to look each up."""
        about = self.config.windows
        if about is None:
            encoded = tokenizer(
                *columns, padding=True, truncation=True, return_tensors="pt", return_offsets_mapping=True
            )
            return encoded, encoded.pop("offset_mapping").tolist(), None
        whole = tokenizer(
            *columns, padding=False, truncation=False, return_token_type_ids=True, return_offsets_mapping=True,
            verbose=False,
        )  # fmt: skip
        about = {**about, "length": tokenizer.model_max_length, "from_left": tokenizer.truncation_side == "left"}
        ids, types, spans = (whole[name] for name in ("input_ids", "token_type_ids", "offset_mapping"))
        cuts = [_cut(whole.sequence_ids(number), about) for number in range(len(ids))]
        rows = [(number, tokens) for number, windows in enumerate(cuts) for tokens in windows]
        width, most = max(len(tokens) for _, tokens in rows), max(map(len, cuts))

        def padded(values: Sequence[Sequence[int]], blank: int) -> Tensor:
            lists = [[values[number][at] for at in tokens] + [blank] * (width - len(tokens)) for number, tokens in rows]
            return torch.tensor(lists)

        found = {
            "input_ids": padded(ids, tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(each) for each in ids], 0),
            "token_type_ids": padded(types, tokenizer.pad_token_type_id),
            "windows": torch.full((len(cuts), most), -1),
        }
        begin = 0
        for number, windows in enumerate(cuts):
            found["windows"][number, : len(windows)] = torch.arange(begin, begin + len(windows))
            begin += len(windows)
        central = [_most_central(windows, len(each)) for windows, each in zip(cuts, ids, strict=True)]
        return (
            found,
            spans,
            [
                [None if at is None else (int(found["windows"][number, at[0]]), at[1]) for at in each]
                for number, each in enumerate(central)
            ],
        )


def _cut(of_texts: Sequence[int | None], windows: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each window of a text or a joined pair, by their number; `of_texts` says which text each is of.

    The first window begins with the text, further ones a stride later, and the last ends with it. Special tokens, of no
    text, are in each, and so is the shorter text of a pair.
    """
    length = windows["length"]
    if len(of_texts) <= length:
        return [list(range(len(of_texts)))]
    texts = [[at for at, text in enumerate(of_texts) if text == number] for number in (0, 1)]
    budget = length - sum(text is None for text in of_texts)
    longer = int(len(texts[1]) >= len(texts[0]))
    whole, shorter = texts[longer], texts[1 - longer]
    first = max(0, len(shorter) - budget // 2) if windows["from_left"] else 0
    shorter = shorter[first : first + budget // 2]
    size = budget - len(shorter)
    step = min(windows["stride"] or size, size)
    needed = 1 - (size - len(whole)) // step
    starts = [number * step for number in range(min(needed, windows["most"]))]
    if needed <= windows["most"]:
        starts[-1] = len(whole) - size
    if windows["from_left"]:
        starts = [len(whole) - size - start for start in reversed(starts)]
    stays = {at for at, text in enumerate(of_texts) if text is None} | set(shorter)
    return [sorted(stays | set(whole[start : start + size])) for start in starts]


def _most_central(cuts: Sequence[Sequence[int]], count: int) -> list[tuple[int, int] | None]:
    """For each of so many tokens the window where it stands most central, and where it stands there."""
    found: list[tuple[int, int] | None] = [None] * count
    nearest = [float("inf")] * count
    for number, tokens in enumerate(cuts):
        for at, token in enumerate(tokens):
            distance = abs(at - (len(tokens) - 1) / 2)
            if distance < nearest[token]:
                found[token], nearest[token] = (number, at), distance
    return found


def _of_tokens(outputs: Tensor, central: Sequence[Sequence[tuple[int, int] | None]]) -> Any:
    """For every text the outputs of each of its tokens; None where it is in no window."""
    return [[None if at is None else outputs[at] for at in of_text] for of_text in central]


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


def _read_words(head: Mapping[str, Any], outputs: Any, text: str, letters: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The spans that are tagged, by the tag of each word's first token; `letters` are those of every token."""
    found: list[dict[str, Any]] = []
    at, open_kind = 0, ""
    for match in WORD.finditer(text):
        while at < len(letters) and (letters[at][1] <= match.start() or letters[at][0] == letters[at][1]):
            at += 1
        of_word = outputs[at] if at < len(letters) and letters[at][0] < match.end() else None
        if of_word is None:
            # Cut off, or nothing to the tokenizer.
            open_kind = ""
            continue
        shares = of_word.double().softmax(-1)
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
