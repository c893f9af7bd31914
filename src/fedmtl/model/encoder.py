"""Any encoder that AutoModel builds, with its tokenizer."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.foreign import excerpt
from fedmtl.model.bert.layout import (
    NUM_HEADS_KEY,
    build_encoder,
    has_fewer_heads,
    is_computed,
    load_bert_values,
    num_heads,
)
from fedmtl.model.encoder_files import (
    NO_CODE,
    NO_PICKLE,
    SHIPPED,
    check_encoder_files,
    encoder_folder,
    quiet_transformers,
)
from fedmtl.model.tensor_files import load_safetensors
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.seeds import derive_seed

RANDOM_NAME = re.compile(r"random-(\d+)x(\d+)")
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout",
    "embedding_dropout", "mlp_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """An encoder as the rest of the package uses it.

    `accepts` are the inputs its forward takes, of those we can give; `table` names its token table.
    """

    module: Any
    tokenizer: Any
    name: str
    accepts: frozenset[str]
    table: str
    hidden_size: int
    has_pooler: bool


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of `model.server_model`."""
    if RANDOM_NAME.fullmatch(config.server_model):
        return basic_tokenizer()
    tokenizer = _reach(quiet_transformers().AutoTokenizer.from_pretrained, config.server_model)
    # Where no file holds a vocabulary, transformers makes a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(
            f"model.server_model: {config.server_model} has no vocabulary; put its tokenizer.json or vocab.txt there"
        )
    return tokenizer


def load_encoder(
    config: ModelConfig, seed: int, keep_pooler: bool | None = None, *, values_only: bool = False
) -> Encoder:
    """Build the encoder; the same config and seed give the same bits.

    `keep_pooler` True adds a fresh pooler where the encoder was saved without one, False drops an unused
    one, so that it neither trains nor travels; None keeps what was saved. With `values_only`, an encoder that
    `model.bert` computes comes without transformers' code where it can.
    """
    tokenizer = load_tokenizer(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "encoder"))
        module, missing = _build(config, tokenizer, values_only, bool(keep_pooler))
    pooler_is_saved = getattr(module, "pooler", None) is not None and not any("pooler" in key for key in missing)
    if getattr(module, "pooler", None) is None and keep_pooler:
        raise ModelError(
            f"model.pool: {config.server_model} ({module.config.model_type}) has no pooler; "
            "write `pool: cls` or `pool: mean`"
        )
    _check_length(module, config)
    has_pooler = pooler_is_saved if keep_pooler is None else keep_pooler
    return describe_encoder(module, tokenizer, config.server_model, has_pooler)


def describe_encoder(module: Any, tokenizer: Any, name: str, has_pooler: bool) -> Encoder:
    """The record of a built encoder; a pooler that is not wanted is dropped."""
    if not has_pooler and hasattr(module, "pooler"):
        module.pooler = None
    return Encoder(
        module,
        tokenizer,
        name,
        _accepts(module),
        _table_name(module),
        int(module.config.hidden_size),
        has_pooler,
    )


def position_origin(module: nn.Module) -> int | None:
    """The padding id that positions are counted from, as RoBERTa and MPNet do; None where they start at 0."""
    table = _position_table(module)
    return None if table is None else table.padding_idx


def _position_table(module: nn.Module) -> nn.Embedding | None:
    """The table of absolute positions; None where positions are computed."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return part
    return None


def most_positions(module: nn.Module) -> int | None:
    """How many tokens a text may have; None where positions are computed."""
    table = _position_table(module)
    if table is None:
        return None
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def _check_length(module: nn.Module, config: ModelConfig) -> None:
    limit = most_positions(module)
    if limit is not None and config.max_length > limit:
        raise ModelError(
            f"model.max_length: found {config.max_length}, but {config.server_model} has {limit} positions; "
            f"write `max_length: {limit}` or less"
        )


def _build(config: ModelConfig, tokenizer: Any, values_only: bool, needs_pooler: bool) -> tuple[Any, list[str]]:
    """The module, and the names of weights that its files did not have."""
    shape = RANDOM_NAME.fullmatch(config.server_model)
    if shape:
        layers, hidden = int(shape[1]), int(shape[2])
        architecture = with_dropout(_random_config(layers, hidden, config.max_length, tokenizer), config)
        return build_encoder(architecture), []
    architecture = with_dropout(_reach(quiet_transformers().AutoConfig.from_pretrained, config.server_model), config)
    if config.initial == "random":
        # The files may be in half precision; a random start is not.
        return build_encoder(architecture), []
    if values_only and is_computed(architecture):
        values = load_bert_values(encoder_folder(config.server_model), architecture)
        if values is not None and (values.pooler is not None or not needs_pooler):
            return values, []
    if has_fewer_heads(architecture):
        return _fewer_heads(config.server_model, architecture)
    module, info = _reach(
        quiet_transformers().AutoModel.from_pretrained,
        config.server_model,
        config=architecture,
        dtype=torch.float32,
        output_loading_info=True,
        **NO_PICKLE,
    )
    missing = sorted(info["missing_keys"])
    lost = [name for name in missing if "pooler" not in name and "position_ids" not in name]
    if lost:
        raise ModelError(
            f"model.server_model: {config.server_model} lacks the weights of {lost[0]} and {len(lost) - 1} more; "
            "is it the folder of another kind of model?"
        )
    return module, missing


def _fewer_heads(name: str, architecture: Any) -> tuple[Any, list[str]]:
    """An encoder with fewer heads, which from_pretrained does not load, and the names of weights its file lacks."""
    module = build_encoder(architecture)
    path = encoder_folder(name) / "model.safetensors"
    found = load_safetensors(path) if path.is_file() else {}
    prefix = f"{module.base_model_prefix}."
    if any(key.startswith(prefix) for key in found):
        found = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    shapes = {key: value.shape for key, value in module.named_parameters()}
    missing = [key for key in shapes if key not in found]
    fits = all("pooler" in key for key in missing)
    if not fits or {**{key: shapes[key] for key in missing}, **{key: found[key].shape for key in found}} != shapes:
        raise ModelError(
            f"model.server_model: {name} says `{NUM_HEADS_KEY}: {num_heads(architecture)}`, but its model.safetensors"
            f" is not such a {architecture.model_type} encoder; name the folder that `fedmtl prune --heads` wrote"
        )
    module.load_state_dict({key: value.float() for key, value in found.items()}, strict=False)
    return module, missing


def _random_config(layers: int, hidden: int, max_length: int, tokenizer: Any) -> Any:
    heads = max(1, hidden // 64)
    if layers < 1:
        raise ModelError(f"model.server_model: random-{layers}x{hidden} has no layer; write random-1x{hidden} or more")
    if hidden < 1 or hidden % heads:
        raise ModelError(f"model.server_model: random-{layers}x{hidden} cannot be built; take a width divisible by 64")
    return quiet_transformers().BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(128, max_length),
    )


def with_dropout(architecture: Any, config: ModelConfig) -> Any:
    """The architecture with the config's dropout in it, where the config names one."""
    if config.encoder_dropout is not None:
        for name in DROPOUTS:
            if hasattr(architecture, name):
                setattr(architecture, name, config.encoder_dropout)
    return architecture


def _reach(load: Any, name: str, **options: Any) -> Any:
    """Call a from_pretrained; an encoder that cannot be reached is one line, never another encoder."""
    name = str(SHIPPED.get(name, name))
    looks_like_path = name.startswith(("/", "./", "../"))
    if looks_like_path and not Path(name).is_dir():
        raise ModelError(
            f"model.server_model: there is no folder {name}; give one that has config.json, weights and tokenizer"
        )
    if Path(name).is_dir():
        check_encoder_files(Path(name), "model.server_model")
    where = "a folder"
    if not Path(name).is_dir():
        from huggingface_hub import constants as hub_constants

        from fedmtl.tasks.load import SECONDS_TO_ANSWER, hub_answers

        where = "not a folder, and the hub has no such name or is not to be used (HF_HUB_OFFLINE)"
        if not hub_constants.HF_HUB_OFFLINE and not hub_answers():
            # Else it is tried again and again, for the better part of a minute.
            options["local_files_only"] = True
            where = f"not a folder, and the hub did not answer within {SECONDS_TO_ANSWER} s"
    try:
        return load(name, **options, **NO_CODE)
    except Exception as error:  # every library that a loader calls raises other kinds
        first = excerpt(error) or type(error).__name__
        raise ModelError(
            f"model.server_model: cannot load {name} ({where}); "
            f"give a folder with config.json, weights and tokenizer, or `tiny`, which is in the box. [{first}]"
        ) from error


def _accepts(module: Any) -> frozenset[str]:
    offered = {"input_ids", "attention_mask", "token_type_ids"}
    # With one type of segment, as in RoBERTa, the second text's would be past the end of its table.
    if getattr(module.config, "type_vocab_size", 2) < 2:
        offered.remove("token_type_ids")
    return frozenset(offered & set(inspect.signature(module.forward).parameters))


def _table_name(module: Any) -> str:
    table = module.get_input_embeddings().weight
    names: dict[str, Any] = dict(module.named_parameters())
    return next(name for name, parameter in names.items() if parameter is table)
