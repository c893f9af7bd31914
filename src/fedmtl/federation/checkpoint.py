"""States on disk: a tensor file and a JSON file per round, whole or absent.

A checkpoint is read as if anybody had written it: both files have a digest, the JSON is one of ours in every field, and
`check_state` compares the tensors with the model that is to go on with them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedmtl.errors import FedmtlError
from fedmtl.federation.messages import Progress, State
from fedmtl.foreign import excerpt, parse_json, parse_record, read_record
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.runs.folder import write_atomic
from fedmtl.sharing.plan import Extra, Key, PlanRecord, Weights, from_slots, is_personal, to_slots

REMEDY = "put back whole copies of its two files"

Round = Annotated[int, Field(ge=0, le=10**9)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _ProgressRecord(_Strict):
    scores: list[tuple[Round, Number | None]]
    best_round: Round | None
    best_score: Number | None
    stopped_round: Round | None


class _Record(_Strict):
    """The JSON file; `digest` is over all else that is in it, and older ones have none."""

    round: Round
    plan: PlanRecord
    progress: dict[str, _ProgressRecord]
    accepted: dict[str, Round]
    best_overall: tuple[Round, Number] | None
    # What methods know of earlier rounds, as plain values; each checks those it wrote (`check_state`).
    extra: dict[str, dict[str, Any]]
    sha256: Digest
    digest: Digest | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The last whole state of a folder, None where it has no checkpoint at all, and what is wrong with later ones."""

    state: State | None
    broken: tuple[str, ...] = ()


def save_checkpoint(folder: Path, state: State, *, keep_every: int = 0, keep: Collection[int] = ()) -> None:
    """Write the state; the JSON comes last, so a checkpoint without it does not count.

    The last two, the best by overall score, those to `keep` and every `keep_every`-th round stay, others are removed:
    clients keep what is theirs for two rounds, so a run whose last checkpoint breaks goes on from the one before.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors = folder / f"{_stem(state.round)}.safetensors"
    digest = save_tensors(tensors, {"weights": state.weights, **to_slots(state.extra)})
    record = {
        "round": state.round,
        "plan": state.plan.to_dict(),
        "progress": {task: asdict(progress) for task, progress in state.progress.items()},
        "accepted": dict(state.accepted),
        "best_overall": state.best_overall,
        "extra": {name: dict(extra.values) for name, extra in state.extra.items()},
        "sha256": digest,
    }
    record["digest"] = _digest(record)
    write_atomic(folder / f"{_stem(state.round)}.json", json.dumps(record, indent=1).encode())
    best = state.best_overall[0] if state.best_overall else None
    earlier = [number for number in saved_checkpoints(folder) if number < state.round]
    for number in earlier:
        if number not in (max(earlier), best, *keep) and not (keep_every and number % keep_every == 0):
            (folder / f"{_stem(number)}.json").unlink(missing_ok=True)
            (folder / f"{_stem(number)}.safetensors").unlink(missing_ok=True)


def load_checkpoint(folder: Path, round_number: int | None = None) -> State | None:
    """The state of that round, or of the last one; None where there is none. A broken one is an error."""
    if round_number is None:
        rounds = saved_checkpoints(folder)
        return _load(folder, max(rounds)) if rounds else None
    if not (folder / f"{_stem(round_number)}.json").exists():
        saved = ", ".join(map(str, saved_checkpoints(folder))) or "none"
        raise FedmtlError(f"{folder}: no checkpoint of round {round_number}; saved: {saved}")
    return _load(folder, round_number)


def last_whole_checkpoint(folder: Path) -> Checkpoint:
    """What a resume goes on from; where every checkpoint is broken, the last one's error."""
    broken: list[FedmtlError] = []
    for number in reversed(saved_checkpoints(folder)):
        try:
            return Checkpoint(_load(folder, number), tuple(map(str, broken)))
        except FedmtlError as error:
            broken.append(error)
    if broken:
        raise FedmtlError(
            f"{broken[0]}; no other checkpoint is whole: without copies, start a new run with its config.yaml"
        )
    return Checkpoint(None)


def check_state(
    state: State,
    names: Mapping[str, Tensor],
    tasks: Sequence[str],
    where: Path,
    checks: Mapping[str, Callable[[Extra], None]] | None = None,
) -> None:
    """Raise unless the state is one of this model: `names` are its parameters, `tasks` those of the config.

    `checks` are those of the methods that the config switches on; each raises for an extra that it did not write.
    """

    def refuse(what: str) -> FedmtlError:
        return FedmtlError(
            f"{where}: the checkpoint of round {state.round} is of another model or config ({excerpt(what)}); resume"
            " with the run's own config.yaml"
        )

    unknown = [task for task in (*state.progress, *state.plan.stopped) if task not in tasks]
    if unknown:
        raise refuse(f"it has a task {unknown[0]}")
    views = state.plan.keys(names, tasks, "").values()
    expected = {key for view in views for key in view.values() if not is_personal(key)}
    odd = sorted(expected ^ set(state.weights))
    if odd:
        raise refuse(f"{'it lacks' if odd[0] in expected else 'it has'} {odd[0].name} of scope {odd[0].scope}")
    for key, value in state.weights.items():
        problem = _misfit(key, value, names)
        if problem is not None:
            raise refuse(f"weights: {key.name} {problem}")
    for name, extra in state.extra.items():
        for slot, values in extra.tensors.items():
            for key, value in values.items():
                problem = "is in no slice" if key not in state.weights else None
                if problem is None and value.dtype != torch.bool:
                    problem = _misfit(key, value, names)
                elif problem is None and value.shape != state.weights[key].shape:
                    problem = f"has shape {tuple(value.shape)}, its weight {tuple(state.weights[key].shape)}"
                if problem is not None:
                    raise refuse(f"{name}.{slot}: {key.name} {problem}")
        if checks is None:
            continue
        if name not in checks:
            raise refuse(f"it has a state of {name}, which is not switched on")
        try:
            checks[name](extra)
        except (ValueError, TypeError, KeyError) as error:
            raise refuse(f"{name}: {next(iter(str(error).splitlines()), '')}") from None


def _misfit(key: Key, value: Tensor, names: Mapping[str, Tensor]) -> str | None:
    like = names.get(key.name)
    if like is None:
        return "is no parameter"
    if value.shape != like.shape or value.dtype != like.dtype:
        return f"has shape {tuple(value.shape)} of {value.dtype}, the model {tuple(like.shape)} of {like.dtype}"
    return None if bool(value.isfinite().all()) else "has a value that is not finite"


def _load(folder: Path, number: int) -> State:
    path, tensors = folder / f"{_stem(number)}.json", folder / f"{_stem(number)}.safetensors"
    record = _read(path, number)
    try:
        with tensors.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FedmtlError(f"{tensors}: cannot be read ({error.strerror}); {REMEDY}") from None
    if found != record.sha256:
        raise FedmtlError(f"{tensors}: is broken, its sha256 is not that of {path.name}; {REMEDY}")
    slots = load_tensors(tensors)
    if any(slot.startswith("best_head.") for slot in slots):
        raise FedmtlError(f"{tensors}: is of an earlier version, whose tasks stopped early otherwise; run it again")
    return _state(record, slots)


def _read(path: Path, number: int) -> _Record:
    text = read_record(path, REMEDY)
    raw = parse_json(text, str(path), REMEDY)
    record = parse_record(_Record, text, str(path), REMEDY)
    if record.digest is not None and record.digest != _digest({k: v for k, v in raw.items() if k != "digest"}):
        raise FedmtlError(f"{path}: is broken, its digest does not fit; {REMEDY}")
    # They are all of rounds that were over when it was written.
    rounds = [*record.accepted.values(), record.best_overall[0] if record.best_overall else 0]
    for progress in record.progress.values():
        rounds += [at for at, _ in progress.scores]
        rounds += [at for at in (progress.best_round, progress.stopped_round) if at is not None]
    if not record.plan.has_its_groups:
        raise FedmtlError(f"{path}: has a rule of groups that it does not have; {REMEDY}")
    if record.round != number or max(rounds) > number:
        raise FedmtlError(f"{path}: is not of round {number}; {REMEDY}")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _state(record: _Record, slots: dict[str, Weights]) -> State:
    return State(
        round=record.round,
        # Where all values stay at the clients, no tensor was saved.
        weights=slots.get("weights", {}),
        plan=record.plan.to_plan(),
        progress={
            task: Progress(tuple(saved.scores), saved.best_round, saved.best_score, saved.stopped_round)
            for task, saved in record.progress.items()
        },
        accepted=record.accepted,
        best_overall=record.best_overall,
        extra=from_slots(slots, record.extra),
    )


def saved_checkpoints(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, in their order."""
    names = (re.fullmatch(r"round-(\d{4,9})", path.stem) for path in folder.glob("round-*.json"))
    return sorted(int(match[1]) for match in names if match)


def _stem(number: int) -> str:
    return f"round-{number:04d}"
