"""How the learning rate changes over a run, and in which order a client with several tasks works through their batches.

Within a round the rate goes on from step to step. `epoch`, `random` and `round_robin` are the baselines that annealed
sampling (Stickland and Murray 2019, BERT and PALs, section 4.2) is compared with; `e` there is the round here. Every
task runs through shuffled passes, so that no example repeats within a pass. Passes begin anew each round, with
another shuffle: what is left of one is not carried over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, repeat

import numpy as np

from fedmtl.seeds import derive_seed
from fedmtl.training.settings import LocalSettings

Step = tuple[str, np.ndarray]


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
