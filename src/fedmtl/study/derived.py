"""Cells that are made of another cell: a student it teaches, or what is left of it when weights are taken out."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.config.file import load_config
from fedmtl.runs.folder import RunFolder, read_events, write_atomic
from fedmtl.runs.summary import summarize
from fedmtl.study.folder import StudyFolder, first_difference

if TYPE_CHECKING:
    from fedmtl.compress.distill.loop import Update


@dataclass(frozen=True)
class Distillation:
    """A student of the run `of`: a cell's name, or any run's whole path; `overrides` change its config."""

    of: str
    settings: DistillSettings
    overrides: tuple[str, ...] = ()

    @property
    def num_rounds(self) -> int:
        return sum(self.settings.epochs.values())

    def to_json(self) -> dict[str, Any]:
        return {"distilled": self.of, "settings": self.settings.to_json(), "overrides": list(self.overrides)}


@dataclass(frozen=True)
class Pruning:
    """The run `of` with weights taken out, trained for so many epochs more."""

    of: str
    cut: Cut
    epochs: int
    overrides: tuple[str, ...] = ()

    @property
    def num_rounds(self) -> int:
        return self.epochs

    def to_json(self) -> dict[str, Any]:
        return {"pruned": self.of, "cut": asdict(self.cut), "epochs": self.epochs, "overrides": list(self.overrides)}


Derivation = Distillation | Pruning


def source_of(derivation: Derivation, cells: Path) -> RunFolder:
    """The run it is made of; a whole path stays what it is."""
    return RunFolder(cells / derivation.of)


def derive(derivation: Derivation, cells: Path, name: str, *, is_alone: bool) -> None:
    """Make the run of that name in the folder of cells, or go on with it where it was begun."""
    run, source = RunFolder(cells / name), source_of(derivation, cells)
    if not run.events.exists():
        shutil.rmtree(run.path, ignore_errors=True)  # Killed before it had begun.
    if isinstance(derivation, Distillation):
        _distill(derivation, source, run, is_alone)
    else:
        _prune(derivation, source, run, is_alone)


class _Log:
    """Says into the cell's log what a person would see."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def update(self, update: Update) -> None:
        pass


def _distill(asked: Distillation, source: RunFolder, run: RunFolder, is_alone: bool) -> None:
    from fedmtl.compress.distill.run import distill
    from fedmtl.report.page import write_report

    config = load_config(source.config, [*asked.overrides, *_shared(is_alone)])
    config = config.model_copy(update={"output": str(run.path.parent)})
    distill(source, config, asked.settings, run.name, _Log(), resume=run.events.exists())
    write_report(run.path)


def _prune(asked: Pruning, source: RunFolder, run: RunFolder, is_alone: bool) -> None:
    from fedmtl.compress.prune import prune_run
    from fedmtl.experiment.run import resume_run, start_run

    if run.events.exists():
        resume_run(run)
        return
    overrides = [*asked.overrides, *_shared(is_alone), f"output={run.path.parent}"]
    start_run(prune_run(source, asked.cut, asked.epochs, overrides).config, run.name)


def _shared(is_alone: bool) -> list[str]:
    """One process a cell where cells beside it use the other cores."""
    return [] if is_alone else ["compute.workers=0"]


def note_making(folder: StudyFolder, name: str, derivation: Derivation) -> None:
    """Write down how a cell is made, in the study's folder."""
    write_atomic(_place(folder, name), json.dumps(_note(folder, derivation), indent=1).encode())


def find_other_making(folder: StudyFolder, name: str, derivation: Derivation) -> str | None:
    """How a cell that is there was made otherwise than is asked now, in words; None where it was not."""
    place, asked = _place(folder, name), _note(folder, derivation)
    noted = json.loads(place.read_text()) if place.exists() else {}
    # A source that was removed says nothing until it is there again.
    return first_difference(noted, {**asked, "source": asked["source"] or noted.get("source")})


def _place(folder: StudyFolder, name: str) -> Path:
    return folder.made / f"{name}.json"


def _note(folder: StudyFolder, derivation: Derivation) -> dict[str, Any]:
    # Tuples are lists in a file.
    told: dict[str, Any] = json.loads(json.dumps(derivation.to_json()))
    source = summarize(read_events(source_of(derivation, folder.cells)))
    return {**told, "source": source.weights_sha256}
