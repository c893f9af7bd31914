"""What a study of compression is asked; every default of the command stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmtl.compress.augment.settings import AugmentSettings, parse_copies
from fedmtl.compress.distill.settings import DistillSettings

# GLUE's tasks of the slides, and two more that the paper has.
TASKS = ("sst2", "mrpc", "rte", "cola", "qqp", "stsb")
DEFAULTS = DistillSettings("")


@dataclass(frozen=True)
class Asked:
    """All of it stands in study.yaml. `tasks` empty is those of TASKS that are found in the data.

    `overrides` change the teacher's config, which students and pruned models inherit. `runs` False leaves cells as they
    are; `measures` False times nothing.
    """

    data: str | None = None
    encoder: str = "tiny"
    quick: bool = False
    tables: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    seeds: tuple[int, ...] = (0,)
    seed_rows: str = "*"
    rows: str = "*"
    tasks: tuple[str, ...] = ()
    teacher: str | None = None
    teacher_epochs: int = 3
    epochs_intermediate: int = DEFAULTS.epochs_intermediate
    epochs_prediction: int = DEFAULTS.epochs_prediction
    rate_intermediate: float = DEFAULTS.rate_intermediate
    rate_prediction: float = DEFAULTS.rate_prediction
    batch_size: int = 32
    prune_epochs: int = 6
    augment: tuple[str, ...] = ()
    copies: str = ""
    most_copies: int = AugmentSettings().most
    overrides: tuple[str, ...] = ()
    runs: bool = True
    measures: bool = True

    def distilling(self, sources: tuple[str, ...]) -> DistillSettings:
        """What all students have in common, with augmentation where there are sources."""
        return DistillSettings(
            student="",
            epochs_intermediate=self.epochs_intermediate,
            epochs_prediction=self.epochs_prediction,
            rate_intermediate=self.rate_intermediate,
            rate_prediction=self.rate_prediction,
            augment=AugmentSettings(sources, copies=parse_copies(self.copies), most=self.most_copies),
        )


# What a miniature does unless told otherwise.
QUICK: Mapping[str, Any] = {
    "teacher_epochs": 4,
    "epochs_intermediate": 1,
    "epochs_prediction": 2,
    "rate_intermediate": 1e-3,
    "rate_prediction": 1e-3,
    "batch_size": 8,
    "prune_epochs": 1,
    "copies": "1",
}
