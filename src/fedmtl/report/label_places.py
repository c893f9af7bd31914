"""Where names go beside dots so that none lies on another name or on a dot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Of the style sheet's 11 pixels in a wide sans-serif.
LETTER, HEIGHT = 6.6, 13.0
GAP = 4.0
DISTANCES = (0.0, 10.0, 22.0, 36.0, 52.0, 70.0)
ANGLES = (0, 180, 270, 90, 315, 45, 225, 135)


@dataclass(frozen=True)
class Dot:
    """A circle with a name."""

    x: float
    y: float
    radius: float
    name: str


@dataclass(frozen=True)
class Box:
    """A rectangle in the picture, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def place_labels(dots: Sequence[Dot], inside: Box) -> list[Box]:
    """A box for each name: the nearest free one, or, where there is none, the one that covers least."""
    taken = [Box(dot.x - dot.radius, dot.y - dot.radius, dot.x + dot.radius, dot.y + dot.radius) for dot in dots]
    placed: dict[int, Box] = {}
    # From the top down: a name that has to give way then moves in an order that a reader can follow.
    for number in sorted(range(len(dots)), key=lambda number: (dots[number].y, dots[number].x)):
        box = min(_places(dots[number]), key=lambda box: _cost(box, taken, inside))
        placed[number] = box
        taken.append(box)
    return [placed[number] for number in range(len(dots))]


def _places(dot: Dot) -> Iterator[Box]:
    """Boxes around a dot, the nearest first; `min` keeps the first of equals."""
    wide = LETTER * len(dot.name)
    for distance in DISTANCES:
        for angle in ANGLES:
            across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            reach = dot.radius + GAP + distance
            middle_x = dot.x + across * (reach + wide / 2)
            middle_y = dot.y + down * (reach + HEIGHT / 2)
            yield Box(middle_x - wide / 2, middle_y - HEIGHT / 2, middle_x + wide / 2, middle_y + HEIGHT / 2)


def _cost(box: Box, taken: Sequence[Box], inside: Box) -> float:
    return sum(map(box.overlap, taken)) + 4 * (box.area - box.overlap(inside))
