"""What a study of multi-task methods is asked; every default of the command stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TABLES = (1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Asked:
    """What is wanted of the study; all of it stands in study.yaml.

    `overrides` change what all rows have in common, and leave alone what a row is about.
    """

    data: str | None = None
    encoder: str = "tiny"
    quick: bool = False
    tables: tuple[int, ...] = TABLES
    seeds: tuple[int, ...] = (0,)
    seed_rows: str = "*"
    rows: str = "*"
    epochs: int = 100
    steps: int = 30_000
    batch_size: int = 16
    cfimdb: bool = True
    overrides: tuple[str, ...] = ()


# What a miniature does unless told otherwise.
QUICK: Mapping[str, Any] = {"epochs": 2, "steps": 18, "batch_size": 8}
