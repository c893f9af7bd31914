"""Lists of rows, one list for every example, end to end in one array: a tag or a row of outputs for every word.

`Sequences` is indexed by examples as an array is, so that labels and outputs are handled alike whether an example has
one row of them or many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
OFFSETS = "offsets"


@dataclass(frozen=True, eq=False)
class Sequences:
    """The rows of example i are `values[offsets[i] : offsets[i + 1]]`."""

    values: Array
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Any], dtype: Any) -> Sequences:
        """Put lists of plain numbers end to end."""
        sizes = [len(each) for each in lists]
        values = np.array([value for each in lists for value in each], dtype=dtype)
        return cls(values, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def empty(cls, count: int, values: Array) -> Sequences:
        """So many examples without a row; `values`, which are none, have the type and the width of rows."""
        assert not len(values), "nothing is in them"
        return cls(values, np.zeros(count + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Array]:
        return (self.values[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, int | np.integer):
            return self.values[self.offsets[rows] : self.offsets[int(rows) + 1]]
        chosen = np.arange(len(self))[rows]
        sizes = self.lengths()[chosen]
        ends = np.cumsum(sizes)
        # Where each chosen list begins here, less where it begins there.
        shift = np.repeat(self.offsets[chosen] - (ends - sizes), sizes)
        at = np.arange(len(shift)) + shift
        return Sequences(self.values[at], np.concatenate([[0], ends]).astype(np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def lengths(self) -> npt.NDArray[np.int64]:
        """How many rows each example has."""
        return np.diff(self.offsets)

    def owners(self) -> npt.NDArray[np.int64]:
        """Which example each row is of."""
        return np.repeat(np.arange(len(self)), self.lengths())

    def with_values(self, values: Array) -> Sequences:
        """Other rows, as many for each example."""
        assert len(values) == len(self.values), "one row for each"
        return Sequences(values, self.offsets)

    def tobytes(self) -> bytes:
        return self.lengths().tobytes() + self.values.tobytes()


# An array or `Sequences`: which of them follows from the kind of the task.
Rows = Any


def save_rows(folder: Path, name: str, rows: Rows) -> None:
    """Write labels into a folder, which are mapped from there; those of lists have a second file."""
    if isinstance(rows, Sequences):
        np.save(folder / f"{name}.{OFFSETS}.npy", rows.offsets)
    np.save(folder / f"{name}.npy", rows.values if isinstance(rows, Sequences) else rows)
