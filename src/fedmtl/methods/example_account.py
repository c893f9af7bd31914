"""What a client draws and releases of each task under `privacy.example`: its lots, its ledger, and what it refuses.

Whoever knows the noise can subtract it, and whoever knows who was drawn gains from it. So both follow from a secret of
the site and a digest of all that the answer follows from: the same job has the same answer and spends nothing more, any
other has noise of its own. In a simulation the secret follows from the seed. The client counts what it has released in
a file beside its state, before it computes; with epsilon given, it refuses a job beyond what its noise was found for.

How many examples a client has follows from the chance that one is drawn, from the steps and from the noise found for
them. So all three are counted as those of the fewest or most examples that the client's declared number, which its
policy may round, leaves open: never less than what was spent.

What is done with a lot and its noise is in `example_gradients.py`, what the server makes of ledgers in
`example_privacy.py`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.errors import ConfigError, FedmtlError, PolicyError
from fedmtl.federation.policy import round_up
from fedmtl.methods.accounting import Releases, most_spent, noise_for, spent, together
from fedmtl.methods.masked_ledger import JOBS, NAME, agreed
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.runs.folder import make_private_folder, write_atomic
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.tokens import open_tokens
from fedmtl.training.local_method import LocalSettings, Release
from fedmtl.training.local_method import Step as Batch

LEDGER = "example_privacy.json"
# What a client sends of its ledger: all releases of a task, those of the last round, and which scopes they are in.
SPENT, RELEASED, SCOPES = "spent", "released", "scopes"


class Ledger:
    """What a client has released of each task, in a file beside its state: one entry for each different answer."""

    def __init__(self, folder: Path, file: str = LEDGER) -> None:
        self._path = folder / file
        self._tasks: dict[str, dict[str, Releases]] = {}
        if not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_bytes())
            self._tasks = {
                task: {digest: Releases.from_dict(one) for digest, one in by_digest.items()}
                for task, by_digest in found.items()
            }
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise FedmtlError(
                f"{self._path}: cannot be read, so this client does not know what it has released; restore it, or"
                " remove it if the examples are others"
            ) from error

    def of(self, task: str) -> tuple[Releases, ...]:
        return together(self._tasks.get(task, {}).values())

    def with_(self, task: str, digest: str, releases: Releases) -> tuple[Releases, ...]:
        """All releases of a task, this answer's among them."""
        return together({**self._tasks.get(task, {}), digest: releases}.values())

    def answers(self, task: str, digest: str) -> int:
        """How many different answers were given of a task, this one among them."""
        return len({*self._tasks.get(task, {}), digest})

    def add(self, digest: str, released: Mapping[str, Releases]) -> None:
        """Count an answer before it is computed; the same answer counts once."""
        before = self._tasks
        self._tasks = {**before, **{task: {**before.get(task, {}), digest: one} for task, one in released.items()}}
        make_private_folder(self._path.parent)
        plain = {
            task: {digest: one.to_dict() for digest, one in entries.items()} for task, entries in self._tasks.items()
        }
        write_atomic(self._path, json.dumps(plain, sort_keys=True).encode())


def in_other_runs(folder: Path, file: str, task: str) -> list[Releases]:
    """What a client has released in other runs of its site: each has a folder beside this one's, with its ledger."""
    others = [path.parent for path in folder.parents[1].glob(f"*/{folder.name}/{file}") if path.parent != folder]
    return [one for other in others for one in Ledger(other, file).of(task)]


@dataclass(frozen=True)
class Lot:
    """How the examples of a task's steps are drawn at a client, and the noise beside them.

    `most_chance` is that of the fewest examples which the declared number leaves open.
    """

    size: int
    num_examples: int
    noise_multiplier: float
    most_chance: float

    @property
    def chance(self) -> float:
        return min(1.0, self.size / self.num_examples)

    @property
    def expected(self) -> float:
        """The expected number of examples, which a sum is divided by."""
        return float(min(self.size, self.num_examples))


def most_steps(sizes: Mapping[str, int], settings: LocalSettings) -> dict[str, int]:
    """The most steps that a client with so many examples makes on each task in all rounds."""
    batches = {task: -(-number // settings.batch_size_of(task, number)) for task, number in sizes.items() if number}
    return {task: settings.num_rounds * number for task, number in steps_of_round(batches, settings).items()}


def steps_of_round(batches: Mapping[str, int], settings: LocalSettings) -> dict[str, int]:
    """The most steps on each task in one round, of a client whose examples are so many batches."""
    every = settings.steps or settings.epochs * sum(batches.values())
    if settings.task_schedule == "joint":
        of_round = dict.fromkeys(batches, settings.steps or settings.epochs * max(batches.values(), default=0))
    elif settings.task_schedule == "round_robin":
        of_round = dict.fromkeys(batches, -(-every // max(1, len(batches))))
    elif settings.steps is None:
        of_round = {task: settings.epochs * number for task, number in batches.items()}
    else:
        # Tasks are spread evenly over a pass, so that of a part of it one has at most one step more than its share.
        total = sum(batches.values())
        of_round = {task: math.ceil(settings.steps * number / total) + 1 for task, number in batches.items()}
        if len(batches) == 1:
            of_round = dict.fromkeys(batches, settings.steps)
    return of_round


class Account:
    """What a client's round draws and releases: its lots, counted in its ledger, and the noise beside them.

    `moved` are the keys of each task that its steps move, in the order in which noise is drawn for them. `received`
    came with the job.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        release: Release,
        shards: Mapping[str, Shard],
        settings: LocalSettings,
        moved: Mapping[str, Sequence[Key]],
        received: Extra = NO_EXTRA,
    ) -> None:
        self._epsilon, self._delta = options["epsilon"], options["delta"]
        self._noise_multiplier, self._max_norm = options["noise_multiplier"], options["max_grad_norm"]
        self._max_sampling_rate, self._is_masked = options["max_sampling_rate"], options["masked"]
        self._jobs: Mapping[str, int] = received.values.get(JOBS, {})
        self._release, self._shards, self._settings, self._moved = release, shards, settings, moved
        # Another secret draws other noise, so that the same job is answered anew.
        self._entry = derive_key(release.secret, release.digest, NAME).hex()[:32]
        self._ledger = Ledger(release.folder)
        self.lots: dict[str, Lot] = {}
        self.released: dict[str, Releases] = {}

    def draw(self, steps: Sequence[Batch]) -> list[Batch]:
        """Replace each batch by a lot, and count them before the first one is computed."""
        settings, sizes = self._settings, {task: len(shard) for task, shard in self._shards.items() if len(shard)}
        times = Counter(task for task, _ in steps)
        every = self._release.counts_to
        declared = {task: round_up(number, every) for task, number in sizes.items()}
        fewest = {task: number - every + 1 for task, number in declared.items()}
        batches = {task: -(-number // settings.batch_size_of(task, fewest[task])) for task, number in declared.items()}
        of_round = steps_of_round(batches, settings)
        most = {task: settings.num_rounds * number for task, number in of_round.items()}
        # A task of which nothing moves has nothing to release.
        self.lots = {
            task: self._lot(task, number, declared[task], fewest[task], most[task])
            for task, number in sizes.items()
            if self._moved[task] and times[task]
        }
        self.released = {
            task: Releases(
                lot.most_chance, lot.noise_multiplier, times[task] if every == 1 else max(times[task], of_round[task])
            )
            for task, lot in self.lots.items()
        }
        for task, releases in self.released.items():
            self._check_budget(task, releases, most[task])
            self._check_policy(task, releases)
            if self._is_masked:
                self._check_agreed(task, releases)
        self._ledger.add(self._entry, self.released)
        draws = {task: KeyedNoise(self._key("lots", task)) for task in self.lots}
        return [(task, self._drawn(task, draws[task]) if task in draws else batch) for task, batch in steps]

    def noise_key(self, task: str) -> bytes:
        return self._key("noise", task)

    def deviation_of_sum(self, task: str) -> float:
        """The standard deviation of the noise on the sum of a lot's clipped gradients."""
        return float(self._max_norm * self.lots[task].noise_multiplier)

    def sent(self) -> Extra:
        """What the client tells the server of its ledger, which is nothing under masks."""
        if not self.released or self._is_masked:
            return NO_EXTRA
        return Extra(
            {
                SPENT: {task: [one.to_dict() for one in self._ledger.of(task)] for task in self.released},
                RELEASED: {task: one.to_dict() for task, one in self.released.items()},
                SCOPES: {task: sorted({key.scope for key in self._moved[task]}) for task in self.released},
            }
        )

    def _key(self, purpose: str, task: str) -> bytes:
        return derive_key(self._release.secret, self._release.digest, NAME, purpose, task)

    def _lot(self, task: str, num_examples: int, declared: int, fewest: int, most: int) -> Lot:
        size, largest = (self._settings.batch_size_of(task, number) for number in (num_examples, declared))
        most_chance = min(1.0, largest / fewest)
        if self._noise_multiplier is not None:
            return Lot(size, num_examples, self._noise_multiplier, most_chance)
        # Of clients with nearly as many examples the noise is found once: a larger chance asks for more of it.
        chance = min(1.0, _rounded_up(most_chance))
        try:
            return Lot(size, num_examples, noise_for(self._epsilon, self._delta, chance, most), most_chance)
        except ConfigError as error:
            raise ConfigError(f"{task}: privacy.example.{error}").coded("privacy_unreachable", task) from None

    def _check_budget(self, task: str, releases: Releases, most: int) -> None:
        if self._epsilon is None:
            return
        done = self._ledger.with_(task, self._entry, releases)
        steps = sum(one.times for one in done)
        if steps > most:
            raise PolicyError(
                f"{task}: this job would make {steps} steps in all, and the noise was found for {most}"
                f" (privacy.example.epsilon {self._epsilon:g}); a server that repeats rounds in another way spends more"
            ).coded("privacy_spent", task)
        # Noise was found for so many releases of one kind: other settings, or other examples, make other kinds.
        found = spent(done, self._delta).epsilon if len(done) > 1 else 0.0
        if found > self._epsilon * (1 + 1e-6):
            raise PolicyError(
                f"{task}: with this job, epsilon {found:.3g} would be spent, and privacy.example.epsilon is"
                f" {self._epsilon:g}: this run's settings or examples here changed; start a new run"
            ).coded("privacy_spent", task)

    def _check_agreed(self, task: str, releases: Releases) -> None:
        """Hold what was spent to what the server states from the number of jobs, which no client reports."""
        answers, jobs = self._ledger.answers(task, self._entry), self._jobs.get(task, 0)
        if answers > jobs:
            raise PolicyError(
                f"{task}: this would be the client's answer {answers} of this run, and the server, which states"
                f" epsilon from their number, counts {jobs}; start a new run"
            ).coded("privacy_spent", task)
        if self._noise_multiplier is None:
            return
        most = agreed(self._max_sampling_rate, self._noise_multiplier, self._settings, answers)
        bound = most_spent([most], self._delta)
        here = most_spent(self._ledger.with_(task, self._entry, releases), self._delta)
        if here > bound * (1 + 1e-9):
            raise PolicyError(
                f"{task}: with this job, epsilon {here:.3g} would be spent at a chance of {releases.chance:.3g}, and"
                f" the run states {bound:.3g} for every client, by privacy.example.max_sampling_rate"
                f" {self._max_sampling_rate:g}; write a larger one, or have more examples here"
            ).coded("privacy_beyond", task)

    def _check_policy(self, task: str, releases: Releases) -> None:
        """Hold the site's requirement over all runs."""
        limit = self._release.required.get(NAME)
        if limit is None:
            return
        done = in_other_runs(self._release.folder, LEDGER, task)
        total = spent([*done, *self._ledger.with_(task, self._entry, releases)], limit["max_delta"])
        if total.epsilon > limit["max_epsilon"]:
            raise PolicyError(
                f"{task}: with this job, epsilon {total.epsilon:.3g} would be spent at delta {total.delta:g} over all"
                f" runs; the policy allows {limit['max_epsilon']:g} (require.example_privacy.max_epsilon)"
            ).coded("privacy_spent", task)

    def _drawn(self, task: str, draws: KeyedNoise) -> np.ndarray:
        """A lot, its examples in order of length."""
        lot, shard = self.lots[task], self._shards[task]
        chosen = shard.indices
        if lot.chance < 1:
            chosen = chosen[draws.chosen(lot.num_examples, lot.chance).numpy()]
        lengths = open_tokens(shard.tokens).lengths_of(chosen)
        drawn: np.ndarray = chosen[np.argsort(lengths, kind="stable")]
        return drawn


def _rounded_up(chance: float) -> float:
    """The chance with three digits, never a smaller one."""
    step = 10.0 ** (math.floor(math.log10(chance)) - 2)
    rounded = round(math.ceil(chance / step - 1e-9) * step, 12)
    return rounded if rounded >= chance else chance
