"""Example-level differential privacy at the client: DP-SGD with an accountant, per task.

Abadi et al. 2016, Deep learning with differential privacy. A step's examples are drawn each by itself with the same
chance (Poisson); every example's gradient is clipped by itself, over all values that the step moves together; Gaussian
noise is added to each of these values, used or not; and the sum is divided by the expected number of examples, whatever
was drawn. The optimizer then goes on with that, as does all that follows: averaging, pruning, what other methods do.

The unit is one example of one task at one client; a text in two tasks, or at two clients, is two examples. Data sets
are neighbours if one has one example more. The statement is about updates; losses, numbers of examples and of labels
and validation scores leave a client as they are without noise.

Whoever knows the noise can subtract it, and whoever knows who was drawn gains from it. So both follow from a secret of
the site and a digest of all that the answer follows from: the same job has the same answer and spends nothing more, any
other has noise of its own. In a simulation the secret follows from the seed. The client counts what it has released in
a file beside its state, before it computes; with epsilon given, it refuses a job beyond what its noise was found for.
The server has the clients' counts from their updates, and counts jobs without an accepted update as done.

How many examples a client has follows from the chance that one is drawn, from the steps and from the noise found for
them. So all three are counted as those of the fewest or most examples that the client's declared number, which its
policy may round, leaves open: never less than what was spent.

Under `privacy.secure_aggregation` no client's ledger leaves it: `masked_ledger.py` has what is stated then, and each
client checks that what it has spent is within it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.capabilities import BUILT_IN, Capability, find
from fedmtl.config import Config
from fedmtl.config.privacy import ExamplePrivacyConfig
from fedmtl.errors import ConfigError, FedmtlError, PolicyError
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.policy import Policy, round_up
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.methods.accounting import Releases, is_reachable, most_spent, noise_for, spent, together
from fedmtl.methods.masked_ledger import CLIENTS, JOBS, CheckCounts, MaskedExamplePrivacy, agreed
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.model.multitask import MultiTaskModel, flat_order, undecayed
from fedmtl.model.per_example import Clip, ExampleGradients
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import ExamplePrivacyEvent, ExampleSpending, ReleaseFacts
from fedmtl.runs.folder import make_private_folder, write_atomic
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan, owner_task
from fedmtl.tasks.batches import Shard, collate
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import open_tokens
from fedmtl.training.local import planned_steps, to_tensors
from fedmtl.training.local_method import (
    Finished,
    GradientBuffer,
    LocalClient,
    LocalMethod,
    LocalSettings,
    Release,
)
from fedmtl.training.local_method import Step as Batch
from fedmtl.training.stacked.method import StackedMethod
from fedmtl.training.stacked.plan import Lots, Member
from fedmtl.training.stacked.shape import reached

if TYPE_CHECKING:
    from fedmtl.training.stacked.stack import Stack

NAME = "example_privacy"
LEDGER = "example_privacy.json"
SPENT, RELEASED, SCOPES = "spent", "released", "scopes"
UNCONFIRMED = "unconfirmed"
# Schedules under which it is known beforehand how many steps each task makes.
PLANNED = ("even", "joint", "round_robin")
# Kinds whose losses are of one text each.
KINDS = ("classification", "regression")
# Methods with a client's half that go together with noise: what they do follows from noisy gradients alone.
FITTING = ("pruning", "fedprox", "scaffold", "pcgrad", "adaptive_sharing", NAME)
# More examples than this at once save no time.
MOST_AT_ONCE = 256
# The same of each client where clients train at once, on a device with memory of its own.
MOST_IN_STACKS = 1024
# Beyond this many different ledgers of a task, the rest is bounded by Renyi orders.
MOST_LEDGERS = 16
MOST_TIMES = 10**9


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

    def deviation(self, task: str) -> float:
        """The standard deviation of the noise of a step, before the task's weight."""
        lot = self.lots[task]
        return float(self._max_norm * lot.noise_multiplier / lot.expected)

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
        """Hold the site's requirement over all runs: each has a folder beside this one's, with the client's ledger."""
        limit = self._release.required.get(NAME)
        if limit is None:
            return
        folder = self._release.folder
        others = [path.parent for path in folder.parents[1].glob(f"*/{folder.name}/{LEDGER}") if path.parent != folder]
        done = [one for other in others for one in Ledger(other).of(task)]
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


def _whole_table(has_rows: bool) -> None:
    """Raise where a client has a token table of the rows that its texts use."""
    if has_rows:
        raise FedmtlError(
            "the job has the token rows that this client's texts use, which noise cannot hide; the server's"
            " federation.vocabulary_slices must be false"
        ).coded("job_weights")


class PrivateStack(StackedMethod):
    """The same for clients at once, each with lots, noise and a ledger of its own.

    Lots are drawn as from a client by itself. So is noise on a CPU. On a GPU, where numbers that a CPU draws would be
    waited for, it comes from the device's generator (Philox), seeded from the same key: as good for a simulation,
    which is all that trains clients at once, but not what a site would add to its updates.
    """

    name = NAME
    moves_all_rows = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.max_example_norm = options["max_grad_norm"]
        self._members: Sequence[Member] = ()

    def enter(
        self,
        member: Member,
        model: MultiTaskModel,
        settings: LocalSettings,
        round_number: int,
        release: Callable[[], Release] | None,
    ) -> Member:
        _whole_table(member.rows is not None)
        assert release is not None
        names = {task.name: reached(model, task.name, member.keys, member.fixed) for task in member.tasks}
        views = {
            task.name: {name: key for name, key in member.keys.items() if owner_task(name) in (None, task.name)}
            for task in member.tasks
        }
        trained = [key for name, key in member.keys.items() if key.scope != "fixed" and name not in member.fixed]
        order = flat_order(views, trained, undecayed(model))
        moved = {task: [key for key in order if key.name in own] for task, own in names.items()}
        received = member.received.get(NAME, NO_EXTRA)
        account = Account(self._options, release(), member.shards, settings, moved, received)
        planned = list(planned_steps(member.shards, settings, member.seed, round_number))
        steps = account.draw(planned)
        seen: Counter[str] = Counter()
        for task, batch in planned:
            seen[task] += len(batch)
        expected = {task: lot.expected for task, lot in account.lots.items()}
        return replace(
            member,
            lots=Lots(steps, expected, seen),
            accounts={**member.accounts, NAME: _Drawing(account, tuple(order), moved)},
        )

    def most_examples(self, settings: LocalSettings) -> int:
        """As many as most lots have, so that a step is mostly one pass."""
        size = settings.largest_batch
        most = -(-(size + math.ceil(3 * math.sqrt(size))) // 8) * 8
        return int(self._options["examples_at_once"] or min(MOST_IN_STACKS, most))

    def load(self, stack: Stack, members: Sequence[Member]) -> None:
        self._members = members
        self._noise: list[dict[str, KeyedNoise | torch.Generator]] = [
            {
                task: _generator(member.accounts[NAME].account.noise_key(task), stack.index.device)
                for task in member.accounts[NAME].account.lots
            }
            for member in members
        ]

    def add_noise(self, stack: Stack, task: str | None, is_active: np.ndarray) -> None:
        for k in np.flatnonzero(is_active).tolist():
            member = self._members[k]
            own = task or member.tasks[0].name
            drawing: _Drawing = member.accounts[NAME]
            deviation = drawing.account.deviation(own) * stack.settings.loss_weights[own]
            source = self._noise[k][own]
            if isinstance(source, KeyedNoise):
                drawing.add_to(stack, k, own, source, deviation)
            else:
                self._add_drawn(stack, k, set(drawing.moved[own]), source, deviation)

    def finish(self, member: Member, tasks: Sequence[str]) -> Extra:
        sent: Extra = member.accounts[NAME].account.sent()
        return sent

    def _add_drawn(
        self, stack: Stack, k: int, moved: Collection[Key], source: torch.Generator, deviation: float
    ) -> None:
        keys = self._members[k].keys
        for _, block, row in stack.blocks_of(k):
            spans = _joined(span for name, (span, _) in block.spans.items() if keys.get(name) in moved)
            for span in spans:
                gradients = block.gradients[row, span]
                gradients.add_(torch.randn(gradients.shape, generator=source, device=gradients.device), alpha=deviation)


@dataclass(frozen=True)
class _Drawing:
    """A client's account, and the order in which a client by itself draws noise: `moved` by task, of all in `order`."""

    account: Account
    order: tuple[Key, ...]
    moved: Mapping[str, Sequence[Key]]

    def add_to(self, stack: Stack, k: int, task: str, noise: KeyedNoise, deviation: float) -> None:
        """Draw for neighbours together, as they lie in the buffer of a client by itself."""
        targets = {
            name: block.gradients[row, span]
            for _, block, row in stack.blocks_of(k)
            for name, (span, _) in block.spans.items()
        }
        of_task = set(self.moved[task])
        for is_moved, keys in groupby(self.order, of_task.__contains__):
            if not is_moved:
                continue
            parts = [targets[key.name] for key in keys]
            drawn = torch.zeros(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
            noise.add_to(drawn, deviation)
            start = 0
            for part in parts:
                part.add_(drawn[start : start + part.numel()])
                start += part.numel()


def _generator(key: bytes, device: torch.device) -> KeyedNoise | torch.Generator:
    if device.type != "cuda":
        return KeyedNoise(key)
    return torch.Generator(device).manual_seed(int.from_bytes(key[:8], "big") >> 1)


class PrivateGradients(LocalMethod):
    """Draws every step's examples, clips their gradients one by one, and adds noise."""

    name = NAME
    stacked = PrivateStack
    clips_gradients = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self._max_norm = options, options["max_grad_norm"]
        self._at_once = options["examples_at_once"]
        self._noise: dict[str, KeyedNoise] = {}

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        bound_model = client.bound
        _whole_table(bound_model.index is not None)
        assert client.release is not None
        assert client.settings is not None
        self._client = client
        spans = bound_model.flat.spans
        self._made = {}
        for task in client.shards:
            trained = [name for name, key in bound_model.views[task].items() if key in spans]
            self._made[task] = ExampleGradients(bound_model.use(task), task, trained)
        moved = {task: [bound_model.views[task][name] for name in made.names] for task, made in self._made.items()}
        self._account = Account(self._options, client.release(), client.shards, client.settings, moved, received)

    def plan_steps(self, steps: Sequence[Batch]) -> Sequence[Batch]:
        """Replace each batch by a lot, and count them before the first one is computed."""
        drawn = self._account.draw(steps)
        self._noise = {task: KeyedNoise(self._account.noise_key(task)) for task in self._account.lots}
        return drawn

    def differentiate(self, task: str, batch: np.ndarray, weight: float, buffer: GradientBuffer) -> Tensor | None:
        if task not in self._account.lots:
            return None
        lot, bound_model, made = self._account.lots[task], self._client.bound, self._made[task]
        spans, view = bound_model.flat.spans, bound_model.views[task]
        moved = sorted((spans[view[name]] for name in made.names), key=lambda span: span.start)
        gradients = buffer([view[name] for name in made.names])
        losses = self._sum_clipped(task, batch, Clip(self._max_norm, weight / lot.expected), gradients)
        deviation = self._max_norm * lot.noise_multiplier * weight / lot.expected
        for span in _joined(moved):
            self._noise[task].add_to(gradients[span], deviation)
        return losses.mean() if len(losses) else torch.zeros((), device=self._client.device)

    def finish(self, tasks: Sequence[str]) -> Finished:
        return Finished(self._account.sent())

    def _sum_clipped(self, task: str, batch: np.ndarray, clip: Clip, gradients: Tensor) -> Tensor:
        """Write the sum of the clipped gradients of a lot, some examples at a time; return the loss of each."""
        bound_model, made = self._client.bound, self._made[task]
        model = bound_model.use(task)
        shard: Shard = self._client.shards[task]
        spans = {name: bound_model.flat.spans[bound_model.views[task][name]] for name in made.names}
        shapes = {name: bound_model.parameters[bound_model.views[task][name]].shape for name in made.names}
        at_once = self._at_once or min(MOST_AT_ONCE, 2 * self._account.lots[task].size)
        parts = [part for part in np.array_split(batch, -(-len(batch) // at_once)) if len(part)] if len(batch) else []
        if not parts:
            for span in spans.values():
                gradients[span].zero_()
            return torch.zeros(0)
        found = []
        for number, part in enumerate(parts):
            target = gradients if number == 0 else self._second_buffer()
            into = {name: target[span].view(shapes[name]) for name, span in spans.items()}
            inputs, labels = to_tensors(collate(shard, part, model.pad_id, None), self._client.device)
            found.append(made.clipped(inputs, labels, lambda *given: self._losses(task, *given), clip, into))
            if number:
                for span in _joined(sorted(spans.values(), key=lambda span: span.start)):
                    gradients[span].add_(target[span])
        return torch.cat(found)

    def _losses(self, task: str, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example by itself: weights of classes are not divided by their sum over the batch."""
        one = self._client.bound.model.tasks[task]
        losses = one.kind_of.losses(one, outputs, labels)
        weights = one.kind_of.class_weights(one, np.zeros(0, np.int64))
        return losses if weights is None else losses * torch.from_numpy(weights).to(losses)[labels]

    def _second_buffer(self) -> Tensor:
        flat = self._client.bound.flat.values
        return self._client.bound.buffers.take(f"{NAME}.part", flat.numel(), flat.dtype, flat.device)


def _joined(spans: Iterable[slice]) -> list[slice]:
    """The same spans, in order, with neighbours as one."""
    joined: list[slice] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = slice(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined


def _rounded_up(chance: float) -> float:
    """The chance with three digits, never a smaller one."""
    step = 10.0 ** (math.floor(math.log10(chance)) - 2)
    rounded = round(math.ceil(chance / step - 1e-9) * step, 12)
    return rounded if rounded >= chance else chance


def check_reach(example: ExamplePrivacyConfig, settings: LocalSettings, most_examples: Mapping[str, int]) -> None:
    """Raise where no noise reaches the epsilon at any client of a task, of which the largest has so many examples."""
    for task, number in most_examples.items():
        if example.epsilon is None or not number:
            continue
        chance = min(1.0, settings.batch_size_of(task, number) / number)
        steps = most_steps({task: number}, settings)[task]
        if not is_reachable(example.epsilon, example.delta, chance, steps):
            raise ConfigError(
                f"privacy.example.epsilon: found {example.epsilon:g}, which no noise reaches at delta {example.delta:g}"
                f" at any client of {task}: the largest has {number} examples, and makes {steps} steps; write a larger"
                " epsilon, or fewer rounds"
            )


def check_infos(
    example: ExamplePrivacyConfig,
    settings: LocalSettings,
    sampled: Mapping[ClientId, Sequence[str]],
    infos: Mapping[ClientId, ClientInfo],
) -> None:
    if example.epsilon is None:
        return
    largest: dict[str, int] = {}
    for client, tasks in sampled.items():
        counts = infos[client].num_examples
        for task in tasks:
            largest[task] = max(largest.get(task, 0), counts.get(task, 0))
    check_reach(example, settings, largest)


class ExamplePrivacy(ServerMethod):
    """Keeps the ledger of all clients, from their updates, and says what it comes to."""

    name = NAME

    def __init__(
        self, delta: float, max_grad_norm: float, num_rounds: int, check: CheckCounts = lambda sampled, infos: None
    ) -> None:
        self._delta, self._max_grad_norm, self._num_rounds = delta, max_grad_norm, num_rounds
        self._check = check
        self._sampled: Mapping[ClientId, Sequence[str]] = {}
        self._updates: dict[ClientId, Mapping[str, Any]] = {}
        self._released: dict[ClientId, Mapping[str, Any]] = {}

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        if state.round == 0:
            self._check(sampled, infos)
        self._sampled, self._updates = dict(sampled), {}
        return RoundSettings()

    def add(self, update: Update) -> None:
        if NAME in update.extra:
            self._updates[update.client] = update.extra[NAME].values

    def after_aggregation(self, before: State, after: State) -> Step:
        clients = {client: dict(tasks) for client, tasks in _clients(before).items()}
        for client, tasks in self._sampled.items():
            sent = self._updates.get(client)
            known = clients.setdefault(client, {})
            for task in tasks:
                if sent is None:
                    old = known.get(task, {SPENT: [], RELEASED: None, SCOPES: [], UNCONFIRMED: 0})
                    known[task] = {**old, UNCONFIRMED: old[UNCONFIRMED] + 1}
                elif task in sent[SPENT]:
                    one = {SPENT: sent[SPENT][task], RELEASED: sent[RELEASED][task], SCOPES: sent[SCOPES][task]}
                    known[task] = {**one, UNCONFIRMED: 0}
        self._released = {client: sent[RELEASED] for client, sent in self._updates.items()}
        return Step(
            after.with_extra(NAME, Extra({CLIENTS: {client: tasks for client, tasks in clients.items() if tasks}}))
        )

    def report(self, state: State) -> tuple[Event, ...]:
        by_task: dict[str, dict[ClientId, Mapping[str, Any]]] = {}
        for client, tasks in _clients(state).items():
            for task, entry in tasks.items():
                by_task.setdefault(task, {})[client] = entry
        if not by_task:
            return ()
        is_last = state.round >= self._num_rounds or all(one.stopped_round for one in state.progress.values())
        released = {
            client: {task: ReleaseFacts(**one) for task, one in tasks.items()}
            for client, tasks in self._released.items()
        }
        self._released = {}
        return (
            ExamplePrivacyEvent(
                round=state.round,
                delta=self._delta,
                max_grad_norm=self._max_grad_norm,
                tasks={task: self._spending(entries, is_last=is_last) for task, entries in sorted(by_task.items())},
                released=released,
            ),
        )

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) - {CLIENTS}:
            raise ValueError("the ledger has clients alone")
        for tasks in extra.values.get(CLIENTS, {}).values():
            for entry in tasks.values():
                if entry[SPENT]:
                    _check_task(entry[SPENT], entry[RELEASED], entry[SCOPES])
                if type(entry[UNCONFIRMED]) is not int or entry[UNCONFIRMED] < 0:
                    raise ValueError("jobs are counted in whole numbers")

    def _spending(self, entries: Mapping[ClientId, Mapping[str, Any]], *, is_last: bool) -> ExampleSpending:
        """What a task's noise comes to at the client where it is most; jobs without an answer count as done."""
        ledgers = {client: done_of(entry) for client, entry in entries.items()}
        bounds = {releases: most_spent(releases, self._delta) for releases in set(ledgers.values())}
        order = sorted(ledgers, key=lambda client: (-bounds[ledgers[client]], client))
        client, epsilon, accountant = order[0], bounds[ledgers[order[0]]], "rdp"
        if is_last:
            exact: dict[tuple[Releases, ...], float] = {}
            for name in order:
                releases = ledgers[name]
                if exact and bounds[releases] <= max(exact.values()):
                    break
                if releases not in exact:
                    if len(exact) == MOST_LEDGERS:
                        break
                    exact[releases] = spent(releases, self._delta).epsilon
            else:
                name = ""
            most = max(exact.values())
            rest = bounds[ledgers[name]] if name else 0.0
            # Of those that were not looked at, a bound is known.
            epsilon, accountant = (most, "pld") if rest <= most else (rest, "rdp")
            client = next(one for one in order if exact.get(ledgers[one]) == most)
        return ExampleSpending(
            epsilon=epsilon,
            epsilon_rdp=bounds[ledgers[client]],
            accountant=accountant,
            client=client,
            releases=[ReleaseFacts(**one.to_dict()) for one in ledgers[client]],
            clients=len(entries),
            scopes=sorted({scope for entry in entries.values() for scope in entry[SCOPES]}),
            unconfirmed=sum(entry[UNCONFIRMED] for entry in entries.values()),
            unknown=sum(not entry[SPENT] for entry in entries.values()),
        )


def _clients(state: State) -> Mapping[ClientId, Mapping[str, Mapping[str, Any]]]:
    found: Mapping[ClientId, Mapping[str, Mapping[str, Any]]] = state.extra.get(NAME, NO_EXTRA).values.get(CLIENTS, {})
    return found


def done_of(entry: Mapping[str, Any]) -> tuple[Releases, ...]:
    """A client's releases of a task: those it has told of, and one round more for each job without an answer."""
    done = [Releases.from_dict(one) for one in entry[SPENT]]
    if entry[UNCONFIRMED] and entry[RELEASED] is not None:
        last = Releases.from_dict(entry[RELEASED])
        done.append(Releases(last.chance, last.noise_multiplier, last.times * entry[UNCONFIRMED]))
    return together(done)


def _check_task(told: Sequence[Mapping[str, Any]], released: Mapping[str, Any], scopes: Sequence[str]) -> None:
    """Raise ValueError unless these are releases, those of the last round among them."""
    done, last = [Releases.from_dict(one) for one in told], Releases.from_dict(released)
    is_in = any((one.chance, one.noise_multiplier) == (last.chance, last.noise_multiplier) for one in done)
    if not is_in or sum(one.times for one in done) < last.times or max(one.times for one in done) > MOST_TIMES:
        raise ValueError("what was released in a round is not in the ledger")
    if not all(type(scope) is str and len(scope) <= 300 for scope in scopes):
        raise ValueError("scopes are names")


def _check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why what a client sent is no ledger of its tasks."""
    told, released, scopes = (extra.values.get(part, {}) for part in (SPENT, RELEASED, SCOPES))
    is_whole = not extra.tensors and set(extra.values) == {SPENT, RELEASED, SCOPES}
    if not is_whole or not set(told) == set(released) == set(scopes) or not set(told) <= set(tasks):
        return "its ledger of noise is not one of its tasks"
    given = options["noise_multiplier"]
    for task in told:
        _check_task(told[task], released[task], scopes[task])
        if given is not None and released[task]["noise_multiplier"] != given:
            return f"it added other noise to the gradients of {task} than the config says"
    return None


def _refused(config: Config) -> str | None:
    """The first setting that does not go together with noise on gradients: its key, why, and what to write."""
    training, example = config.training, config.privacy.example
    if example is None:
        return None
    distillation = training.distillation
    found = {
        "training.smart": (training.smart is not None, "its penalty has a gradient that is not clipped"),
        "training.distillation.where": (
            distillation is not None and distillation.where == "clients",
            "its losses are compared over a batch; write `where: server`",
        ),
        "training.loss_weighting": (
            training.loss_weighting == "uncertainty",
            "the weights it learns are not an example's; write `loss_weighting: fixed`",
        ),
        "training.logit_adjustment": (
            bool(training.logit_adjustment),
            "it adds what follows from a client's labels to every example's loss; write 0",
        ),
        "training.task_schedule": (
            training.task_schedule not in PLANNED,
            f"it draws how many steps a task makes, which the noise depends on; write one of {', '.join(PLANNED)}",
        ),
        "federation.vocabulary_slices": (
            config.federation.vocabulary_slices,
            "the token rows that a client's texts use would leave without noise; write `vocabulary_slices: false`",
        ),
        **{
            f"tasks.{name}.class_weights": (
                task.class_weights == "balanced",
                "they follow from a client's labels; write them as numbers",
            )
            for name, task in config.tasks.items()
        },
        **{
            f"tasks.{name}.kind": (
                (task.kind or getattr(BUILTIN.get(name), "kind", None)) not in (None, *KINDS),
                "its losses are not known to be of one example each; write one of " + ", ".join(KINDS),
            )
            for name, task in config.tasks.items()
        },
        **{
            f"methods.{name}": (name not in BUILT_IN, "it is not known to see nothing but noisy gradients")
            for name in config.methods
        },
    }
    return next((f"{key}: found with privacy.example; {why}" for key, (is_set, why) in found.items() if is_set), None)


def _is_masked(config: Config) -> bool:
    """Whether updates leave clients under masks, so that no ledger can go along."""
    return config.privacy.secure_aggregation is not None and config.mode.startswith("federated")


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    example = config.privacy.example
    if example is None:
        return None
    reason = _refused(config)
    if reason is not None:
        raise ConfigError(reason)
    return {**example.model_dump(), "masked": _is_masked(config)}


def _open(setup: ServerSetup) -> ServerMethod | None:
    example = setup.config.privacy.example
    if example is None:
        return None
    # What a filter does, it does to an update that has its noise.
    others = [name for name in setup.settings.methods if name not in FITTING and find(name).local is not None]
    if others:
        raise ConfigError(f"privacy.example: found with {others[0]}, which may see more than noisy gradients")
    # Whether what they need is installed shows before the first round.
    most_spent([Releases(1.0, 1.0, 1)], example.delta)
    KeyedNoise(bytes(32))
    settings = setup.settings
    if setup.most_examples is not None and example.epsilon is not None:
        check_reach(example, settings, {task: setup.most_examples(task) for task in setup.tasks})
    check = partial(check_infos, example, settings)
    if _is_masked(setup.config):
        return MaskedExamplePrivacy(example, settings, list(setup.model.canonical()), check)
    return ExamplePrivacy(example.delta, example.max_grad_norm, setup.config.training.num_rounds, check)


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why it is not the number of jobs of each task, which comes along where updates are masked."""
    if not extra and not options["masked"]:
        return None
    jobs = extra.values.get(JOBS)
    is_fine = options["masked"] and not extra.tensors and set(extra.values) == {JOBS} and isinstance(jobs, Mapping)
    if not is_fine or not all(type(number) is int and number > 0 for number in dict(jobs or {}).values()):
        return "the job's number of jobs is none"
    return None


def _check_policy(policy: Policy, config: Config) -> str | None:
    required, example = policy.require.example_privacy, config.privacy.example
    if required is None:
        return None
    if example is None:
        return "the policy requires noise on gradients (require.example_privacy); the server's config has none"
    if example.delta > required.max_delta or (example.epsilon or 0.0) > required.max_epsilon:
        epsilon = "" if example.epsilon is None else f"epsilon {example.epsilon:g} and "
        return (
            f"the server's privacy.example has {epsilon}delta {example.delta:g}; the policy allows"
            f" {required.max_epsilon:g} and {required.max_delta:g} (require.example_privacy)"
        )
    return None


CAPABILITY = Capability(
    NAME,
    PrivateGradients,
    _client_options,
    _open,
    check_sent=_check_sent,
    check_received=_check_received,
    check_policy=_check_policy,
    is_quiet_under_masks=True,
)
