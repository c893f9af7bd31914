"""LoRA (Hu et al. 2021): a linear layer W becomes W + alpha / rank * B A, of which only A and B train.

PEFT adds the matrices; here is which layers get them, what they are called, where they start, what stays fixed, which
rules the sharing plan gets for them (and for the adapters of `model/adapters.py`), and how they become part of W again.
A starts at random and B at zero, so that the model starts as the plain one.

Where the clients train both, the mean of their A and the mean of their B are not the mean of their products. With
`train: b` everybody has the same A, and mean(B) A = mean(B A) exactly (Sun et al. 2024, FFA-LoRA).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.config import LoraConfig, ModelConfig
from fedmtl.errors import ConfigError, needs_extra
from fedmtl.model.families import family_of
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import ADAPTERS, HEADS, SharingPlan

A, B = ".lora_A.weight", ".lora_B.weight"
ADAPTER = "default"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def add_lora(encoder: Any, heads: Sequence[nn.Module], config: LoraConfig) -> None:
    """Wrap the target layers, in the modes that say so all layers of `heads` too; `set_lora` then sets the matrices."""
    paths = target_paths(encoder, config.targets or default_targets(encoder), config.layers)
    _inject(encoder, "|".join(map(re.escape, paths)), config)
    for layers in heads if wraps_heads(config) else ():
        # Not by their names: PEFT finds a module by attribute, and a task may be called `type`.
        wrapped = nn.ModuleList(layers.children())
        _inject(wrapped, r"\d+", config)
        layers._modules.update(zip(layers._modules, wrapped, strict=True))


def wraps_heads(config: LoraConfig) -> bool:
    return config.mode != "adapters"


def _inject(module: nn.Module, pattern: str, config: LoraConfig) -> None:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(needs_extra("model.lora", "peft", "lora")) from error
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=pattern, lora_dropout=config.dropout, bias="none"
    )
    # It draws from the global generator for values that are replaced.
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(settings, module, adapter_name=ADAPTER)


def canonical_path(path: str) -> str:
    """A module's path as it was before PEFT wrapped it, and `query.lora_A` for what it added."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}$", r".\1", path).removesuffix(".base_layer")


def set_lora(canonical: Mapping[str, tuple[nn.Module, str]], seed: int) -> None:
    """Start every A as PEFT does and every B at zero; the bits follow from the seed and the canonical name alone."""
    for name, (module, leaf) in canonical.items():
        parameter: Any = module._parameters[leaf]
        with torch.no_grad():
            if name.endswith(A):
                generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
            elif name.endswith(B):
                parameter.zero_()


def default_targets(encoder: Any) -> list[str]:
    """The targets of a config that names none: what the encoder's family calls those layers."""
    return [_inside(path) for path in family_of(encoder.config).targets]


def target_paths(encoder: Any, targets: Iterable[str], layers: Sequence[int] | None = None) -> list[str]:
    """Return the paths of the linear layers that some target names, in all numbered layers or those given.

    A target is the path inside a numbered layer, or its end, with or without `.dense`; where it is a whole path, ends
    are not looked at: `output` is `output.dense`, and not `attention.output.dense` too.
    """
    inside = {path: _inside(path) for path, part in encoder.named_modules() if isinstance(part, nn.Linear)}
    chosen: set[str] = set()
    for target in targets:
        words = (target, f"{target}.dense")
        found = [path for path, inner_path in inside.items() if inner_path in words]
        found = found or [
            path for path, inner_path in inside.items() if inner_path.endswith(tuple(f".{word}" for word in words))
        ]
        if not found:
            some = ", ".join(list(dict.fromkeys(inside.values()))[:8])
            raise ConfigError(f"model.lora.targets: `{target}` is no linear layer of this encoder; it has {some}")
        chosen.update(found)
    wanted = [path for path in inside if path in chosen]
    return wanted if layers is None else _in_layers(encoder.config, wanted, layers)


def _in_layers(config: Any, paths: Iterable[str], layers: Sequence[int]) -> list[str]:
    num_layers = config.num_hidden_layers
    if getattr(config, "num_hidden_groups", None) is not None:
        raise ConfigError(f"model.lora.layers: the layers of {config.model_type} share their weights; leave it out")
    strange = next((number for number in layers if number >= num_layers), None)
    if strange is not None:
        raise ConfigError(f"model.lora.layers: found {strange}, the encoder has layers 0 to {num_layers - 1}")
    return [path for path in paths if int((NUMBER.search(path) or ["-1"])[0]) in layers]


def _inside(path: str) -> str:
    """The path behind the last number: `attention.self.query`."""
    return re.split(r"(?:^|\.)\d+\.", path)[-1]


def fixed_patterns(names: Iterable[str], config: LoraConfig) -> list[str]:
    """Patterns of the parameters that do not train, and of no others; each matches a name that those before it left."""
    names = list(names)
    wrapped = {name.removesuffix(A) for name in names if name.endswith(A)}
    fixed = {name for name in names if _is_fixed(name, wrapped, config)}
    others = [name for name in names if name not in fixed]
    patterns: list[str] = []
    for name in names:
        if name in fixed and not any(fnmatchcase(name, pattern) for pattern in patterns):
            exact = (wide for wide in _wider(name) if not any(fnmatchcase(other, wide) for other in others))
            patterns.append(next(exact))
    return patterns


def _is_fixed(name: str, wrapped: set[str], config: LoraConfig) -> bool:
    if name.startswith(ADAPTERS):
        return False
    if name.endswith((A, B)):
        return config.train == "b" and name.endswith(A)
    if config.mode == "adapters" and not name.startswith(HEADS):
        return True
    return config.mode == "last_linear" or name.rpartition(".")[0] in wrapped


def _wider(name: str) -> Iterator[str]:
    """Patterns that match the name, the widest first: for all layers, for numbers of as many digits, for one layer."""
    if name.endswith(A):
        yield f"*{A}"
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        pattern = ".".join(parts[:depth] + ["*"] * (depth < len(parts)))
        yield NUMBER.sub("*", pattern)
        yield NUMBER.sub(lambda number: "[0-9]" * len(number[0]), pattern)
        yield pattern


def merge(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Return the plain model's weights: every W with its alpha / rank * B A added, without A and B."""
    merged = {name: value for name, value in weights.items() if not name.endswith((A, B))}
    for name in weights:
        if name.endswith(A):
            path = name.removesuffix(A)
            weight = merged[f"{path}.weight"]
            product = weights[path + B].double() @ weights[name].double()
            merged[f"{path}.weight"] = (weight.double() + config.alpha / config.rank * product).to(weight.dtype)
    return merged


def extended_plan(plan: SharingPlan, names: Sequence[str], config: ModelConfig) -> SharingPlan:
    """The plan with `fixed` rules in front for what does not train, and adapters at level task unless it names them."""
    adapters = [name for name in names if name.startswith(ADAPTERS)]
    is_named = any(pattern.startswith(ADAPTERS) for pattern, _ in plan.rules)
    # A plan that keeps everything at its client keeps these too.
    if adapters and not is_named and plan.level(adapters[0]) != "client":
        plan = plan.with_rule(f"{ADAPTERS}*", "task")
    if config.lora is None:
        return plan
    return _with_fixed(plan, names, config.lora.mode, fixed_patterns(names, config.lora))


def _with_fixed(plan: SharingPlan, names: Sequence[str], mode: str, patterns: Sequence[str]) -> SharingPlan:
    left = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    rules = []
    for pattern, level in plan.rules:
        is_over = _matches(pattern, names) and not _matches(pattern, left)
        if is_over and level != "fixed":
            raise ConfigError(
                f"sharing.rules: `{pattern}` is at level {level}, but `model.lora.mode: {mode}` keeps all it matches"
                " as it is; drop the rule"
            )
        if not is_over:
            rules.append((pattern, level))
    return replace(plan, rules=(*((pattern, "fixed") for pattern in patterns), *rules))


def _matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
