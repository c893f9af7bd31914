"""How texts are augmented; the numbers are TinyBERT's (Jiao et al. 2020, algorithm 1 and appendix)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedmtl.errors import ConfigError

KINDS = ("mlm", "glove", "wordnet")
# N of the paper's code.
COPIES: Mapping[str, int] = {
    "cola": 30, "mrpc": 30, "rte": 30, "stsb": 30, "sst2": 20, "qnli": 20, "qqp": 10, "mnli": 10,
}  # fmt: skip
OTHER_COPIES = 20


@dataclass(frozen=True)
class AugmentSettings:
    """How examples are augmented; without a source there are no copies.

    `probability` and `candidates` are the paper's p and M; `copies` its N by task, `""` for those not named;
    `most` bounds the copies of all tasks together.
    """

    sources: tuple[str, ...] = ()
    probability: float = 0.4
    candidates: int = 15
    copies: Mapping[str, int] = field(default_factory=dict)
    most: int = 2_000_000

    def copies_of(self, task: str) -> int:
        return self.copies.get(task, self.copies.get("", COPIES.get(task, OTHER_COPIES)))


def parse_copies(text: str) -> dict[str, int]:
    """`30` for all tasks, or `cola=30,sst2=20`; the two may be mixed."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        task, _, number = part.rpartition("=")
        if not number.strip().isdigit():
            raise ConfigError(f"--copies: {part!r} has no whole number; write 30, or such as cola=30,sst2=20")
        found[task.strip()] = int(number)
    return found


def check_augment(settings: AugmentSettings) -> None:
    """Raise a ConfigError for what cannot be."""
    for source in settings.sources:
        kind, _, file = source.partition(":")
        if kind not in KINDS or (kind != "mlm" and not file):
            raise ConfigError(f"--augment: found {source!r}; write mlm, mlm:FOLDER, glove:FILE or wordnet:FILE")
    if not 0 <= settings.probability <= 1:
        raise ConfigError(f"--probability: found {settings.probability:g}; write a number from 0 to 1")
    if settings.candidates < 1:
        raise ConfigError(f"--candidates: found {settings.candidates}; write 1 or more")
    if settings.most < 1:
        raise ConfigError(f"--most-copies: found {settings.most}; write 1 or more")
