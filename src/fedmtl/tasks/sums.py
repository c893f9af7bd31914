"""What predictions on any part of the data add up to, so that parts merge and no example travels.

Each kind of task defines its sums (`tasks/kinds/`); a client may be hostile, so they are read strictly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmtl.errors import WireError
from fedmtl.tasks.task import Task

MOST_EXAMPLES = 1 << 53
# The sum of a million of these is finite, and so is its square.
MOST_MOMENT = 1e100
MOST_LETTERS = 200
_BROKEN = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Sums(Protocol):
    """Sums of one task: of two parts of the data they add up to those of both.

    `broken` of the `examples` had outputs that were not finite; `loss` is the sum over the others.
    """

    @property
    def loss(self) -> float: ...

    @property
    def broken(self) -> int: ...

    @property
    def examples(self) -> int: ...

    def __add__(self, other: Any) -> Any: ...

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the kind's `read_sums` gives the same sums again, bit for bit."""
        ...


def sum_predictions(
    task: Task, outputs: npt.NDArray[Any], labels: npt.NDArray[Any], loss: float, keep_pairs: bool = False
) -> Sums:
    """Add up a batch: rows of outputs, and labels as the task's kind has them. `loss` is the sum, not the mean."""
    assert len(outputs) == len(labels), "one label per row of outputs"
    assert outputs.ndim == 2, "outputs are rows"
    outputs = outputs.astype(np.float64)
    finite = np.isfinite(outputs).all(axis=1)
    broken = int((~finite).sum())
    labels = np.asarray(labels)[finite]
    return task.kind_of.sum_outputs(task, outputs[finite], labels, loss, keep_pairs=keep_pairs, broken=broken)


def sums_from_dict(task: Task, data: Mapping[str, Any], *, with_pairs: bool = True) -> Sums:
    """The sums a client sent for a task; a WireError where they are not that task's.

    Unless `with_pairs`, predictions with their labels are refused: nobody wanted them.
    """
    if not isinstance(data, Mapping):
        raise WireError(f"evaluation sums: not a mapping for task {task.name}")
    return task.kind_of.read_sums(task, data, with_pairs=with_pairs)


# What a kind reads a stranger's sums with.


@contextmanager
def not_those_of(what: str) -> Iterator[None]:
    """Whatever goes wrong meanwhile is a WireError: these are not the sums of `what`."""
    try:
        yield
    except _BROKEN as error:
        # It may quote what a stranger sent.
        raise WireError(f"evaluation sums: not those of {what} ({repr(error)[:MOST_LETTERS]})") from None


def read_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("not a list")
    return value


def read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_EXAMPLES:
        raise ValueError("not a count")
    return value


def read_moment(value: Any) -> float:
    """A finite number whose sum over all clients is finite too."""
    if type(value) not in (int, float) or not abs(value) <= MOST_MOMENT:
        raise ValueError("not a finite number")
    return float(value)


def read_loss(value: Any) -> float:
    """Not less than 0, or not a number at all where a model's outputs were not."""
    if type(value) not in (int, float) or value < 0 or (math.isfinite(value) and value > MOST_MOMENT):
        raise ValueError("not a loss")
    return float(value)
