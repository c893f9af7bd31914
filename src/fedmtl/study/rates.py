"""Numbers as options write them, and learning rates by the names of setups."""

from __future__ import annotations

from fedmtl.errors import ConfigError
from fedmtl.study.setups import fits

# Patterns of names, each with a learning rate; the last that fits counts.
Rates = tuple[tuple[str, float], ...]


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """`5,0.5` as numbers above 0, each once; `option` is named where they are not."""
    return tuple(dict.fromkeys(_number(part, text, option) for part in text.split(",") if part.strip()))


def parse_rates(text: str) -> Rates:
    """`federated*=4e-4,local=1e-4` as patterns and rates."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not sign or not name.strip() for name, sign, _ in pairs):
        raise ConfigError(f"--rate: found {text}; write NAME=X with commas between, such as local=1e-4,tiny-*=2e-4")
    return tuple((name.strip(), _number(rate, text, "--rate")) for name, _, rate in pairs)


def rate_for(rates: Rates, *names: str) -> float | None:
    """The rate that was given for one of the names; None where none was."""
    given = [rate for pattern, rate in rates if any(fits(name, pattern) for name in names)]
    return given[-1] if given else None


def _number(part: str, text: str, option: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option}: found {text}; write numbers above 0 with commas between, such as 4e-4")
    return value
