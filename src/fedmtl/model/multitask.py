"""One shared encoder and one head per task; and that model with a client's values in it.

Of a bound model, the parameters are the values of a slice, one per key. All values that train lie end to end in one
buffer, and each parameter is a view of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.adapters import Adapters
from fedmtl.model.bert.autograd import CalledWeights, pooled_vectors
from fedmtl.model.bert.cpu import encoder as cpu_bert
from fedmtl.model.bert.cpu.per_example import ExamplePass
from fedmtl.model.bert.layout import WORDS, MaskSource, Packed, bert_layout, mean_pool, no_masks, pack, random_masks
from fedmtl.model.encoder import Encoder, load_encoder, position_origin
from fedmtl.model.encoder_files import encoder_folder, is_extended
from fedmtl.model.lora import add_lora, canonical_path, set_lora
from fedmtl.model.tensor_files import load_safetensors
from fedmtl.model.windows import WindowPools
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import ADAPTERS, HEADS, Key, Rows, SharingPlan, Weights, compact_ids
from fedmtl.tasks.pretrained_head import LAYOUTS
from fedmtl.tasks.task import HiddenLayer, Task
from fedmtl.timing import timed


@dataclass(frozen=True)
class Inputs:
    """Token ids with their mask and segments, padded on the right; a dual pair has all first texts, then all second.

    `places` are the slots (row * width + column) that a task on words reads. Where a text has several windows, each is
    a row, and `windows` (texts, most) has the rows of every text, filled up with -1.
    """

    ids: Tensor
    mask: Tensor
    segments: Tensor
    places: Tensor | None = None
    windows: Tensor | None = None

    def to(self, device: torch.device) -> Inputs:
        places, windows = (
            None if part is None else part.to(device, non_blocking=True) for part in (self.places, self.windows)
        )
        ids, mask, segments = (part.to(device, non_blocking=True) for part in (self.ids, self.mask, self.segments))
        return Inputs(ids, mask, segments, places, windows)

    def widened(self, pad_id: int) -> Inputs:
        """The same with one more column of padding."""
        assert self.places is None, "places are those of a width"
        ids, mask, segments = (
            F.pad(self.ids, (0, 1), value=pad_id),
            F.pad(self.mask, (0, 1)),
            F.pad(self.segments, (0, 1)),
        )
        return Inputs(ids, mask, segments, windows=self.windows)


# A cosine lies between -1 and 1 and two classes may part at .8: unscaled, its weight would have to grow to ten.
COSINE_SCALE = 10.0


# What may follow a head's hidden layer.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}


class Head(nn.Linear):
    """A task's head, or where it has a hidden layer, the output layer behind that.

    That of a dual pair's score begins with the cosine itself, which a pretrained encoder already means something by;
    behind a hidden layer there is no cosine to begin with.
    `log_variance`, where requested, is what the task's loss is weighed by; no prediction depends on it.
    """

    log_variance: nn.Parameter | None

    def __init__(self, task: Task, hidden_size: int, seed: int, *, log_variance: bool = False) -> None:
        super().__init__(_num_features(task, hidden_size, task.head), task.kind_of.num_outputs(task))
        generator = torch.Generator().manual_seed(derive_seed(seed, "head", task.name))
        with torch.no_grad():
            self.weight.normal_(0.0, 0.02, generator=generator)
            self.bias.zero_()
            if task.is_dual and task.kind_of.starts_at_cosine and task.head is None:
                self.weight.zero_()
                self.weight[:, -1] = 1 / COSINE_SCALE
        self.register_parameter("log_variance", nn.Parameter(torch.zeros(1)) if log_variance else None)


def _num_features(task: Task, hidden_size: int, behind: HiddenLayer | None = None) -> int:
    """How wide a head's input is; `behind` a hidden layer, as wide as that."""
    if behind is not None:
        return behind.size or hidden_size
    return 4 * hidden_size + 1 if task.is_dual else hidden_size


class HiddenLayers(nn.Module):
    """Task -> the hidden layer of its head, for tasks that have one.

    They are apart from the heads, which LoRA may wrap. Their parameters are called `<task>.hidden.weight|bias`.
    """

    def __init__(self, tasks: Mapping[str, Task], hidden_size: int, seed: int) -> None:
        super().__init__()
        for name, task in tasks.items():
            if task.head is not None:
                layer = nn.Linear(_num_features(task, hidden_size), _num_features(task, hidden_size, task.head))
                generator = torch.Generator().manual_seed(derive_seed(seed, "hidden layer", name))
                with torch.no_grad():
                    layer.weight.normal_(0.0, 0.02, generator=generator)
                    layer.bias.zero_()
                self._modules[name] = nn.ModuleDict({"hidden": layer})

    def __getitem__(self, task: str) -> Any:
        parent: Any = self._modules[task]
        return parent["hidden"]


class Heads(nn.Module):
    """Task -> head; unlike a ModuleDict it takes a task called `type` or `values`."""

    def __init__(self, heads: Mapping[str, Head]) -> None:
        super().__init__()
        for task, head in heads.items():
            if "." in task:
                raise ConfigError(f"tasks.{task}: has a dot, which separates the parts of a parameter's name; drop it")
            self._modules[task] = head

    def __getitem__(self, task: str) -> nn.Module:
        head = self._modules[task]
        assert head is not None
        return head


class MultiTaskModel(nn.Module):
    """Logits, or scores scaled to 0..1, of one task at a time.

    Its canonical parameter names are the plain encoder's and `heads.<task>.weight|bias`, with a hidden layer also
    `heads.<task>.hidden.weight|bias`, with attention over windows `heads.<task>.windows.weight`, with
    `log_variances` also `heads.<task>.log_variance`; LoRA adds `<layer>.lora_A.weight` and `<layer>.lora_B.weight`,
    adapters what is under `adapters.<task>.`. An encoder laid out as BERT is computed by `bert.cpu`, elsewhere by
    `bert.autograd`, unless something was added to it or `plain` requests the encoder's module.
    """

    def __init__(
        self,
        encoder: Encoder,
        tasks: Mapping[str, Task],
        seed: int,
        config: ModelConfig,
        *,
        plain: bool = False,
        log_variances: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder.module
        self.accepts = encoder.accepts
        self.table = encoder.table
        self.position_origin = position_origin(encoder.module)
        self.pad_id = int(encoder.tokenizer.pad_token_id or 0)
        self.vocabulary_size = int(encoder.module.get_parameter(encoder.table).shape[0])
        self.tasks = dict(tasks)
        self.pools = {name: pooling(task, encoder) for name, task in tasks.items()}
        self.heads = Heads(
            {name: Head(task, encoder.hidden_size, seed, log_variance=log_variances) for name, task in tasks.items()}
        )
        self.hidden = HiddenLayers(tasks, encoder.hidden_size, seed)
        self.windows = WindowPools(tasks, encoder.hidden_size)
        self.lora = config.lora
        self.adapters = None if config.adapters is None else Adapters(encoder, config.adapters, tasks, seed)
        if self.lora is not None:
            add_lora(self.encoder, [self.heads, *self.hidden.children()], self.lora)
        self.layout = None if plain else bert_layout(self.encoder)
        self.draw_masks = random_masks
        # Where a loss takes several passes their gradients have to add up, which only autograd does.
        self.adds_gradients = False
        self.memory = cpu_bert.PassMemory()
        self._canonical = _canonical_parameters(
            [
                ("", self.encoder),
                (HEADS, self.heads),
                (HEADS, self.hidden),
                (HEADS, self.windows),
                (ADAPTERS, self.adapters),
            ]
        )
        if self.lora is not None:
            set_lora(self._canonical, seed)

    def forward(self, task: str, inputs: Inputs, noise: Tensor | None = None, *, called: bool = False) -> Tensor:
        return self.head(task, self.vectors(task, inputs, noise, called=called))

    def vectors(self, task: str, inputs: Inputs, noise: Tensor | None = None, *, called: bool = False) -> Tensor:
        """Return one vector per text, pooled as the task says, or one for each of the inputs' places.

        `noise` (rows, width, columns of the token table) is added to the word embeddings; it needs `adds_gradients`.
        With `called`, every linear layer, norm and table is computed by calling its module, so that hooks see it.
        """
        vectors = self._sequence_vectors(task, inputs, noise, called=called)
        if self.tasks[task].windows is not None:
            vectors = self.windows(task, vectors, inputs.windows)
        return vectors

    def _sequence_vectors(self, task: str, inputs: Inputs, noise: Tensor | None, *, called: bool) -> Tensor:
        """The same with one vector per sequence, of which a text with windows has several."""
        if self.layout is None:
            return self.pool(task, *self.encode(task, inputs, noise), inputs.places)
        weights, masks, batch, padding, pool = self._packed(task, inputs)
        if called:
            return pooled_vectors(CalledWeights(weights, self.encoder), self.layout, batch, pool, masks, padding, noise)
        if self.writes_gradients:
            assert noise is None, "noise goes with adds_gradients"
            return cpu_bert.pooled_vectors(weights, self.layout, batch, pool, masks, padding, self.memory)
        return pooled_vectors(weights, self.layout, batch, pool, masks, padding, noise)

    def _packed(self, task: str, inputs: Inputs) -> tuple[dict[str, Any], MaskSource, Packed, int | None, str]:
        """What a pass through an encoder laid out as BERT takes: values, masks, tokens, padding row and pooling."""
        weights: dict[str, Any] = {name: module._parameters[leaf] for name, (module, leaf) in self._canonical.items()}
        masks = self.draw_masks(weights[self.table]) if self.training else no_masks
        batch = pack(inputs.ids, inputs.mask, inputs.segments, inputs.places)
        return weights, masks, batch, self.token_table().padding_idx, self.pools[task]

    def example_pass(self, task: str, inputs: Inputs, num_examples: int) -> ExamplePass:
        """A pass in which every example has a gradient of its own; it needs `writes_gradients`."""
        assert self.layout is not None
        weights, masks, batch, padding, pool = self._packed(task, inputs)
        return ExamplePass(weights, self.layout, batch, pool, masks, padding, self.memory, num_examples)

    def token_owners(self, inputs: Inputs, num_examples: int) -> list[Tensor]:
        """Which example each token is of, where modules are called with all tokens end to end."""
        if self.layout is None:
            return []
        batch = pack(inputs.ids, inputs.mask, inputs.segments)
        return [batch.slots // batch.width % num_examples]

    def pooled_alike(self, task: str) -> tuple[str, ...]:
        """What tasks with the same encoder values have in common where they have the same vectors."""
        windows = self.tasks[task].windows
        of_windows = () if windows is None else (windows.pool, task if windows.learns else "")
        return (self.pools[task], *of_windows)

    @property
    def writes_gradients(self) -> bool:
        """Whether the encoder overwrites `memory.gradients` with its gradients; otherwise autograd adds them up."""
        module, leaf = self._canonical[self.table]
        return self.layout is not None and not self.adds_gradients and getattr(module, leaf).device.type == "cpu"

    def encode(self, task: str, inputs: Inputs, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The last hidden states, the pooler's output where there is one, and the mask.

        They are specific to the task where it has adapters.
        """
        offered = {"input_ids": inputs.ids, "attention_mask": inputs.mask, "token_type_ids": inputs.segments}
        adapted = nullcontext() if self.adapters is None else self.adapters.used_by(task, inputs.mask)
        with adapted, _added_to(self.token_table(), noise):
            output = self.encoder(**{name: offered[name] for name in self.accepts})
        return output.last_hidden_state, getattr(output, "pooler_output", None), inputs.mask

    def pool(
        self, task: str, hidden: Tensor, pooled: Tensor | None, mask: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """Return what the task's head reads of the last hidden states; without `places`, every one for its words."""
        kind = self.pools[task]
        if kind == WORDS:
            return hidden if places is None else hidden.flatten(0, 1).index_select(0, places)
        if kind == "pooler":
            assert pooled is not None
            return pooled
        if kind == "cls":
            return hidden[:, 0]
        return mean_pool(hidden, mask)

    def head(self, task: str, vectors: Tensor) -> Tensor:
        """The head's answer, with dropout in front of it and of what LoRA adds to it."""
        if self.tasks[task].is_dual:
            vectors = pair_features(*vectors.chunk(2))
        return self.outputs(task, F.dropout(vectors, self.tasks[task].dropout, self.training))

    def outputs(self, task: str, features: Tensor) -> Tensor:
        """The head's answer to its features, by way of its hidden layer where it has one."""
        layer = self.tasks[task].head
        if layer is not None:
            features = ACTIVATIONS[layer.activation](self.hidden[task](features))
            if self.training:
                features = F.dropout(features, layer.dropout)
        output: Tensor = self.heads[task](features)
        return output

    def canonical(self) -> dict[str, tuple[nn.Module, str]]:
        """Return canonical name -> the module that holds the parameter and its attribute name, in model order."""
        return self._canonical

    def token_table(self) -> Any:
        """Return the module that holds the token table."""
        return self._canonical[self.table][0]


@contextmanager
def _added_to(table: nn.Module, noise: Tensor | None) -> Iterator[None]:
    """Meanwhile, what the token table gives out has the noise in it."""
    if noise is None:
        yield
        return
    handle = table.register_forward_hook(lambda module, given, embedded: embedded + noise)
    try:
        yield
    finally:
        handle.remove()


def _canonical_parameters(roots: Sequence[tuple[str, nn.Module | None]]) -> dict[str, tuple[nn.Module, str]]:
    found: dict[str, tuple[nn.Module, str]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, root in roots:
        for path, module in root.named_modules() if root is not None else ():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    found[prefix + (f"{canonical_path(path)}.{leaf}" if path else leaf)] = (module, leaf)
    return found


def pair_features(first: Tensor, second: Tensor) -> Tensor:
    """What the head of a dual pair sees of the two texts' vectors."""
    cosine = F.cosine_similarity(first, second, dim=-1).unsqueeze(-1)
    return torch.cat([first, second, (first - second).abs(), first * second, COSINE_SCALE * cosine], dim=-1)


def pooling(task: Task, encoder: Encoder) -> str:
    """How a task's head gets its vectors: pooler, cls or mean, one for a text, or WORDS, one for each word."""
    if task.kind_of.by_word:
        return WORDS
    if task.pool == "auto":
        return "pooler" if encoder.has_pooler else "mean"
    return task.pool


def build_model(
    encoder: Encoder,
    tasks: Mapping[str, Task],
    seed: int,
    config: ModelConfig | None = None,
    *,
    plain: bool = False,
    log_variances: bool = False,
) -> MultiTaskModel:
    """A model in evaluation mode whose every bit follows from the encoder, the tasks, the seed and what is added."""
    return MultiTaskModel(
        encoder, tasks, seed, config or ModelConfig(), plain=plain, log_variances=log_variances
    ).eval()


def open_model(
    config: ModelConfig, tasks: Mapping[str, Task], seed: int, *, plain: bool = False, log_variances: bool = False
) -> tuple[Encoder, MultiTaskModel]:
    """The encoder of a config, and the model on it; server and sites build the same bits."""
    values_only = not plain and not is_extended(config)
    encoder = load_encoder(config, seed, wants_pooler(tasks), values_only=values_only)
    model = build_model(encoder, tasks, seed, config, plain=plain, log_variances=log_variances)
    _load_heads(model, config.server_model)
    return encoder, model


def _load_heads(model: MultiTaskModel, name: str) -> None:
    """Give the heads that are to start as pretrained ones the values of the encoder's folder."""
    wanted = [task for task in model.tasks.values() if task.head_start == "pretrained"]
    if not wanted:
        return
    path = encoder_folder(name) / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"tasks.{wanted[0].name}.head: {path} is not there; save the model as one file")
    found, layout = load_safetensors(path), LAYOUTS[model.encoder.config.model_type]
    for task in wanted:
        for part, source in (("", layout.output), ("hidden.", layout.hidden)):
            for leaf in ("weight", "bias") if source is not None else ():
                module, ours = model.canonical()[f"{HEADS}{task.name}.{part}{leaf}"]
                value, parameter = found.get(f"{source}.{leaf}"), getattr(module, ours)
                if value is None or value.shape != parameter.shape:
                    has = "not there" if value is None else tuple(value.shape)
                    raise ModelError(
                        f"tasks.{task.name}.head: `{source}.{leaf}` of {path} is {has}, and the head"
                        f" {tuple(parameter.shape)}; leave `head` out for a fresh one"
                    )
                with torch.no_grad():
                    parameter.copy_(value)


def wants_pooler(tasks: Mapping[str, Task]) -> bool | None:
    """True if a task asks for the pooler, False if none could use it, None if it is left to the encoder."""
    pools = {task.pool for task in tasks.values() if not task.kind_of.by_word}
    if "pooler" in pools:
        return True
    return None if "auto" in pools else False


@dataclass
class Buffers:
    """Memory that is used again from one client to the next; a buffer is valid until its name is taken again."""

    by_name: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of that size with arbitrary content."""
        known = self.by_name.get(name)
        if known is None or known.numel() < size or known.dtype != dtype or known.device != device:
            # Clients differ a little in size: some spare memory saves the next one a new buffer.
            known = self.by_name[name] = torch.empty(size + size // 8, dtype=dtype, device=device)
        return known[:size]


# Bytes; torch allocates memory so.
ALIGNED = 64


@dataclass(frozen=True)
class Flat:
    """A buffer of values, and the span of each key in it, in order."""

    values: Tensor
    spans: Mapping[Key, slice]


def flatten(weights: Weights, order: Sequence[Key], buffers: Buffers, device: torch.device | None) -> Flat:
    """Copy these keys' values into a buffer, in that order."""
    spans: dict[Key, slice] = {}
    total = 0
    for key in order:
        spans[key] = slice(total, total + weights[key].numel())
        total += weights[key].numel()
    dtypes = {weights[key].dtype for key in order} or {torch.get_default_dtype()}
    assert len(dtypes) == 1, "the trainable values of a model have one dtype"
    target = torch.device("cpu") if device is None else device
    values = buffers.take("values", total, dtypes.pop(), target)
    for key, span in spans.items():
        values[span].copy_(weights[key].detach().reshape(-1))
    return Flat(values, spans)


def is_decayed(module: nn.Module, parameter: Tensor) -> bool:
    """Whether weight decay is for this parameter of a module; tables, norms and biases are left alone."""
    return parameter.dim() >= 2 and not isinstance(module, nn.Embedding)


def undecayed(model: MultiTaskModel) -> set[str]:
    """Names of parameters that weight decay leaves alone."""
    return {name for name, (module, leaf) in model.canonical().items() if not is_decayed(module, getattr(module, leaf))}


def flat_order(views: Mapping[str, Mapping[str, Key]], keys: Iterable[Key], plain: set[str]) -> list[Key]:
    """The keys so that those with one decay, one rate and the same tasks are neighbours, and step in one call."""
    users: dict[Key, tuple[str, ...]] = {}
    for task, view in views.items():
        for key in view.values():
            users[key] = (*users.get(key, ()), task)
    return sorted(keys, key=lambda key: (key.name in plain, key.name.startswith(HEADS), users[key]))


class BoundModel:
    """Puts a slice's values into the model, and switches those that differ between tasks.

    Where a layer is at level group or task, a client with several tasks holds several values of it; `use` makes one
    task's the current ones. Values that do not train take no gradient. The others are views of one buffer, `flat`,
    which comes from `buffers` and is valid until the next model is bound with them. A model that is only `read` shares
    the memory of the weights it was given, where they are aligned: how a CPU rounds a product depends on it, and scores
    would else depend on where a value lies in a file.
    """

    @timed("binding")
    def __init__(
        self,
        model: MultiTaskModel,
        plan: SharingPlan,
        tasks: Sequence[str],
        client: str,
        weights: Weights,
        rows: Rows | None = None,
        device: torch.device | None = None,
        buffers: Buffers | None = None,
        *,
        read: bool = False,
    ) -> None:
        self.model = model
        self._is_read = read
        model.adds_gradients = False
        self.buffers = buffers or Buffers()
        self.views = plan.keys(model.canonical(), tasks, client)
        keys = dict.fromkeys(key for view in self.views.values() for key in view.values())
        trained = [] if read else [key for key in keys if plan.trains(key)]
        order = flat_order(self.views, trained, undecayed(model))
        self.flat: Flat = flatten(weights, order, self.buffers, device)
        self.parameters: dict[Key, nn.Parameter] = {key: self._parameter(key, weights, device) for key in keys}
        # Task -> canonical name -> where the encoder's gradients go, as far as that is known.
        self.gradients: dict[str, dict[str, Tensor]] = {}
        self.index = None if rows is None else compact_ids(rows, model.vocabulary_size)
        self._pad = model.pad_id if self.index is None else int(self.index[model.pad_id])
        self._check_positions()
        self.use(tasks[0])

    def use(self, task: str) -> MultiTaskModel:
        """Return the model with this task's values in it, whoever used it in between."""
        canonical = self.model.canonical()
        for name, key in self.views[task].items():
            module, leaf = canonical[name]
            if module._parameters[leaf] is not self.parameters[key]:
                module._parameters[leaf] = self.parameters[key]
        table = self.model.token_table()
        if table.padding_idx is not None:
            table.padding_idx = self._pad
        self.model.memory.gradients = self.gradients.get(task, {})
        return self.model

    def weights(self) -> Weights:
        """Return the bound values by key, which share the parameters' memory."""
        return {key: parameter.detach() for key, parameter in self.parameters.items()}

    def _parameter(self, key: Key, weights: Weights, device: torch.device | None) -> nn.Parameter:
        if key in self.flat.spans:
            return nn.Parameter(self.flat.values[self.flat.spans[key]].view(weights[key].shape))
        value = weights[key].detach().to(device)
        is_aligned = value.device.type != "cpu" or value.data_ptr() % ALIGNED == 0
        return nn.Parameter(value if is_aligned or not self._is_read else value.clone(), requires_grad=False)

    def _check_positions(self) -> None:
        origin = self.model.position_origin
        if self.index is not None and origin is not None and self.index[origin] != origin:
            raise ModelError(
                f"federation.vocabulary_slices: this encoder counts positions from its padding id {origin}, which a "
                "slice moves; write `vocabulary_slices: false`"
            )
