"""States on disk: a tensor file and a JSON file per round, whole or absent."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.federation.messages import LayerTrack, Progress, State
from fedmtl.model.plan import SharingPlan
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.runs import write_atomic

BEST = "best_head."
OPTIMIZER = "optimizer."
PRUNED = "pruned"


def save_checkpoint(folder: Path, state: State, *, keep_every: int = 0) -> None:
    """Write the state; the JSON comes last, so a checkpoint without it does not count.

    The last, the best by overall score and every `keep_every`-th round are kept, others removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"{_stem(state.round)}.safetensors"
    slots = {
        "weights": state.weights,
        **{OPTIMIZER + slot: values for slot, values in state.server_optimizer.items()},
        **{BEST + task: progress.best_head for task, progress in state.progress.items()},
        PRUNED: state.pruned,
    }
    digest = save_tensors(tensors, slots)
    record = {
        "round": state.round,
        "plan": state.plan.to_dict(),
        "progress": {task: _progress_to_dict(progress) for task, progress in state.progress.items()},
        "accepted": dict(state.accepted),
        "best_overall": state.best_overall,
        "sharing": {layer: asdict(track) for layer, track in state.sharing.items()},
        "norms": dict(state.norms),
        "sha256": digest,
    }
    write_atomic(folder / f"{_stem(state.round)}.json", json.dumps(record, indent=1).encode())
    best = state.best_overall[0] if state.best_overall else None
    for number in _rounds(folder):
        if number < state.round and number != best and not (keep_every and number % keep_every == 0):
            (folder / f"{_stem(number)}.json").unlink(missing_ok=True)
            (folder / f"{_stem(number)}.safetensors").unlink(missing_ok=True)


def load_checkpoint(folder: Path, round_number: int | None = None) -> State | None:
    """The state of that round, or the last whole one; None where there is none.

    A last checkpoint whose tensors do not fit their digest was interrupted: the one before it counts.
    """
    candidates = [round_number] if round_number is not None else sorted(_rounds(folder), reverse=True)
    for number in candidates:
        record_path, tensors = folder / f"{_stem(number)}.json", folder / f"{_stem(number)}.safetensors"
        if record_path.exists() and tensors.exists():
            record = json.loads(record_path.read_text())
            if hashlib.sha256(tensors.read_bytes()).hexdigest() == record["sha256"]:
                return _state(record, load_tensors(tensors))
    if round_number is not None:
        kept = ", ".join(map(str, sorted(_rounds(folder)))) or "none"
        raise FedmtlError(f"{folder}: no checkpoint of round {round_number}; kept: {kept}")
    return None


def _state(record: dict[str, Any], slots: dict[str, Any]) -> State:
    return State(
        round=record["round"],
        # Where all values stay at the clients, no tensor was saved.
        weights=slots.get("weights", {}),
        plan=SharingPlan.from_dict(record["plan"]),
        server_optimizer={
            slot.removeprefix(OPTIMIZER): values for slot, values in slots.items() if slot.startswith(OPTIMIZER)
        },
        progress={
            task: Progress(
                **{
                    **values,
                    "scores": tuple((number, score) for number, score in values["scores"]),
                    "best_head": slots.get(BEST + task, {}),
                }
            )
            for task, values in record["progress"].items()
        },
        accepted=record["accepted"],
        best_overall=tuple(record["best_overall"]) if record["best_overall"] else None,
        # Checkpoints of before layers could move have none.
        sharing={layer: LayerTrack(**track) for layer, track in record.get("sharing", {}).items()},
        pruned=slots.get(PRUNED, {}),
        norms=record.get("norms", {}),
    )


def _progress_to_dict(progress: Progress) -> dict[str, Any]:
    values = asdict(Progress(progress.scores, progress.best_round, progress.best_score, {}, progress.stopped_round))
    del values["best_head"]
    return values


def _rounds(folder: Path) -> list[int]:
    return [int(match[1]) for path in folder.glob("round-*.json") if (match := re.fullmatch(r"round-(\d+)", path.stem))]


def _stem(number: int) -> str:
    return f"round-{number:04d}"
