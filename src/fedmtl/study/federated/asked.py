"""What a study of federated against centralized is asked; every default of the command stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmtl.errors import ConfigError
from fedmtl.study.presets import preset_rates, read_preset, refuse_both
from fedmtl.study.rates import Rates, rate_for
from fedmtl.study.setups import Settings, fits, given_over

TASKS = ("sst2", "qqp", "stsb")
QUICK_TASKS = ("sentiment", "paraphrase", "similarity")


@dataclass(frozen=True)
class Asked:
    """All of it stands in study.yaml.

    `rates` are (pattern, learning rate) of setups or of their kinds; the last that fits counts. With `choose` every
    kind runs once with each of these rates, on a split cut from train, and nothing else runs. `overrides` change what
    all cells have in common, and leave alone what a row is about; `own_overrides` are (pattern, override) of setups or
    kinds, over all else.
    """

    data: str | None = None
    encoder: str = "tiny"
    quick: bool = False
    seeds: tuple[int, ...] = (0,)
    seed_rows: str = "*"
    rows: str = "*"
    samples: tuple[int, ...] = (300, 1000)
    # At 0.1, one of three clients may well get no example at all.
    alphas: tuple[float, ...] = (5.0, 0.5, 0.2)
    rounds: int = 8
    long_rounds: int = 30
    rates: Rates = ()
    choose: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()
    own_overrides: tuple[tuple[str, str], ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        return QUICK_TASKS if self.quick else TASKS

    @property
    def named_rates(self) -> Rates:
        """As the names of setups are written: a config writes a mode with underscores, a setup has none."""
        return tuple((pattern.replace("_", "-"), rate) for pattern, rate in self.rates)

    def rate(self, setup: str, kind: str) -> float | None:
        """The rate that was given for a setup, by its name or its kind; None where none was."""
        return rate_for(self.named_rates, setup, kind)

    def overrides_of(self, setup: str, kind: str) -> list[str]:
        """What was given for a setup alone, by its name or its kind."""
        return [given for pattern, given in self.own_overrides if fits(setup, pattern) or fits(kind, pattern)]


# What a miniature does unless told otherwise.
QUICK: Mapping[str, Any] = {"samples": (10, 20), "alphas": (5.0, 1.0, 0.5), "rounds": 2, "long_rounds": 4}


def make_asked(preset: str | None, given: Mapping[str, Any]) -> Asked:
    """The defaults, a preset over them, and what was given over that; None is not given.

    Of rates and settings the last counts, so that those that were given come after the preset's.
    """
    refuse_both(preset, quick=given.get("quick", False))
    found: Settings = dict(QUICK) if given.get("quick") else {} if preset is None else _read(preset)
    lists = {name: (*found.get(name, ()), *given[name]) for name in ("rates", "overrides", "own_overrides")}
    return Asked(**{**given_over(found, given), **lists})


def _read(preset: str) -> Settings:
    found = read_preset("federated", preset)
    return {
        "encoder": found["encoder"],
        "seeds": tuple(found["seeds"]),
        "seed_rows": found["seed_rows"],
        "rates": preset_rates(found),
        "overrides": tuple(found["set"]),
        "own_overrides": tuple(map(parse_own, found["set_for"])),
    }


def parse_own(text: str) -> tuple[str, str]:
    """`federated-prox:training.proximal=1` as a pattern and an override."""
    names, sign, override = text.partition(":")
    if not sign or not names.strip() or "=" not in override:
        raise ConfigError(f"--set-for {text}: write `NAME:KEY=VALUE`, such as federated-prox:training.proximal=1")
    return names.strip().replace("_", "-"), override
