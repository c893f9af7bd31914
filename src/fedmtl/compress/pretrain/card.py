"""The model card: where the encoder comes from, what it saw, how to make it again, and what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmtl.compress.pretrain.corpus import SourceCount
from fedmtl.compress.pretrain.settings import TEACHER
from fedmtl.errors import DataError
from fedmtl.runs.folder import write_atomic

CARD = "README.md"
HEADING = "## Measured"
NOTHING_MEASURED = "Nothing yet. `fedmtl pretrain --out FOLDER --measured FILE.json` fills this in."


@dataclass(frozen=True)
class Facts:
    """What a card says, besides what was measured."""

    name: str
    teacher: str
    teacher_license: str | None
    notes: tuple[str, ...]
    command: str
    settings: Mapping[str, Any]
    num_parameters: int
    num_pieces: int
    hidden_map: Sequence[int]
    sources: Sequence[SourceCount]
    num_segments: int
    num_skipped: int
    steps: int
    seconds: float
    segments_seen: int
    device: str
    final_losses: Mapping[str, float]


def write_card(facts: Facts, measured: Path | None) -> str:
    settings = facts.settings
    shape = f"{settings['layers']} layers, {settings['hidden']} wide, {settings['heads']} heads"
    # Only what went in and came out; how the losses work stands in the package's documentation.
    return "\n\n".join(
        [
            "---\nlibrary_name: transformers\ntags: [fedmtl, distillation]\n---",
            f"# {facts.name}",
            f"A small encoder ({shape}, {facts.num_parameters:,} parameters, {facts.num_pieces:,} word pieces "
            f"{_owner(facts)}), distilled by `fedmtl pretrain` from {facts.teacher}. Load it with "
            "`AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained`; a sentence's vector is the mean over its "
            "tokens. There is no pooler: where transformers makes one, it is untrained. Weights are float16.",
            f"## Teacher\n\n{_teacher(facts)}",
            f"## Texts\n\n{_texts(facts)}",
            f"## Training\n\n{_training(facts)}",
            f"{HEADING}\n\n{_measured(measured) if measured else NOTHING_MEASURED}\n",
        ]
    )


def update_card(folder: Path, measured: Path) -> None:
    """Replace what a card says was measured, and nothing else."""
    path = folder / CARD
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: no such card; give the --out of an earlier `fedmtl pretrain`") from error
    if HEADING not in before:
        raise DataError(f"{path}: has no heading `{HEADING}`; add one where the numbers belong")
    text = _measured(measured)
    after = re.sub(rf"(?ms)^{HEADING}$.*?(?=^## |\Z)", lambda _: f"{HEADING}\n\n{text}\n", before)
    write_atomic(path, after.encode())


def _owner(facts: Facts) -> str:
    return "of its teacher's tokenizer" if facts.settings["vocab"] == TEACHER else "of its own, uncased"


def _teacher(facts: Facts) -> str:
    terms = f"Its licence: {facts.teacher_license}." if facts.teacher_license else "Its licence was not given."
    return "\n\n".join([f"{facts.teacher}. {terms}", *facts.notes])


def _texts(facts: Facts) -> str:
    rows = [["file", "columns", "texts", "chunks used"]]
    rows += [[s.file, ", ".join(s.columns) or "lines", f"{s.texts:,}", f"{s.chunks:,}"] for s in facts.sources]
    skipped = f"{facts.num_skipped:,} were left out: the teacher's words are not the student's."
    return f"{_table(rows)}\n\n{facts.num_segments:,} chunks were used; {skipped}"


def _training(facts: Facts) -> str:
    losses = ", ".join(f"{name} {value:.4g}" for name, value in facts.final_losses.items())
    settings = {name: value for name, value in facts.settings.items() if name not in ("teacher", "corpus")}
    return (
        f"```sh\n{facts.command}\n```\n\n"
        f"Seed {facts.settings['seed']}; {facts.steps:,} steps, {facts.segments_seen:,} segments seen, "
        f"{facts.seconds / 60:.1f} minutes on {facts.device}. Last mean losses: {losses}.\n\n"
        f"{_layers(facts)}\n\n"
        f"```json\n{json.dumps(settings)}\n```"
    )


def _layers(facts: Facts) -> str:
    """The layer map in words; with the teacher's vocabulary, how the second stage goes on with it."""
    states = ", ".join(map(str, facts.hidden_map))
    words = f"Its hidden states, embeddings first, were compared with the teacher's {states}."
    if facts.settings["vocab"] != TEACHER:
        return words
    return (
        f"{words} `fedmtl distill RUN --student FOLDER` goes on with this map for a RUN whose encoder was this teacher."
    )


def _measured(path: Path) -> str:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
        names = list(dict.fromkeys(name for row in rows for name in row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'--measured: {path} is not what is wanted; write {{"measured": [{{"task": "stsb", "mean": 0.84}}, ...]}}'
        ) from error
    if not names:
        raise DataError(f"--measured: {path} has no rows; run benchmarks/encoder.py first")
    return _table([names, *([_shown(row.get(name)) for name in names] for row in rows)])


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
