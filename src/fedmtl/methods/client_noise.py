"""Client-level noise that the clients add themselves, under masks: `privacy.client` with `noise_at: clients`.

Nobody sees a single update, so nobody but the clients can clip and add noise. Distributed as in Kairouz et al. 2021,
The Distributed Discrete Gaussian Mechanism for Federated Learning, with rounded normal numbers.

What a client does in a round, of a bound C and a noise multiplier z:

1. It clips its update so that the norm over all of its scopes is at most C after it has become whole multiples of the
   step: to C less half a step times the root of the number of entries, the most that rounding adds.
2. Of each scope it knows, by the adverts that its masks are bound to, the fewest clients n that a sum can be of when it
   is opened: `privacy.min_clients` or a policy's number, or the threshold less those that do not have the scope.
3. It adds normal numbers of standard deviation z * C / sqrt(n - 1) to every entry, rounded to the step, and masks that.

So whoever dropped out, an opened sum has at least n parts of noise. One of them may belong to the reader, a client that
knows its own; without it the noise is still z * C or more.

What is stated. One client's update in place of zeros changes the vector of all sums by C at most: neighbours differ
by that, and who takes part in a round is public, as it is to the server. So a round is one Gaussian release for each
client that took part, and none for the others. That clients are drawn by chance makes it no less, as the server knows
who was drawn, and the strength of a round's noise tells everybody how many. The ledger has, for each client, the rounds
in which a sum with its part was opened, with the noise of those that were in the sum, less one. A sum that stays
closed releases nothing.

Rounding. The sum of the updates is a whole number of steps, so that the sum of the rounded parts is the exact sum of
normal numbers, shifted, with every part's rounding as noise beside them. What is left out of the account is that
a normal number's rounding is not quite independent of it, which for a part of 16 steps or more is less than
exp(-2 pi^2 16^2), 10^-2194. Less than 16 steps are refused.

Where sites have keys, a client's noise is of its secret, of its job and of all that the clients of the session agree
on, fresh keys among it: a round that is opened twice is two releases, and counts so at the server and at the client,
which with epsilon answers nothing beyond it. In a simulation the same round has the same noise, and counts once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedmtl.federation.filters.protocol import FilterClient
from fedmtl.federation.messages import ClientId, ClientInfo, Job, State, Update
from fedmtl.federation.server_method import RoundSettings, Step
from fedmtl.methods.accounting import MOST_NOISE, Releases, most_spent, noise_for, spent, together
from fedmtl.methods.client_privacy import (
    LEDGER,
    MAX_NORM,
    NAME,
    NOISE,
    NOT_COVERED,
    ClientPrivacy,
    check_required,
    clip_factors,
    expected_returns,
    scope_norms,
)
from fedmtl.methods.example_account import Ledger
from fedmtl.methods.masking import FixedPoint, Masked
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.methods.secure_protocol import FEWEST, SharedNoise, refuse
from fedmtl.methods.secure_protocol import NAME as MASKS
from fedmtl.runs.event_lines import Event
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights

CLIENTS = "clients"
# A part's deviation in steps, and the share of the bound that rounding may take.
FEWEST_STEPS, MOST_ROUNDING = 16.0, 0.01
# As rare as it is that a client is drawn more often than its noise is for.
_SELDOM = 1e-6
_PIECE = 1 << 16


# The client's half --------------------------------------------------------------------------------------------------


class NoisePart:
    """A client's part of a round's noise, and its count of what it has released."""

    def __init__(self, given: SharedNoise, client: FilterClient, context: str | None) -> None:
        assert client.release is not None
        release, multiplier = client.release(), multiplier_of(client.job)
        if not 0 < multiplier <= MOST_NOISE or multiplier < (given.noise_multiplier or 0.0):
            raise refuse("the job's noise is not that of the config")
        self._given, self._multiplier = given, multiplier
        self._folder, self._required = release.folder, release.required.get(NAME)
        self._key = derive_key(release.secret, release.digest, NAME, context or "")
        self._entry, self._ledger = derive_key(self._key, "entry").hex()[:32], Ledger(release.folder, LEDGER)

    def count(self) -> None:
        """Count this release before it is made, and refuse one beyond epsilon, or beyond what the policy allows."""
        given, one = self._given, Releases(1.0, self._multiplier, 1)
        done = self._ledger.with_(NAME, self._entry, one)
        if given.epsilon is not None and most_spent(done, given.delta) > given.epsilon:
            found = spent(done, given.delta).epsilon
            if found > given.epsilon * (1 + 1e-6):
                raise refuse(
                    f"with this round this client would have spent epsilon {found:.3g}, and privacy.client.epsilon is"
                    f" {given.epsilon:g}"
                )
        check_required(self._folder, done, self._required)
        self._ledger.add(self._entry, {NAME: one})

    def clipped(self, update: Update, numbers: FixedPoint) -> Update:
        """The update, which has the bound's norm at most after it was rounded."""
        entries = sum(value.numel() for value in update.delta.values())
        rounding = numbers.step / 2 * math.sqrt(entries)
        if rounding > MOST_ROUNDING * self._given.max_norm:
            raise refuse(
                f"rounding {entries} entries to multiples of {numbers.step:.2g} would take {rounding:.2g} of the bound"
                f" {self._given.max_norm:g}; write privacy.secure_aggregation.bits: 64"
            )
        factors, _ = clip_factors(scope_norms(update.delta), self._given.max_norm - rounding, self._given.bound)
        if min(factors.values(), default=1.0) == 1.0:
            return update
        return replace(update, delta={key: value * factors[key.scope] for key, value in update.delta.items()})

    def add(self, scope: str, fewest: int, numbers: FixedPoint, into: Masked) -> None:
        """Add the part of a scope's noise to its whole numbers."""
        deviation = deviation_of(self._given, self._multiplier, fewest)
        if deviation < FEWEST_STEPS * numbers.step:
            raise refuse(
                f"noise of {deviation:.2g} in steps of {numbers.step:.2g} is too coarse; write"
                " privacy.secure_aggregation.bits: 64"
            )
        stream = KeyedNoise(derive_key(self._key, scope))
        for start in range(0, len(into), _PIECE):
            part = into[start : start + _PIECE]
            noise = torch.zeros(len(part), dtype=torch.float64)
            stream.add_to(noise, deviation)
            whole = np.rint(noise.numpy() / numbers.step).astype(np.int64)
            np.add(part, whole.astype(part.dtype), out=part)


def multiplier_of(job: Job) -> float:
    """The noise multiplier of a job's round."""
    return float(job.extra.get(NAME, NO_EXTRA).values.get(NOISE, 0.0))


def deviation_of(given: SharedNoise, multiplier: float, fewest: int) -> float:
    """The standard deviation of one client's part, of sums of so many clients or more."""
    return multiplier * given.max_norm / math.sqrt(fewest - 1)


# The server's half --------------------------------------------------------------------------------------------------


class OpenedSums:
    """The sums of a round, which have their noise, over the expected number of clients of each."""

    def __init__(self, expected: Mapping[Key, float]) -> None:
        self._expected = expected
        self._sums: Weights = {}
        self.strength: float | None = None

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """Take what could be opened: means, with the number of clients of each scope as its weight."""
        self._sums = {key: value * weights[key.scope] for key, value in update.delta.items()}
        fewest = update.extra.get(MASKS, NO_EXTRA).values.get(FEWEST, {})
        parts = [(weights[scope] - 1) / (fewest[scope] - 1) for scope in {key.scope for key in update.delta}]
        self.strength = math.sqrt(min(parts)) if parts else None

    def result(self) -> Weights:
        return {key: total.div_(self._expected[key]) for key, total in self._sums.items()}

    def remember(self) -> Extra:
        """Nothing here: the ledger is in the state of the capability."""
        return NO_EXTRA


class NoiseAtClients(ClientPrivacy):
    """Draws the clients of a round, and keeps the ledger of each one's releases."""

    def start(self, state: State) -> Step:
        self._is_taken_up = False
        settings, noise = self._settings, self._settings.noise_multiplier
        if noise is None:
            assert settings.epsilon is not None
            times = most_rounds(settings.sampling_rate, max(1, self._num_rounds))
            noise = noise_for(settings.epsilon, settings.delta, 1.0, times)
        return Step(state.with_extra(NAME, _extra({}, noise)))

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        self._ledgers, noise = _read(state.extra[NAME])
        if self._is_taken_up and self._is_deployed:
            # The round that was cut off had the same sample, and its sums may have been opened.
            self._release(sampled, noise)
            most = max(self._ledgers.values(), key=lambda done: most_spent(done, self._settings.delta), default=())
            noise = self._enough(most, noise, state.round)
        self._is_taken_up, self._noise = False, noise
        rate = self._settings.sampling_rate
        self._opened = OpenedSums(expected := expected_returns(self._candidates, rate, state.plan, self._names))
        self._warn(state, expected, noise)
        return RoundSettings(extra=Extra({NOISE: noise}), aggregator=self._opened)

    def after_aggregation(self, before: State, after: State) -> Step:
        if self._opened.strength is not None:
            returned = [client for client, number in after.accepted.items() if number == after.round]
            self._release(returned, _rounded_down(self._noise * self._opened.strength))
        return Step(after.with_extra(NAME, _extra(self._ledgers, self._noise)))

    def report(self, state: State) -> tuple[Event, ...]:
        if NAME not in state.extra or not state.round:
            return ()
        ledgers, noise = _read(state.extra[NAME])
        delta = self._settings.delta
        most = max(set(ledgers.values()), key=lambda done: (most_spent(done, delta), done), default=())
        details = {
            NOISE: noise,
            MAX_NORM: self._settings.max_norm,
            "expected_clients": self._num_expected(),
            "clients": float(len(ledgers)),
        }
        return (self._event(state.round, most, _statement, details),)

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) != {CLIENTS, NOISE}:
            raise ValueError("client_privacy has the ledgers of clients and a noise multiplier")
        _, noise = _read(extra)
        if not 0 < noise <= MOST_NOISE:
            raise ValueError("its noise multiplier is none")

    def _release(self, clients: Sequence[ClientId] | Mapping[ClientId, Any], noise: float) -> None:
        one = Releases(1.0, noise, 1)
        self._ledgers = {
            **self._ledgers,
            **{client: together((*self._ledgers.get(client, ()), one)) for client in clients},
        }

    def _enough(self, done: Sequence[Releases], noise: float, rounds: int) -> float:
        """Noise for the rounds that are left, at the client that has spent the most."""
        rate = self._settings.sampling_rate
        return self._raised(done, noise, Releases(1.0, noise, most_rounds(rate, max(1, self._num_rounds - rounds))))


def most_rounds(chance: float, rounds: int) -> int:
    """How often a client is drawn at most, but for one client in a million."""
    if chance == 1.0:
        return rounds
    # The probability of more than `number`, from the top.
    tail = 0.0
    for number in range(rounds, 0, -1):
        tail += math.comb(rounds, number) * chance**number * (1 - chance) ** (rounds - number)
        if tail > _SELDOM:
            return number
    return 1


def _rounded_down(noise: float) -> float:
    """The noise with three digits, never a larger one, so that ledgers have few kinds of releases."""
    step = 10.0 ** (math.floor(math.log10(noise)) - 2)
    return float(f"{math.floor(noise / step + 1e-9) * step:.3g}")


def _extra(ledgers: Mapping[ClientId, Sequence[Releases]], noise: float) -> Extra:
    plain = {client: [one.to_dict() for one in done] for client, done in sorted(ledgers.items())}
    return Extra({CLIENTS: plain, NOISE: noise})


def _read(extra: Extra) -> tuple[dict[ClientId, tuple[Releases, ...]], float]:
    ledgers = {client: tuple(Releases.from_dict(one) for one in done) for client, done in extra.values[CLIENTS].items()}
    return ledgers, float(extra.values[NOISE])


def _statement(epsilon: float, delta: float, done: Sequence[Releases], is_deployed: bool) -> str:
    kinds = ", ".join(f"{one.times} with noise {one.noise_multiplier:.4g} times the bound" for one in done)
    where = (
        "" if is_deployed else " In this simulation the noise follows from the config's seed, which must stay secret."
    )
    return (
        f"client-level differential privacy: epsilon {epsilon:.3g} at delta {delta:g} for one client with all its"
        " examples, for the server, other clients one by one, and who sees the model of every round; neighbours differ"
        " by one client's updates in place of zeros, who takes part being public. Clients clip and add noise"
        f" themselves, under masks, so it rests on their own code. Opened sums of the client that was in the most:"
        f" {kinds or 'none'}, without the part of one other client. Not covered: {NOT_COVERED}.{where}"
    )
