"""The settings of a distillation; every default of `fedmtl distill` stands here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedmtl.compress.augment.settings import AugmentSettings
from fedmtl.errors import ConfigError
from fedmtl.training.layer_maps import LayerMap

STAGES = ("both", "intermediate", "prediction")
STARTS = ("teacher", "random")
ATTENTION = ("auto", "scores", "relations")
PROJECTIONS = ("two", "one")
DEFAULT_MAP = "uniform"


@dataclass(frozen=True)
class LossWeights:
    """The weight of each loss; 0 leaves it out, and nothing of it is computed.

    `gold` is the labels' share of the prediction stage, between 0 and 1; the rest is the teacher's.
    """

    embedding: float = 1.0
    attention: float = 1.0
    hidden: float = 1.0
    gold: float = 0.0


@dataclass(frozen=True)
class DistillSettings:
    """One distillation; `start` None is the teacher's layers where the student has its width, and random elsewhere.

    `layer_map` None is the map that a student of `fedmtl pretrain --vocab teacher` learnt by, and uniform for others.
    """

    student: str
    layer_map: LayerMap | None = None
    start: str | None = None
    stages: str = "both"
    epochs_intermediate: int = 20
    epochs_prediction: int = 3
    rate_intermediate: float = 3e-4
    rate_prediction: float = 1e-4
    temperature: float = 1.0
    attention: str = "auto"
    projections: str = "two"
    weights: LossWeights = field(default_factory=LossWeights)
    augment: AugmentSettings = field(default_factory=AugmentSettings)

    @property
    def epochs(self) -> dict[str, int]:
        """Stage -> passes over the examples, of the stages that the settings name."""
        every = {"intermediate": self.epochs_intermediate, "prediction": self.epochs_prediction}
        return {stage: number for stage, number in every.items() if self.stages in ("both", stage)}

    def to_json(self) -> dict[str, Any]:
        layer_map = self.layer_map or DEFAULT_MAP
        return {**asdict(self), "layer_map": layer_map if isinstance(layer_map, str) else list(layer_map)}

    def fingerprint(self, teacher: str, training: dict[str, Any]) -> str:
        """Equal where a checkpoint of one may go on under the other."""
        content = json.dumps([self.to_json(), teacher, training], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse_weights(text: str) -> LossWeights:
    """`attention=0,gold=0.5`; what is not named keeps its default."""
    known = [item.name for item in fields(LossWeights)]
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--weights: {part!r} has no number; write such as hidden=1,attention=0") from None
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(f"--weights: there is no {unknown[0]!r}; they are {', '.join(known)}")
    return LossWeights(**found)


def check_settings(settings: DistillSettings) -> None:
    """Raise a ConfigError for what cannot be, before anything is read."""
    for option, value, choices in (
        ("--stages", settings.stages, STAGES),
        ("--start", settings.start or STARTS[0], STARTS),
        ("--attention", settings.attention, ATTENTION),
        ("--projections", settings.projections, PROJECTIONS),
    ):
        if value not in choices:
            raise ConfigError(f"{option}: found {value!r}; choose {', '.join(choices)}")
    for option, number in (
        ("--epochs-intermediate", settings.epochs_intermediate),
        ("--epochs-prediction", settings.epochs_prediction),
        ("--rate-intermediate", settings.rate_intermediate),
        ("--rate-prediction", settings.rate_prediction),
        ("--temperature", settings.temperature),
    ):
        if number <= 0:
            raise ConfigError(f"{option}: found {number:g}; write a number above 0")
    weights = settings.weights
    below = [name for name, value in asdict(weights).items() if value < 0]
    if below:
        raise ConfigError(f"--weights: {below[0]} is below 0; write 0 to leave it out")
    if weights.gold > 1:
        raise ConfigError(f"--weights: gold is a share of the prediction loss; found {weights.gold:g}, write 0 to 1")
    if "intermediate" in settings.epochs and not (weights.embedding or weights.attention or weights.hidden):
        raise ConfigError("--weights: every loss of the intermediate stage is 0; write --stages prediction")
