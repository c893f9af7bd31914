"""Client-level differential privacy: bounded updates, a sum with Gaussian noise, fixed denominators.

McMahan et al. 2018, Learning Differentially Private Recurrent Language Models (DP-FedAvg, the fixed-denominator
estimator). With `adaptive_clipping` the bound follows a quantile of the norms: Andrew et al. 2021, Differentially
Private Learning with Adaptive Clipping.

The mechanism of a round, over all scopes together:

1. Every candidate, a client that has examples of a task of the round, is drawn by itself with chance q.
2. A drawn client's update is clipped so that its norm over all of its scopes is at most C: as one vector (`together`),
   or each of its n scopes to C / sqrt(n) (`by_scope`). The client clips before it sends, and the server again before it
   adds, so the guarantee does not rest on clients.
3. The server adds up the clipped updates, each with weight 1, and adds normal numbers of standard deviation z * C to
   every entry of every value that some candidate trains, also where nobody returned anything.
4. Each sum is divided by the number of clients that it is expected to be of, q times the candidates that train the
   value, whoever was drawn and whoever failed.

One client more or less changes the vector of all sums by C at most, so a round is one Gaussian release with noise
multiplier z of units drawn with chance q. Steps 4 and all that is made of the mean (a server optimizer, pruning) is
computed from that release. Chances below 1 count only here: with `federation.clients_per_round` one client less would
also change who else is drawn, which is refused.

With adaptive clipping a round also releases how many updates were below the bound, as the sum of b - 1/2 with noise of
standard deviation s. Its largest contribution is 1/2, so both releases together are one of multiplier z where the
updates' noise is z_u = (z^-2 - (2 s)^-2)^(-1/2) times C.

In a deployment, the key of a round's noise is of the server's secret, of the round and of the sums themselves: the
same sums always get the same noise, so that a round that is repeated after a kill releases the same, and other sums get
other noise. A server that was ended cannot know whether the round that was cut off had reached anybody. So each session
that goes on with a run counts one more release. In a simulation, which repeats a round bit for bit, all of it follows
from the config's seed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.capabilities import BUILT_IN, Capability, find
from fedmtl.config import Config
from fedmtl.config.privacy import ClientPrivacyConfig
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.federation.aggregators.mean import add_delta
from fedmtl.federation.filters.protocol import FilterClient, UpdateFilter
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.policy import Policy
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.methods.accounting import MOST_NOISE, Releases, most_spent, noise_for, spent, together
from fedmtl.methods.example_account import Ledger, in_other_runs
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.runs.event_lines import Event, Observer
from fedmtl.runs.events import PrivacyEvent, WarningEvent
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan, Weights, is_personal, owner_task
from fedmtl.tasks.task import Task

NAME = "client_privacy"
MAX_NORM, NOISE, RELEASES = "max_norm", "noise_multiplier", "releases"
# A client's file of what it released, or of what the server's config says that a run releases of it.
LEDGER, PLANNED = "client_privacy.json", "planned"
# What is clipped is made this much shorter than its bound, which rounding in 32 bits cannot undo.
_MARGIN = 1e-6
# A norm this close to the bound is of an update that its client clipped.
_CLIPPED = 1e-5
# As far as the bound may go, it is a number in 32 bits.
_SMALLEST, _LARGEST = 1e-9, 1e9
# The paper's noise on the count: this share of the expected clients.
_COUNT_SHARE = 1 / 20
# A resumed run that needs more noise to stay within its epsilon raises it in these steps.
_STEP = 1.05
NOT_COVERED = (
    "numbers of examples and labels, losses, scores made at clients or with their examples, who took part, and settings"
    " that were chosen by trying them"
)


# What a client's update counts for ----------------------------------------------------------------------------------


def scope_norms(delta: Mapping[Key, Tensor]) -> dict[str, float]:
    """The norm of what an update brings of each scope, summed in 64 bits."""
    squares: dict[str, float] = {}
    for key, value in delta.items():
        square = float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2
        squares[key.scope] = squares.get(key.scope, 0.0) + square
    return {scope: math.sqrt(square) for scope, square in squares.items()}


def clip_factors(norms: Mapping[str, float], max_norm: float, bound: str) -> tuple[dict[str, float], bool]:
    """What each scope of an update is multiplied by to keep to the bound, and whether the update was clearly below."""
    if bound == "together":
        norm = math.sqrt(math.fsum(each * each for each in norms.values()))
        largest, all_norms = dict.fromkeys(norms, max_norm), dict.fromkeys(norms, norm)
    else:
        largest, all_norms = dict.fromkeys(norms, max_norm / math.sqrt(max(1, len(norms)))), dict(norms)
    factors = {
        scope: 1.0 if norm <= largest[scope] else largest[scope] / norm * (1 - _MARGIN)
        for scope, norm in all_norms.items()
    }
    return factors, all(norm < largest[scope] * (1 - _CLIPPED) for scope, norm in all_norms.items())


def check_required(folder: Path, done: Sequence[Releases], required: Mapping[str, Any] | None) -> None:
    """Hold what a site's policy requires over all runs; `done` are this run's releases, `folder` is its client's."""
    if not required:
        return
    total = spent([*done, *in_other_runs(folder, LEDGER, NAME)], required["max_delta"])
    if total.epsilon > required["max_epsilon"]:
        raise PolicyError(
            f"with this job, epsilon {total.epsilon:.3g} would be spent at delta {total.delta:g} for this site over all"
            f" runs; the policy allows {required['max_epsilon']:g} (require.client_privacy.max_epsilon)"
        ).coded("client_privacy_spent")


def planned(settings: ClientPrivacyConfig, num_rounds: int) -> Releases:
    """What a run releases in all of its rounds, by its config."""
    chance, noise, rounds = settings.sampling_rate, settings.noise_multiplier, max(1, num_rounds)
    if noise is None:
        assert settings.epsilon is not None
        noise = noise_for(settings.epsilon, settings.delta, chance, rounds)
    return Releases(chance, noise, rounds)


class ClippedUpdate(UpdateFilter):
    """Clips a client's update before it leaves; the server clips again what it adds up.

    Where a policy takes the server's word for the noise, a run counts with all of its rounds from its first update on,
    as a client does not know whether rounds without it reached anybody.
    """

    name = NAME

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bound, self._max_norm = str(options["bound"]), float(options[MAX_NORM])
        self._planned = options.get(PLANNED)

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        if client.required and self._planned is not None:
            ledger = Ledger(client.folder, LEDGER)
            settings = ClientPrivacyConfig.model_validate(self._planned)
            all_rounds = planned(settings, int(client.job.settings["num_rounds"]))
            # A run that goes on with another plan counts with both: what the first revealed stays revealed.
            entry = f"{PLANNED} {all_rounds.times} of {all_rounds.chance!r} with {all_rounds.noise_multiplier!r}"
            check_required(client.folder, ledger.with_(NAME, entry, all_rounds), client.required)
            ledger.add(entry, {NAME: all_rounds})
        max_norm = client.job.extra.get(NAME, NO_EXTRA).values.get(MAX_NORM, self._max_norm)
        factors, _ = clip_factors(scope_norms(update.delta), max_norm, self._bound)
        if min(factors.values(), default=1.0) == 1.0:
            return update, NO_EXTRA
        delta = {key: value * factors[key.scope] for key, value in update.delta.items()}
        return replace(update, delta=delta), NO_EXTRA


# The server's sum ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """How a round's sum is bounded and hidden: C, z_u, and the noise on the number of updates below C, if any."""

    max_norm: float
    bound: str
    multiplier: float
    count_deviation: float | None = None


class NoisySum:
    """The clipped sum of a round with its noise, over the expected number of clients.

    `expected` has every value that is released, with the number of clients that are expected to return it; `key_of`
    makes the key of the noise from a digest of what is to be hidden. An update whose norm is larger than the bound is
    clipped here, whoever sent it.
    """

    def __init__(
        self,
        before: Weights,
        expected: Mapping[Key, float],
        noise: Noise,
        key_of: Callable[[bytes], bytes],
        num_expected: float = 0.0,
    ) -> None:
        self._expected, self._noise, self._key_of = expected, noise, key_of
        self._num_expected = num_expected
        self._sums: Weights = {key: torch.zeros_like(before[key]) for key in sorted(expected)}
        self._count = 0.0
        self.below: float | None = None

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        """Add an update; every client counts alike, whatever `weights` says."""
        factors, is_below = clip_factors(scope_norms(update.delta), self._noise.max_norm, self._noise.bound)
        for key, delta in update.delta.items():
            add_delta(self._sums[key], delta, factors[key.scope], update.rows)
        self._count += 0.5 if is_below else -0.5

    def result(self) -> Weights:
        """The noisy mean of every value that is released; called once."""
        digest = hashlib.sha256(repr(self._count).encode())
        for key, total in self._sums.items():
            digest.update(f"\0{key.scope}\0{key.name}\0{tuple(total.shape)}\0".encode())
            digest.update(total.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream = KeyedNoise(self._key_of(digest.digest()))
        for key, total in self._sums.items():
            stream.add_to(total, self._noise.multiplier * self._noise.max_norm)
            total.div_(self._expected[key])
        if self._noise.count_deviation is not None and self._num_expected:
            count = torch.tensor([self._count], dtype=torch.float64)
            stream.add_to(count, self._noise.count_deviation)
            self.below = 0.5 + float(count) / self._num_expected
        return self._sums

    def remember(self) -> Extra:
        """Nothing here: the bound and the ledger are in the state of the capability."""
        return NO_EXTRA


def expected_returns(
    candidates: Mapping[tuple[str, ...], int], chance: float, plan: SharingPlan, names: Sequence[str]
) -> dict[Key, float]:
    """For every value that some candidate trains, how many clients of a round are expected to return it.

    `candidates` counts the clients by the tasks that they would train.
    """
    expected: dict[Key, float] = {}
    for tasks, number in candidates.items():
        views = plan.keys(names, tasks, "").values()
        keys = dict.fromkeys(key for view in views for key in view.values())
        for key in keys:
            if not is_personal(key) and plan.trains(key):
                expected[key] = expected.get(key, 0.0) + chance * number
    return expected


Statement = Callable[[float, float, Sequence[Releases], bool], str]


class ClientPrivacy(ServerMethod):
    """Draws the clients of a round, hides what they return in noise, and keeps the ledger of what was released.

    Without `secret` the run is a simulation: noise and draws follow from `seed`.
    """

    name = NAME

    def __init__(
        self,
        settings: ClientPrivacyConfig,
        names: Sequence[str],
        num_rounds: int,
        *,
        seed: int = 0,
        secret: bytes | None = None,
        observe: Observer = lambda event: None,
    ) -> None:
        self._settings, self._names, self._num_rounds, self._observe = settings, names, num_rounds, observe
        self._is_deployed = secret is not None
        self._secret = secret or derive_key(b"simulation", seed)
        self._candidates: Mapping[tuple[str, ...], int] = {}
        self._sum: NoisySum | None = None
        self._done: tuple[Releases, ...] = ()
        # A session that begins with round 0 has nothing to take up.
        self._is_taken_up = True
        self._has_warned = False

    def start(self, state: State) -> Step:
        """Round 0: the noise is found, and stays what it is."""
        self._is_taken_up = False
        settings = self._settings
        noise = planned(settings, self._num_rounds).noise_multiplier
        self._count_deviation(noise, 0.0)
        return Step(state.with_extra(NAME, _extra((), noise, settings.max_norm)))

    def sample(self, candidates: Mapping[ClientId, Sequence[str]], round_number: int) -> Sequence[ClientId] | None:
        self._candidates = Counter(tuple(tasks) for tasks in candidates.values())
        if self._settings.sampling_rate == 1.0:
            return None
        clients = sorted(candidates)
        drawn = KeyedNoise(derive_key(self._secret, NAME, "sample", round_number))
        return [clients[index] for index in drawn.chosen(len(clients), self._settings.sampling_rate).tolist()]

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        settings, number = self._settings, state.round + 1
        self._done, noise, max_norm = _read(state.extra[NAME])
        if self._is_taken_up and self._is_deployed:
            self._done = together((*self._done, Releases(settings.sampling_rate, noise, 1)))
            noise = self._enough(self._done, noise, state.round)
        self._is_taken_up = False
        expected = expected_returns(self._candidates, settings.sampling_rate, state.plan, self._names)
        num_expected = settings.sampling_rate * sum(self._candidates.values())
        deviation = self._count_deviation(noise, num_expected)
        multiplier = noise if deviation is None else (noise**-2 - (2 * deviation) ** -2) ** -0.5
        self._done = together((*self._done, Releases(settings.sampling_rate, noise, 1)))
        self._noise = noise
        self._sum = NoisySum(
            state.weights,
            expected,
            Noise(max_norm, settings.bound, multiplier, deviation),
            # A simulation repeats a round bit for bit; without the digest its engines, which round otherwise, agree.
            lambda digest: derive_key(self._secret, NAME, "noise", number, digest.hex() if self._is_deployed else ""),
            num_expected,
        )
        self._warn(state, expected, multiplier)
        extra = NO_EXTRA if settings.adaptive_clipping is None else Extra({MAX_NORM: max_norm})
        return RoundSettings(extra=extra, aggregator=self._sum)

    def after_aggregation(self, before: State, after: State) -> Step:
        assert self._sum is not None
        _, _, max_norm = _read(before.extra[NAME])
        adaptive, below = self._settings.adaptive_clipping, self._sum.below
        if adaptive is not None and below is not None:
            max_norm *= math.exp(-adaptive.learning_rate * (min(1.0, max(0.0, below)) - adaptive.quantile))
            max_norm = min(_LARGEST, max(_SMALLEST, max_norm))
        self._sum = None
        return Step(after.with_extra(NAME, _extra(self._done, self._noise, max_norm)))

    def report(self, state: State) -> tuple[Event, ...]:
        if NAME not in state.extra or not state.round:
            return ()
        done, noise, max_norm = _read(state.extra[NAME])
        details = {NOISE: noise, MAX_NORM: max_norm, "expected_clients": self._num_expected()}
        return (self._event(state.round, done, _statement, details),)

    def _event(
        self, round_number: int, done: Sequence[Releases], statement: Statement, details: Mapping[str, float]
    ) -> PrivacyEvent:
        """What these releases come to, in the words of `statement`."""
        delta = self._settings.delta
        # The tight number takes a second, the bound by Renyi orders does not: it stands until the last round.
        is_last = round_number >= self._num_rounds
        epsilon = spent(done, delta).epsilon if is_last else most_spent(done, delta)
        return PrivacyEvent(
            round=round_number,
            unit="client",
            epsilon=epsilon,
            delta=delta,
            accountant="pld" if is_last else "rdp",
            releases=[one.to_dict() for one in done],
            words=statement(epsilon, delta, done, self._is_deployed),
            details={**details},
        )

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) != {RELEASES, NOISE, MAX_NORM}:
            raise ValueError("client_privacy has a ledger, a noise multiplier and a bound")
        _, noise, max_norm = _read(extra)
        if not 0 < noise <= MOST_NOISE or not 0 < max_norm <= _LARGEST:
            raise ValueError("its noise multiplier or its bound is none")

    def _num_expected(self) -> float:
        return self._settings.sampling_rate * sum(self._candidates.values())

    def _enough(self, done: Sequence[Releases], noise: float, rounds: int) -> float:
        """Noise for the rounds that are left, so that all together keep to the epsilon where one is given."""
        return self._raised(
            done, noise, Releases(self._settings.sampling_rate, noise, max(1, self._num_rounds - rounds))
        )

    def _raised(self, done: Sequence[Releases], noise: float, left: Releases) -> float:
        """Noise with which what is left keeps to the epsilon where one is given."""
        settings = self._settings
        if settings.epsilon is None:
            return noise
        while spent((*done, replace(left, noise_multiplier=noise)), settings.delta).epsilon > settings.epsilon:
            noise *= _STEP
            if noise > MOST_NOISE:
                raise ConfigError(
                    f"privacy.client.epsilon: {settings.epsilon:g} is spent, as this run was taken up again and a round"
                    " that was cut off counts too; its last model is that of the run's folder"
                )
        return noise

    def _count_deviation(self, noise: float, num_expected: float) -> float | None:
        """The noise on the number of updates below the bound; None where the bound is fixed."""
        adaptive = self._settings.adaptive_clipping
        if adaptive is None:
            return None
        given = adaptive.count_noise
        if given is None:
            return max(noise, _COUNT_SHARE * num_expected)
        if 2 * given <= noise:
            raise ConfigError(
                f"privacy.client.adaptive_clipping.count_noise: found {given:g}, which alone spends more than the noise"
                f" multiplier {noise:.4g} allows; write more than {noise / 2:.4g}, or leave it out"
            )
        return given

    def _warn(self, state: State, expected: Mapping[Key, float], multiplier: float) -> None:
        """Say once which values noise moves further than clipped updates can, over all rounds."""
        if self._has_warned:
            return
        self._has_warned = True
        parts: dict[tuple[str, str | None], tuple[int, float]] = {}
        for key, number in expected.items():
            part = (key.scope, owner_task(key.name))
            size, fewest = parts.get(part, (0, math.inf))
            parts[part] = (size + state.weights[key].numel(), min(fewest, number))
        drowned = []
        for (scope, task), (size, number) in parts.items():
            # After T rounds, noise is z C sqrt(entries T) / expected long, and updates reach T C if all agree.
            ratio = multiplier * math.sqrt(size / max(1, self._num_rounds)) / number
            if ratio > 1:
                what = scope if task is None else f"the head of {task}"
                drowned.append(f"{what} ({size:,} values, {number:g} expected clients: {ratio:.1f} times)")
        if drowned:
            words = (
                "privacy.client: its noise moves these values further than all updates could, so that they will be"
                f" little but noise: {', '.join(drowned)}; train fewer values (level fixed in sharing.rules, or"
                " model.lora), or have more clients in a round"
            )
            self._observe(WarningEvent(words=words))


def _extra(done: Sequence[Releases], noise: float, max_norm: float) -> Extra:
    return Extra({RELEASES: [one.to_dict() for one in done], NOISE: noise, MAX_NORM: max_norm})


def _read(extra: Extra) -> tuple[tuple[Releases, ...], float, float]:
    values = extra.values
    done = tuple(Releases.from_dict(one) for one in values[RELEASES])
    return done, float(values[NOISE]), float(values[MAX_NORM])


def _statement(epsilon: float, delta: float, done: Sequence[Releases], is_deployed: bool) -> str:
    kinds = ", ".join(
        f"{one.times} with noise {one.noise_multiplier:.4g} times the bound"
        + (f" of clients drawn with chance {one.chance:g}" if one.chance < 1 else " of all clients")
        for one in done
    )
    where = (
        "" if is_deployed else " In this simulation the noise follows from the config's seed, which must stay secret."
    )
    return (
        f"client-level differential privacy: epsilon {epsilon:.3g} at delta {delta:g} for one client with all its"
        " examples, for who sees the model of every round; neighbours differ by one client more or less, the number of"
        f" clients being public. Released sums: {kinds}. The server itself sees updates without noise. Not covered:"
        f" {NOT_COVERED}.{where}"
    )


# What goes with it, and what does not -------------------------------------------------------------------------------

# Capabilities whose server half, if any, computes from what was released alone.
_GOES_TOGETHER = frozenset(
    {
        NAME,
        "task_weighting",
        "server_optimizer",
        "early_stopping",
        "pruning",
        "fedprox",
        "distillation",
        "smart",
        "uncertainty_weights",
        "pcgrad",
    }
)


def check_together(config: Config, *, scores_at_clients: bool) -> None:
    """Raise a ConfigError for the first setting that the guarantee does not hold with."""
    settings, federation, training = config.privacy.client, config.federation, config.training
    assert settings is not None
    adaptive = settings.adaptive_clipping
    weighted = [name for name, task in config.tasks.items() if task.weight != 1.0]
    patient = [name for name, task in config.tasks.items() if task.patience is not None]
    by_mean = training.task_weight_in == "averaging"
    by_scores = federation.task_weighting.kind != "fixed"
    draws = settings.sampling_rate < 1
    refused = [
        ("mode", not config.mode.startswith("federated"), "whose clients are not hidden; write `mode: federated`"),
        ("privacy.client.noise_at", settings.noise_at == "clients" and config.privacy.secure_aggregation is None,
         "clients, whose parts of the noise hide nothing in a single update; turn privacy.secure_aggregation on, or"
         " write `server`"),
        ("privacy.client.adaptive_clipping", adaptive is not None and settings.noise_at == "clients",
         "and noise_at: clients, which do not count how many updates were clipped; leave it out"),
        *((key, True, f"{rule}, whose result one client can change by more than max_norm; write `mean`")
          for key, rule in federation.aggregation.looks_at_updates().items()),
        ("federation.average", federation.average != "uniform",
         f"{federation.average}; a client's weight must not depend on its examples, so write `uniform`"),
        ("federation.max_share", federation.max_share is not None, "where all clients count alike; leave it out"),
        ("federation.clients_per_round", federation.clients_per_round is not None,
         "with which one client less changes who else is drawn; write privacy.client.sampling_rate instead"),
        ("federation.min_clients_per_task", federation.min_clients_per_task > 0 and draws,
         "where a small sample must not end the run; write 0"),
        ("federation.vocabulary_slices", federation.vocabulary_slices,
         "true, which shows which words each client uses; write `false`"),
        (f"tasks.{(weighted or ['*'])[0]}.weight", bool(weighted) and by_mean,
         "where all clients count alike in the mean; write `training.task_weight_in: loss`"),
        ("federation.task_weighting", by_scores and by_mean,
         "where all clients count alike in the mean; write `training.task_weight_in: loss`"),
        ("training.logit_adjustment", training.logit_adjustment > 0,
         "which tells every client the label counts of all, without noise; leave it out"),
        ("sharing.adaptive", config.sharing.adaptive is not None,
         "which moves layers by what single updates look like, without noise; leave it out"),
        ("privacy.client.adaptive_clipping", adaptive is not None and config.wire.up != "fp32",
         f"wire.up {config.wire.up}, which blurs which updates were clipped; write `wire.up: fp32`"),
        (f"tasks.{(patient or ['*'])[0]}.patience", bool(patient) and scores_at_clients,
         "and scores made at clients, which have no noise and would decide what is released; leave it out"),
        ("training.keep", training.keep == "best" and scores_at_clients,
         "best and scores made at clients, which have no noise and would decide what is released; write `last`"),
        ("federation.task_weighting", by_scores and scores_at_clients,
         "and scores made at clients, which have no noise and would decide what is released; leave it out"),
    ]  # fmt: skip
    for key, is_refused, why in refused:
        if is_refused:
            raise ConfigError(f"{key}: found with privacy.client {why}")
    for name in config.methods:
        has_halves = any((find(name).local, find(name).server, find(name).update_filter, find(name).aggregator))
        if has_halves and name not in _GOES_TOGETHER:
            known = (
                "which adds up what single clients return without noise" if name in BUILT_IN else "of another package"
            )
            raise ConfigError(f"methods.{name}: found with privacy.client, {known}; leave one of them out")


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    settings = config.privacy.client
    if settings is None:
        return None
    adaptive, is_shared = settings.adaptive_clipping is not None, settings.noise_at == "clients"
    options = {MAX_NORM: settings.max_norm, "bound": settings.bound, "adaptive": adaptive, "shared": is_shared}
    # Clients that add noise themselves know what they release.
    return options if is_shared else {**options, PLANNED: settings.model_dump(mode="json")}


def _open(setup: ServerSetup) -> ClientPrivacy | None:
    settings = setup.config.privacy.client
    if settings is None:
        return None
    names = list(setup.model.canonical())
    is_personal_plan = any(setup.plan.level(name) == "client" for name in names)
    check_together(setup.config, scores_at_clients=is_personal_plan or setup.config.evaluation.where == "clients")
    # Fails here, and not in round 1, where what it needs is not installed.
    spent([Releases(1.0, 1.0, 1)], settings.delta)
    KeyedNoise(derive_key(b"", NAME))
    rounds = setup.config.training.num_rounds
    made = ClientPrivacy
    if settings.noise_at == "clients":
        from fedmtl.methods.client_noise import NoiseAtClients

        made = NoiseAtClients
    return made(settings, names, rounds, seed=setup.config.seed, secret=setup.secret, observe=setup.observe)


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why it is not the bound of a round, which only adaptive clipping sends, or the noise that clients share."""
    if options["shared"]:
        noise = extra.values.get(NOISE)
        is_noise = not extra.tensors and set(extra.values) == {NOISE}
        return None if is_noise and isinstance(noise, float) and 0 < noise <= MOST_NOISE else "the job's noise is none"
    max_norm = extra.values.get(MAX_NORM)
    is_fine = not extra.tensors and set(extra.values) == {MAX_NORM} and bool(options["adaptive"])
    is_fine = is_fine and isinstance(max_norm, float) and _SMALLEST <= max_norm <= _LARGEST
    return None if is_fine else "the job's bound of updates is none"


def _check_policy(policy: Policy, config: Config) -> str | None:
    required, client = policy.require.client_privacy, config.privacy.client
    if required is None:
        return None
    if client is None:
        return "the policy requires noise on sums of updates (require.client_privacy); the server's config has none"
    if client.noise_at == "server" and required.noise_at == "clients":
        return (
            "the server's privacy.client has it add the noise, which sees updates without it; the policy requires noise"
            " that sites add (require.client_privacy.noise_at)"
        )
    if client.noise_at == "clients" and (
        config.privacy.secure_aggregation is None or not config.mode.startswith("fed")
    ):
        return "the server's privacy.client has sites add noise and masks none of it (privacy.secure_aggregation)"
    epsilon = client.epsilon
    if epsilon is None and client.noise_at == "server":
        epsilon = spent([planned(client, config.training.num_rounds)], client.delta).epsilon
    if client.delta > required.max_delta or (epsilon or 0.0) > required.max_epsilon:
        found = "" if epsilon is None else f"epsilon {epsilon:.3g} and "
        return (
            f"the server's privacy.client has {found}delta {client.delta:g}; the policy allows"
            f" {required.max_epsilon:g} and {required.max_delta:g} (require.client_privacy)"
        )
    return None


CAPABILITY = Capability(
    NAME,
    client_options=_client_options,
    server=_open,
    check_received=_check_received,
    check_policy=_check_policy,
    update_filter=ClippedUpdate,
)
