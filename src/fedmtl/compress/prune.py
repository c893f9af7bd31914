"""The config of a run that goes on from a finished one, with weights taken out of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedmtl.compress.cut import Cut
from fedmtl.compress.structured import CutFolder, cut, rules_left, write_cut
from fedmtl.config import Config
from fedmtl.config.file import config_from, load_config, with_overrides
from fedmtl.errors import ConfigError
from fedmtl.model.saved import SavedModel, load_model
from fedmtl.model.values import count_parameters
from fedmtl.runs import RunFolder


@dataclass(frozen=True)
class Pruned:
    """The config to run, and the model's parameters before and after what was cut."""

    config: Config
    parameters: tuple[int, int]


def prune_run(run: RunFolder, wanted: Cut, epochs: int, overrides: Sequence[str] = ()) -> Pruned:
    """Prepare a run of so many epochs that starts with the pruned model of another; a cut model is written into it."""
    if not wanted.amount and not wanted.removes:
        raise ConfigError("prune: nothing to take out; write --amount 0.2, --heads 0.5, --ffn 0.25 or --layers 2")
    for name in ("amount", "ffn", "heads"):
        if not 0 <= getattr(wanted, name) < 1:
            raise ConfigError(f"--{name}: found {getattr(wanted, name):g}, it must be at least 0 and less than 1")
    saved = load_model(run.model)
    size = count_parameters(saved.weights)
    if not wanted.removes:
        config = _config(run, wanted, epochs, overrides, None, saved)
        return Pruned(config, (size, size))
    smaller = cut(saved, wanted.ffn, wanted.layers, wanted.heads)
    name = f"ffn{wanted.ffn:g}-layers{wanted.layers}" + (f"-heads{wanted.heads:g}" if wanted.heads else "")
    folder = run.path / "cut" / name
    config = _config(run, wanted, epochs, overrides, write_cut(smaller, folder.absolute()), smaller)
    return Pruned(config, (size, count_parameters(smaller.weights)))


def _config(
    run: RunFolder, wanted: Cut, epochs: int, overrides: Sequence[str], folder: CutFolder | None, saved: SavedModel
) -> Config:
    """The run's own config, one epoch a round; pruning begins at once and ends a round before the last."""
    raw = load_config(run.config).model_dump()
    raw["output"] = str(run.path.parent)
    raw["model"]["start_from"] = str(run.model.absolute())
    training = raw["training"]
    training |= {"num_rounds": epochs, "local_epochs": 1, "local_steps": None, "pruning": None}
    training["warmup_rounds"] = min(training["warmup_rounds"], epochs)
    if wanted.amount:
        training["pruning"] = {"amount": wanted.amount, "rounds": max(1, epochs), "start_round": 0}
    if folder is not None:
        told = {"server_model": str(folder.encoder), "client_model": None, "initial": "pretrained"}
        raw["model"] |= {**told, "start_from": str(folder.model)}
        names = dict.fromkeys(key.name for key in saved.weights)
        rules = [next(iter(rule.items())) for rule in raw["sharing"]["rules"]]
        raw["sharing"]["rules"] = [{pattern: level} for pattern, level in rules_left(rules, names)]
    return config_from(with_overrides(raw, overrides))
