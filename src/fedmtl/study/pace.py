"""How long a grid of cells will still take, from the cells that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A cell that has just begun says more of its start than of its pace.
LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Paced:
    """A cell's work in any unit, the share of it that is done, and the seconds that took here."""

    work: float
    share: float
    seconds: float


def seconds_left(cells: Sequence[Paced], at_once: int) -> float | None:
    """Work that is left at the pace of the work that was measured, shared by as many cells as run at once.

    Never less than the slowest open cell needs by itself; None until something was measured. Cells that an earlier call
    finished have no seconds here: they are no work and tell nothing.
    """
    measured = [cell for cell in cells if cell.seconds > 0 and cell.share >= LEAST_SHARE]
    done = sum(cell.work * cell.share for cell in measured)
    if not done:
        return None
    pace = sum(cell.seconds for cell in measured) / done
    left = [cell.work * (1 - cell.share) * pace for cell in cells if cell.share < 1]
    return max(sum(left) / at_once, max(left, default=0.0))
