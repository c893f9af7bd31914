"""The client's halves of `privacy.example`: clipped gradients of a lot's examples, and noise on their sum.

Abadi et al. 2016, Deep learning with differential privacy. A step's examples are drawn each by itself with the same
chance (Poisson); every example's gradient is clipped by itself, over all values that the step moves together; Gaussian
noise is added to each of these values, used or not; and the sum is divided by the expected number of examples, whatever
was drawn. The optimizer then goes on with that, as does all that follows: averaging, pruning, what other methods do.

`PrivateGradients` is a client by itself, `PrivateStack` several that train at once. Lots, noise and what is released
are those of their `Account` (`example_account.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.methods.example_account import Account
from fedmtl.methods.masked_ledger import NAME
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.model.multitask import MultiTaskModel, flat_order, undecayed
from fedmtl.model.per_example import Clip, ExampleGradients
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, owner_task
from fedmtl.tasks.batches import Shard, collate
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
from fedmtl.training.stacked.blocks import Block
from fedmtl.training.stacked.method import StackedMethod
from fedmtl.training.stacked.plan import Lots, Member
from fedmtl.training.stacked.shape import reached

if TYPE_CHECKING:
    from fedmtl.training.stacked.stack import Stack

# More examples than this at once save no time.
MOST_AT_ONCE = 256
# The same of each client where clients train at once, on a device with memory of its own.
MOST_IN_STACKS = 1024


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
    waited for, it is drawn by a kernel (`triton_noise.py`) from 64 bits of the same key: as good for a simulation,
    which is all that trains clients at once, but not what a site would add to its updates.
    """

    name = NAME
    moves_all_rows = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.max_example_norm = options["max_grad_norm"]
        self._members: Sequence[Member] = ()
        self._streams: list[dict[str, KeyedNoise]] = []
        self._targets: dict[str | None, list[_Target]] = {}

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
        self._members, self._steps_made = members, 0
        kernel = noise_kernel() if stack.index.is_cuda else None
        self._streams = [] if kernel else [_streams(member.accounts[NAME]) for member in members]
        self._targets = _targets(stack, members) if kernel else {}

    def add_noise(self, stack: Stack, task: str | None, is_active: np.ndarray) -> None:
        rates, weights = stack.inputs.factors[0], stack.inputs.factors[3]
        if self._targets:
            self._steps_made += 1
            for target in self._targets[task]:
                rows = target.block.clients
                given = target.keys, target.deviations, weights[rows], rates[rows]
                noise_kernel()(target.block.gradients, target.span, *given, self._steps_made)
            return
        for k in np.flatnonzero(is_active).tolist():
            own = task or self._members[k].tasks[0].name
            drawing: _Drawing = self._members[k].accounts[NAME]
            deviation = drawing.account.deviation_of_sum(own) * float(weights[k])
            drawing.add_to(stack, k, own, self._streams[k][own], deviation)

    def finish(self, member: Member, tasks: Sequence[str]) -> Extra:
        sent: Extra = member.accounts[NAME].account.sent()
        return sent


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


@dataclass(frozen=True)
class _Target:
    """Neighbouring values of a block, with a key and the deviation of noise for each of its clients; 0 is no noise."""

    block: Block
    span: slice
    keys: Tensor
    deviations: Tensor


def _targets(stack: Stack, members: Sequence[Member]) -> dict[str | None, list[_Target]]:
    """What steps add noise to: of each task where clients have several, and else of all."""
    tasks = members[0].tasks
    names = [task.name for task in tasks] if len(tasks) > 1 else [None]
    return {name: list(_targets_of(stack, members, name)) for name in names}


def _targets_of(stack: Stack, members: Sequence[Member], task: str | None) -> Iterator[_Target]:
    device = stack.index.device
    for number, block in enumerate(stack.blocks):
        keys: dict[tuple[int, int], np.ndarray] = {}
        deviations: dict[tuple[int, int], np.ndarray] = {}
        for row, member in enumerate(members[block.clients]):
            own, drawing = task or member.tasks[0].name, member.accounts[NAME]
            if own not in drawing.account.lots:
                continue
            moved, secret = set(drawing.moved[own]), drawing.account.noise_key(own)
            for span in _joined(span for name, (span, _) in block.spans.items() if member.keys.get(name) in moved):
                place = span.start, span.stop
                key = derive_key(secret, number, *place)
                keys.setdefault(place, np.zeros(block.num_clients, np.int64))[row] = np.frombuffer(key, np.int64)[0]
                far = deviations.setdefault(place, np.zeros(block.num_clients, np.float32))
                far[row] = drawing.account.deviation_of_sum(own)
        for place, far in deviations.items():
            on_device = (torch.from_numpy(each).to(device) for each in (keys[place], far))
            yield _Target(block, slice(*place), *on_device)


def _streams(drawing: _Drawing) -> dict[str, KeyedNoise]:
    return {task: KeyedNoise(drawing.account.noise_key(task)) for task in drawing.account.lots}


@cache
def noise_kernel() -> Any:
    """Noise for clients at once, drawn on their GPU, or None where Triton is missing."""
    try:
        return import_module("fedmtl.methods.triton_noise").add_noise
    except ImportError:
        return None


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
        clip = Clip(self._max_norm, weight / lot.expected, gradients.dtype)
        losses = self._sum_clipped(task, batch, clip, gradients)
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
