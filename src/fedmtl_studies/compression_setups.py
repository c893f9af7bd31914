"""The study of compression: every setup, and which table shows it.

It rebuilds "Reproducing TinyBERT" (group 13: A. Chen, A. Martinovic, P. von Hirschhausen, L. Hrgic), slides on
Jiao et al. 2020, TinyBERT: Distilling BERT for Natural Language Understanding. Where we differ:

* One multi-task teacher and multi-task students; a teacher and a student for each task are a table of their own.
* Students have 3 layers of the teacher's width, or 2 layers and a width of 128; theirs had 4 layers and 312.
* Labels alone and the prediction stage alone get as many passes as both stages together, in rows of their own.
* Pruning stands beside the same model trained for as many epochs more, uncut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedmtl_studies.library import Cut, DistillSettings, LossWeights

MAPS = ("uniform", "top", "bottom")
STARTS = ("teacher", "random")
AMOUNTS = (0.2, 0.4, 0.6)
NEURONS = (0.25, 0.5)
WHOLE = "whole"
AUGMENTED = "-augmented"
TEACHER = "teacher"


@dataclass(frozen=True)
class Shape:
    """Layers and width of an encoder."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"


@dataclass(frozen=True)
class Shapes:
    """The teacher's shape and its students': of its width with 3 layers, and 2x128; less where the teacher is small."""

    teacher: Shape

    @property
    def large(self) -> Shape:
        return Shape(3 if self.teacher.layers > 3 else max(1, self.teacher.layers - 1), self.teacher.width)

    @property
    def small(self) -> Shape:
        fits = self.teacher.layers > 2 and self.teacher.width > 128
        return Shape(2, 128) if fits else Shape(1, self.teacher.width // 2)

    @property
    def layers_off(self) -> tuple[int, ...]:
        """The numbers of layers that pruning takes off, one setup each."""
        return tuple(number for number in (2, 3) if number < self.teacher.layers) or (1,)


@dataclass(frozen=True)
class Setup:
    """One kind of cell: a run of the base, or of `only` one of its tasks; a student or a cut of the setup `of`.

    With `of` and neither it is a run that goes on with that one's values.
    """

    words: str
    of: str | None = None
    student: DistillSettings | None = None
    cut: Cut | None = None
    only: str | None = None


def large_name(shapes: Shapes, layer_map: str = "uniform", start: str = "teacher") -> str:
    """Return the name of the setup of the larger student; without more, the one that other tables compare with."""
    return f"{shapes.large}-{layer_map}-{start}"


def setups(shapes: Shapes, tasks: Sequence[str], common: DistillSettings) -> dict[str, Setup]:
    """Return every setup by its name, after the one it is made of; `common` has the passes, rates and sources.

    Without a source of other words there is no setup with augmentation.
    """
    return {
        TEACHER: Setup("teacher"),
        **_students(shapes, common),
        **_stages(shapes, common),
        **_pruned(shapes),
        **_single(shapes, tasks, common),
    }


def _student(words: str, common: DistillSettings, student: str, of: str = TEACHER, **more: Any) -> Setup:
    plain = replace(common.augment, sources=())
    return Setup(words, of, replace(common, **{"augment": plain, "student": student, **more}))


def _students(shapes: Shapes, common: DistillSettings) -> dict[str, Setup]:
    large, small = str(shapes.large), str(shapes.small)
    found = {
        large_name(shapes, layer_map, start): _student(
            f"{large}, {layer_map}, from {'its layers' if start == 'teacher' else 'random'}",
            common, large, layer_map=layer_map, start=start,
        )
        for start in STARTS
        for layer_map in MAPS
    }  # fmt: skip
    found |= {
        f"{small}-{layer_map}": _student(f"{small}, {layer_map}", common, small, layer_map=layer_map, start="random")
        for layer_map in MAPS
    }
    if common.augment.sources:
        found |= {f"{name}{AUGMENTED}": _with_copies(setup, common) for name, setup in found.items()}
    return found | {"tiny": _student("tiny, prediction alone", common, "tiny", stages="prediction")}


def _with_copies(setup: Setup, common: DistillSettings) -> Setup:
    assert setup.student is not None
    return replace(setup, words=f"{setup.words}, augmented", student=replace(setup.student, augment=common.augment))


def _stages(shapes: Shapes, common: DistillSettings) -> dict[str, Setup]:
    """Return the larger student from the teacher's layers, without the intermediate stage, and without a teacher."""
    passes = sum(common.epochs.values())
    found: dict[str, Setup] = {}
    for name, words, gold in (("labels", "labels alone", 1.0), ("prediction", "prediction alone", 0.0)):
        weights = LossWeights(gold=gold)
        for suffix, number in (("", common.epochs_prediction), ("-long", passes)):
            changes: dict[str, Any] = {
                "stages": "prediction",
                "start": "teacher",
                "weights": weights,
                "epochs_prediction": number,
            }
            found[f"{shapes.large}-{name}{suffix}"] = _student(
                f"{shapes.large}, {words}, passes: {number}", common, str(shapes.large), **changes
            )
    return found


def _pruned(shapes: Shapes) -> dict[str, Setup]:
    cuts = {f"prune-{amount * 100:.0f}": (f"{amount:.0%} of linear weights", Cut(amount=amount)) for amount in AMOUNTS}
    cuts |= {f"ffn-{share * 100:.0f}": (f"{share:.0%} of feed-forward neurons", Cut(ffn=share)) for share in NEURONS}
    cuts |= {"heads-50": ("50% of attention heads", Cut(heads=0.5))}
    cuts |= {
        f"layers-{number}": (f"{number} {'layer' if number == 1 else 'layers'} off the top", Cut(layers=number))
        for number in shapes.layers_off
    }
    return {
        WHOLE: Setup("nothing taken out, trained as long", TEACHER),
        **{name: Setup(words, TEACHER, cut=cut) for name, (words, cut) in cuts.items()},
    }


def _single(shapes: Shapes, tasks: Sequence[str], common: DistillSettings) -> dict[str, Setup]:
    found: dict[str, Setup] = {}
    for task in tasks:
        found[f"single-{task}"] = Setup(f"{task} alone", only=task)
        found[f"single-{task}-{shapes.large}"] = _student(
            f"{shapes.large} of {task} alone", common, str(shapes.large), f"single-{task}", start="teacher"
        )
    return found


def rows(every: Mapping[str, Setup], shapes: Shapes) -> dict[int, list[str]]:
    """Return which setups each table shows, in its order."""
    students = [name for name, setup in every.items() if setup.student is not None and setup.of == TEACHER]
    compared = large_name(shapes)
    staged = [f"{shapes.large}-{part}{suffix}" for part in ("labels", "prediction") for suffix in ("", "-long")]
    whole = [name for name in students if name not in staged]
    plain = [name for name in whole if not name.endswith(AUGMENTED)]
    pairs = [part for name in plain for part in (name, f"{name}{AUGMENTED}") if f"{name}{AUGMENTED}" in every]
    return {
        1: [TEACHER, *whole],
        2: [
            TEACHER,
            compared,
            f"{shapes.small}-uniform",
            "prune-20",
            "ffn-50",
            "heads-50",
            f"layers-{shapes.layers_off[0]}",
        ],
        3: [name for name in plain if name != "tiny"],
        4: pairs,
        5: [name for name, setup in every.items() if name == WHOLE or setup.cut is not None],
        6: [*staged, compared],
        7: [name for name in every if name.startswith("single-")],
    }
