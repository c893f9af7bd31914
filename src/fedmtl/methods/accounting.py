"""What noise comes to: (epsilon, delta) of what was done, and the noise that keeps to an epsilon.

The accountant is Google's `dp-accounting`: privacy loss distributions (Koskela et al. 2020), which are nearly exact,
with Renyi orders (Mironov 2017) as a check. Two data sets are neighbours if one has one unit more than the other: an
example or a whole client, as the caller says. Releases are Gaussian sums of contributions of norm 1 at most, of units
that were drawn by themselves with some chance (Poisson); a chance of 1 is everybody, and nothing is gained by it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from fedmtl.errors import ConfigError, needs_extra

# Orders of the check. Those below 2 take longest, fail for some rates, and would be the best only for an epsilon beyond
# any use.
_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
# In the search for noise, losses are rounded up to whole multiples of this: a tenth of the time of the accountant's own
# grid, which a statement has, and an epsilon that is a thousandth larger, so a little more noise.
_COARSE = 1e-3
# Noise is found to this part of itself, to the safe side.
_PRECISION = 1e-3
# A noise multiplier beyond this would drown every update.
MOST_NOISE = 1e4
# Beyond this epsilon, which promises nothing any more, Renyi orders alone are asked: a distribution's grid would take
# gigabytes.
_MOST_EPSILON = 50.0


@dataclass(frozen=True, order=True)
class Releases:
    """Sums that were released one after the other: each of units drawn with this chance, with this much noise.

    `noise_multiplier` is the noise's standard deviation in units of the largest contribution.
    """

    chance: float
    noise_multiplier: float
    times: int

    def to_dict(self) -> dict[str, Any]:
        return {"chance": self.chance, "noise_multiplier": self.noise_multiplier, "times": self.times}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Releases:
        """Raise ValueError unless these are releases."""
        chance, noise, times = values["chance"], values["noise_multiplier"], values["times"]
        is_fine = set(values) == {"chance", "noise_multiplier", "times"} and type(times) is int and times > 0
        if not is_fine or not 0 < chance <= 1 or not 0 < noise < math.inf:
            raise ValueError(f"no releases: {values}")
        return Releases(float(chance), float(noise), times)


def together(releases: Iterable[Releases]) -> tuple[Releases, ...]:
    """The same releases, those that are alike counted together; the order of releases does not matter to their cost."""
    times: dict[tuple[float, float], int] = {}
    for one in releases:
        times[one.chance, one.noise_multiplier] = times.get((one.chance, one.noise_multiplier), 0) + one.times
    return tuple(Releases(*kind, number) for kind, number in sorted(times.items()))


@dataclass(frozen=True)
class Spent:
    """What releases come to at a delta; `epsilon_rdp`, the check, is never the smaller one but for rounding."""

    epsilon: float
    epsilon_rdp: float
    delta: float


def spent(releases: Iterable[Releases], delta: float) -> Spent:
    """What these releases spend together; nothing where there are none."""
    done = together(releases)
    if not done:
        return Spent(0.0, 0.0, delta)
    most = _epsilon(done, delta, "rdp")
    return Spent(_epsilon(done, delta, "pld") if most <= _MOST_EPSILON else most, most, delta)


def most_spent(releases: Iterable[Releases], delta: float) -> float:
    """An epsilon that these releases do not exceed, by Renyi orders: quick, and some tenths above `spent`."""
    done = together(releases)
    return _epsilon(done, delta, "rdp") if done else 0.0


@cache
def noise_for(epsilon: float, delta: float, chance: float, times: int) -> float:
    """The least noise multiplier with which so many releases spend at most epsilon; a ConfigError where none does."""

    def spends(noise: float, kind: str) -> float:
        return _epsilon((Releases(chance, noise, times),), delta, kind)

    # Renyi orders are quick and ask for a little more noise than it takes: from there a few looks at distributions do.
    enough = 1.0
    while spends(enough, "rdp") > epsilon:
        enough *= 2
        if enough > MOST_NOISE:
            raise ConfigError(_out_of_reach(epsilon, delta, chance, times))
    too_little = enough / 2
    while spends(too_little, "rdp") <= epsilon:
        enough, too_little = too_little, too_little / 2
    enough = _least(lambda noise: spends(noise, "rdp") <= epsilon, too_little, enough)
    if epsilon > _MOST_EPSILON:
        return enough
    too_little = enough * 0.9
    while spends(too_little, "coarse") <= epsilon:
        enough, too_little = too_little, too_little * 0.9
    return _least(lambda noise: spends(noise, "coarse") <= epsilon, too_little, enough)


def is_reachable(epsilon: float, delta: float, chance: float, times: int) -> bool:
    """Whether `noise_for` finds a noise; quick."""
    return most_spent([Releases(chance, MOST_NOISE, times)], delta) <= epsilon


def _least(is_enough: Callable[[float], bool], too_little: float, enough: float) -> float:
    """The least number that is enough, between one that is not and one that is."""
    while enough > too_little * (1 + _PRECISION):
        middle = math.sqrt(too_little * enough)
        too_little, enough = (too_little, middle) if is_enough(middle) else (middle, enough)
    return enough


def _out_of_reach(epsilon: float, delta: float, chance: float, times: int) -> str:
    return (
        f"epsilon: found {epsilon:g}, which no noise reaches at delta {delta:g} with {times} releases of"
        f" {chance:.3g} of the units; write a larger epsilon, or fewer rounds"
    )


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[Releases, ...], delta: float, kind: str) -> float:
    dp = _dp_accounting()
    accountant = _accountant(dp, kind)
    accountant.compose(_event(dp, releases))
    return float(accountant.get_epsilon(delta))


def _accountant(dp: Any, kind: str) -> Any:
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if kind == "pld":
        return dp.pld.PLDAccountant(relation)
    if kind == "coarse":
        return dp.pld.PLDAccountant(relation, value_discretization_interval=_COARSE)
    return dp.rdp.RdpAccountant(orders=_ORDERS, neighboring_relation=relation)


def _event(dp: Any, releases: Iterable[Releases]) -> Any:
    events = []
    for one in releases:
        event = dp.GaussianDpEvent(one.noise_multiplier)
        if one.chance < 1:
            event = dp.PoissonSampledDpEvent(one.chance, event)
        events.append(dp.SelfComposedDpEvent(event, one.times))
    return dp.ComposedDpEvent(events)


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(needs_extra("privacy", "dp-accounting", "privacy")) from error
    # It says of each Renyi order that does not converge that it is left out; the others give the bound.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting
