"""The clients' optimizers, on flat buffers, and the schedules that they follow.

One fused call moves all values that share a decay and a history. Within a round the learning rate goes on from step to
step. Of the orders in which a client with several tasks works through their batches, `epoch`, `random` and
`round_robin` are the baselines that annealed sampling (Stickland and Murray 2019, BERT and PALs, section 4.2) is
compared with; `e` there is the round here. Every task runs through shuffled passes, so that no example repeats within a
pass. Passes begin anew each round, with another shuffle: what is left of one is not carried over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, groupby, islice, repeat

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedmtl.model.multitask import BoundModel, undecayed
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import HEADS, Key
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalMethods, LocalSettings, Part, Step


def rate_factor(settings: LocalSettings, rounds_done: float) -> float:
    """What the base rate is multiplied by after `rounds_done` rounds, which may be a fraction."""
    warmup = settings.warmup_rounds
    if rounds_done >= warmup and settings.schedule == "step":
        return settings.step_factor ** math.floor((rounds_done - warmup) / settings.step_rounds)
    return scheduled(settings.schedule, rounds_done, settings.num_rounds, warmup)


def scheduled(schedule: str, done: float, total: float, warmup: float) -> float:
    """Up in a line while `done` is below `warmup`, then constant, or down to 0 at `total`: linear, or in a cosine."""
    if done < warmup:
        return done / warmup
    if schedule == "constant":
        return 1.0
    left = total - warmup
    progress = min(1.0, (done - warmup) / left) if left > 0 else 1.0
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Holding:
    """A task at a client: its examples, the batches of a pass over them, and those of the n-th pass of the round."""

    num_examples: int
    num_batches: int
    in_pass: Callable[[int], Sequence[np.ndarray]]


def alternate(batches: Mapping[str, Sequence[np.ndarray]]) -> list[Step]:
    """Order every batch once, each task's spread evenly over the epoch: two equal tasks alternate."""
    placed = [
        ((number + 0.5) / len(of_task), task, number)
        for task, of_task in batches.items()
        for number in range(len(of_task))
    ]
    return [(task, batches[task][number]) for _, task, number in sorted(placed)]


def batches_per_step(num_tasks: int, settings: LocalSettings) -> int:
    """How many neighbours in `ordered_batches` make one step."""
    return max(1, num_tasks) if settings.task_schedule == "joint" else 1


def ordered_batches(
    holdings: Mapping[str, Holding], settings: LocalSettings, seed: int, round_number: int
) -> Iterator[Step]:
    """Yield all batches of a round; a client with one task has the same under any schedule.

    Every task has examples. Under `joint` one batch of every task is one step.
    """
    schedule, steps = settings.task_schedule, settings.steps
    every = settings.epochs * sum(holding.num_batches for holding in holdings.values())
    if schedule == "even":
        epochs = (
            alternate({task: holding.in_pass(number) for task, holding in holdings.items()}) for number in count()
        )
        return islice(chain.from_iterable(epochs), steps or every)
    if schedule == "joint":
        most = settings.epochs * max(holding.num_batches for holding in holdings.values())
        order = islice(cycle(holdings), len(holdings) * (steps or most))
    elif schedule == "round_robin":
        # Where the round before ended: of few steps, the last tasks would otherwise never have one.
        first = (max(1, round_number) - 1) * (steps or every) % len(holdings)
        order = islice(cycle(holdings), first, first + (steps or every))
    elif schedule == "epoch":
        passes = islice(_drawn(holdings, settings, seed, round_number), None if steps else settings.epochs)
        order = islice(chain.from_iterable(repeat(task, holdings[task].num_batches) for task in passes), steps)
    else:
        order = islice(_drawn(holdings, settings, seed, round_number), steps or every)
    streams = {task: chain.from_iterable(map(holding.in_pass, count())) for task, holding in holdings.items()}
    return ((task, next(streams[task])) for task in order)


def chances(num_examples: Mapping[str, int], settings: LocalSettings, round_number: int) -> dict[str, float]:
    """Return each task's probability: its examples to the power of the schedule, which is 0 where all are alike."""
    powers = {
        "proportional": 1.0,
        "annealed": annealed_power(round_number, settings.num_rounds, settings.anneal),
        "temperature": 1 / settings.task_temperature,
    }
    power = powers.get(settings.task_schedule, 0.0)
    largest = max(num_examples.values())
    sizes = {task: (number / largest) ** power for task, number in num_examples.items()}
    return {task: size / sum(sizes.values()) for task, size in sizes.items()}


def annealed_power(round_number: int, num_rounds: int, anneal: float) -> float:
    """Return 1 in the first round and 1 - anneal in the last; a run of one round has only a first."""
    return 1.0 - anneal * (max(1, round_number) - 1) / max(1, num_rounds - 1)


def _drawn(holdings: Mapping[str, Holding], settings: LocalSettings, seed: int, round_number: int) -> Iterator[str]:
    tasks = list(holdings)
    found = chances({task: holding.num_examples for task, holding in holdings.items()}, settings, round_number)
    ends = np.cumsum([found[task] for task in tasks])
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "tasks")))
    while True:
        # The last end may be a rounding below 1.
        yield tasks[min(int(np.searchsorted(ends, generator.random(), side="right")), len(tasks) - 1)]


SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
STEP = "step"
Slots = dict[str, dict[Key, Tensor]]


@dataclass(frozen=True)
class Run:
    """Neighbours in the buffer that are always stepped together; `step` counts their steps.

    `factor` is what the learning rate is multiplied by.
    """

    keys: tuple[Key, ...]
    decay: float
    factor: float
    values: Tensor
    gradients: Tensor
    slots: tuple[Tensor, ...]
    step: Tensor


class FlatOptimizer:
    """AdamW or SGD over a bound model's trainable values.

    A value that a task's loss does not reach is not stepped with that task, and neither decays nor ages: which ones
    those are shows in the first backward pass of each task. `methods` may change gradients and values at each step.
    """

    def __init__(self, bound: BoundModel, settings: LocalSettings, methods: LocalMethods | None = None) -> None:
        self._bound, self._settings, self._methods = bound, settings, methods or LocalMethods()
        names = SLOTS[settings.optimizer]
        slot_names = names if settings.optimizer == "adamw" or settings.momentum else ()
        self._gradients = self._buffer("gradients")
        self._slots = {name: self._buffer(name).zero_() for name in slot_names}
        self._plain = undecayed(bound.model)
        self._steps: dict[Key, Tensor] = {}
        self._used: dict[str, set[Key]] = {}
        self._added: dict[str, list[Tensor]] = {}
        self._task_gradients: dict[str, Tensor] = {}
        self._runs: list[Run] = []
        bound.gradients = {}

    def restore(self, saved: Mapping[str, Mapping[Key, Tensor]]) -> None:
        """Put back what `state` gave; keys that are gone are left out."""
        spans = self._bound.flat.spans
        for name, buffer in self._slots.items():
            for key, value in saved.get(name, {}).items():
                if key in spans:
                    buffer[spans[key]].copy_(value.reshape(-1))
                    self._steps.setdefault(key, self._counter(0.0))
        for key, value in saved.get(STEP, {}).items():
            if key in spans:
                self._steps[key] = self._counter(float(value))

    def state(self) -> Slots:
        """Return slot -> key -> tensor of every value that was ever stepped, for a client's saved state."""
        self._note_steps()
        spans, parameters = self._bound.flat.spans, self._bound.parameters
        slots: Slots = {
            name: {key: buffer[spans[key]].view(parameters[key].shape).cpu().clone() for key in self._steps}
            for name, buffer in self._slots.items()
        }
        if self._settings.optimizer == "adamw":
            slots[STEP] = {key: step.cpu().clone() for key, step in self._steps.items()}
        return {name: values for name, values in slots.items() if values}

    def backward(self, task: str, loss: Tensor) -> None:
        """Put the loss's gradients into the buffer."""
        self._differentiate(task, loss)
        self._methods.task_gradient(task, self._used[task], self._gradients)

    def _differentiate(self, task: str, loss: Tensor) -> None:
        if task in self._used:
            for part in self._added[task]:
                part.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
            return
        parameters = self._bound.parameters
        for key in self._bound.flat.spans:
            parameters[key].grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self._used[task] = {key for key in self._bound.flat.spans if parameters[key].grad is not None}
        self._note_steps()
        seen = set().union(*self._used.values())
        for key, span in self._bound.flat.spans.items():
            fresh = parameters[key].grad
            if key in seen:
                parameters[key].grad = self._gradients[span].view(parameters[key].shape)
                if fresh is not None:
                    self._gradients[span].copy_(fresh.reshape(-1))
        self._runs = list(self._cut())
        self._note_writers(task)

    def buffer(self, task: str, moved: Collection[Key]) -> Tensor:
        """The flat buffer for gradients of these keys, which a step on the task moves, from whoever makes them."""
        if task not in self._used:
            self._used[task] = set(moved)
            self._note_steps()
            self._runs = list(self._cut())
        return self._gradients

    def take(self, task: str) -> None:
        """Note that the buffer has the task's gradients."""
        self._methods.task_gradient(task, self._used[task], self._gradients)

    def reached(self, task: str) -> set[Key]:
        """The keys that the task's loss reaches, once `backward` has seen it; other gradients are left from before."""
        return self._used[task]

    @timed("optimizer")
    def keep(self, task: str) -> None:
        """Copy the task's gradients that `backward` left in the buffer, for `join`."""
        copy = self._task_gradients[task] = self._buffer(f"gradients of {task}")
        for span in self._spans(task):
            copy[span].copy_(self._gradients[span])

    @timed("optimizer")
    def join(self, tasks: Sequence[str], step: int = 0) -> None:
        """Put the sum of the gradients that `keep` copied into the buffer, or what a method makes of them."""
        joined = self._methods.join(step, {task: self._task_gradients[task] for task in tasks}, self._spans)
        for run in self._of(*tasks):
            run.gradients.zero_()
        for task, gradients in joined:
            for span in self._spans(task):
                self._gradients[span].add_(gradients[span])

    @timed("optimizer")
    def step(self, tasks: str | Sequence[str], rate: float) -> None:
        """Clip the gradients that `backward` or `join` left, and move the values they belong to."""
        runs = self._of(*((tasks,) if isinstance(tasks, str) else tasks))
        self._methods.gradient([Part(self._span(run), run.values, run.gradients) for run in runs])
        clip([run.gradients for run in runs], 0.0 if self._methods.clips_gradients else self._settings.max_grad_norm)
        for (_, factor), group in groupby(runs, key=lambda run: (run.decay, run.factor)):
            self._move(list(group), rate * factor)
        self._methods.stepped(self._bound.flat.values)

    def _move(self, runs: Sequence[Run], rate: float) -> None:
        settings = self._settings
        values, gradients = [run.values for run in runs], [run.gradients for run in runs]
        if settings.optimizer == "sgd":
            momenta = [run.slots[0] if run.slots else None for run in runs]
            sgd(
                values, gradients, momenta, fused=True, weight_decay=runs[0].decay, momentum=settings.momentum,
                lr=rate, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            return
        first, second = ([run.slots[number] for run in runs] for number in (0, 1))
        adamw(
            values, gradients, first, second, [], [run.step for run in runs], fused=True, amsgrad=False,
            beta1=settings.betas[0], beta2=settings.betas[1], lr=rate, weight_decay=runs[0].decay,
            eps=settings.epsilon, maximize=False,
        )  # fmt: skip

    def _of(self, *tasks: str) -> list[Run]:
        """Return the runs that any of the tasks reaches."""
        return [run for run in self._runs if any(run.keys[0] in self._used[task] for task in tasks)]

    def _spans(self, *tasks: str) -> list[slice]:
        """Return the spans of the buffer that all of the tasks reach."""
        return [self._span(run) for run in self._runs if all(run.keys[0] in self._used[task] for task in tasks)]

    def _span(self, run: Run) -> slice:
        spans = self._bound.flat.spans
        return slice(spans[run.keys[0]].start, spans[run.keys[-1]].stop)

    def _cut(self) -> Iterator[Run]:
        """The longest runs of neighbours with one decay, one rate, one set of tasks that reach them, one step count."""
        spans = self._bound.flat.spans
        kinds = {
            key: (
                key.name in self._plain,
                self._settings.head_rate if key.name.startswith(HEADS) else 1.0,
                tuple(key in used for used in self._used.values()),
                float(self._steps.get(key, 0.0)),
            )
            for key in spans
        }
        for (is_plain, factor, used, steps), group in groupby(spans, key=lambda key: kinds[key]):
            keys = tuple(group)
            if not any(used):
                continue
            span = slice(spans[keys[0]].start, spans[keys[-1]].stop)
            yield Run(
                keys,
                0.0 if is_plain else self._settings.weight_decay,
                factor,
                self._bound.flat.values[span],
                self._gradients[span],
                tuple(buffer[span] for buffer in self._slots.values()),
                self._counter(steps),
            )

    def _note_writers(self, task: str) -> None:
        """Let the encoder write this task's gradients into the buffer, and remember where others are added up."""
        bound = self._bound
        views = {
            name: self._gradients[bound.flat.spans[key]].view(bound.parameters[key].shape)
            for name, key in bound.views[task].items()
            if key in self._used[task] and bound.model.writes_gradients and not name.startswith(HEADS)
        }
        written = {bound.views[task][name] for name in views}
        bound.gradients[task] = views
        kinds = {key: key in self._used[task] and key not in written for key in bound.flat.spans}
        self._added[task] = []
        for is_added, group in groupby(bound.flat.spans.items(), key=lambda item: kinds[item[0]]):
            group_spans = [span for _, span in group]
            if is_added:
                self._added[task].append(self._gradients[group_spans[0].start : group_spans[-1].stop])

    def _note_steps(self) -> None:
        for run in self._runs:
            self._steps |= {key: run.step.clone() for key in run.keys}

    def _buffer(self, name: str) -> Tensor:
        values = self._bound.flat.values
        return self._bound.buffers.take(name, values.numel(), values.dtype, values.device)

    def _counter(self, count: float) -> Tensor:
        return torch.tensor(count, dtype=torch.float32, device=self._bound.flat.values.device)


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale the gradients so that their common norm is at most `max_norm`; 0 is off."""
    if max_norm <= 0 or not gradients:
        return
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    factor = max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)
    # A GPU multiplies by one sooner than it tells that it need not.
    if factor.device.type != "cpu" or float(factor) < 1.0:
        for gradient in gradients:
            gradient.mul_(factor.clamp(max=1.0))
