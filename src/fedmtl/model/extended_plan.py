"""The sharing plan of a model with parts added: what LoRA leaves as it is, and whose adapters are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError
from fedmtl.model.keys import ADAPTERS
from fedmtl.model.lora import fixed_patterns
from fedmtl.model.plan import SharingPlan


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
