"""Jobs and Updates as frames."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import ConfigError, WireError
from fedmtl.federation.messages import Codecs, Job, JobKind, Update
from fedmtl.federation.wire.codecs import CODES, Bytes, Coded, CodedTensors, decode, encode, encode_rows, encode_tensors
from fedmtl.federation.wire.frame import (
    MAX_BYTES,
    Memory,
    brief,
    claimed_bytes,
    fresh_memory,
    is_name,
    pack,
    read_frame,
)
from fedmtl.sharing.plan import Extra, Key, SharingPlan

ROWS = Key("", "rows")
# Not in the header, which is deflated: equal runs have messages of equal size.
SECONDS = Key("", "seconds")
# In front of the scope of a capability's tensor: `extra/<name>/<slot>/`, and for masks, eight to a byte, `bits/...`.
EXTRA, BITS = "extra/", "bits/"
MOST_EXTRAS, MOST_MASKS = 100, 8
MOST_EXAMPLES = 1 << 53
MOST_SEED = 1 << 64
MOST_ROUND = 1 << 31
# What an event may say (runs/events.py).
MOST_SECONDS, MOST_NUMBER = 1e15, 1e100
MOST_TASKS = 1000
DIGEST = re.compile(r"[0-9a-f]{16}")
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
BROKEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def encode_job(job: Job, max_bytes: int = MAX_BYTES, memory: Memory = fresh_memory) -> Bytes:
    """The job's weights under `job.codecs.down`; fixed values are sent once, named by their digest, and stay exact."""
    header = {
        "type": "job",
        "kind": job.kind,
        "round": job.round,
        "client": job.client,
        "tasks": list(job.tasks),
        "plan": job.plan.to_dict(),
        "seed": job.seed,
        "state_round": job.state_round,
        "settings": dict(job.settings),
        "fixed": dict(job.fixed),
        "codecs": asdict(job.codecs),
        "extra": {name: dict(extra.values) for name, extra in job.extra.items()},
    }
    weights = encode_tensors(job.weights, lambda key: "fp32" if key.scope == "fixed" else job.codecs.down)
    tensors = {**_rows(job.rows), **_extra_tensors(job.extra), **weights.coded}
    return pack(header, CodedTensors(tensors), max_bytes, memory)


def decode_job(data: Any, max_bytes: int = MAX_BYTES) -> Job:
    header, tensors = read_frame(data, max_bytes)
    coded = dict(tensors.coded)
    rows = _take_rows(coded)
    extra = _take_extra(coded)
    try:
        _expect(header, "job")
        return Job(
            _kind(header["kind"]),
            _whole(header["round"]),
            _addressee(header["client"]),
            _words(header["tasks"]),
            dict(CodedTensors(coded)),
            SharingPlan.from_dict(header["plan"]),
            rows,
            _whole(header["seed"], "seed", MOST_SEED),
            _whole(header["state_round"]),
            _settings(header["settings"]),
            _digests(header["fixed"]),
            _codecs(header["codecs"]),
            _extras(header["extra"], extra, coded),
        )
    except (*BROKEN, ConfigError) as error:
        raise WireError(f"a job's header is not whole: {brief(error)}") from error


def encode_delta(delta: Mapping[Key, Tensor], codecs: Codecs) -> Mapping[Key, Tensor]:
    """A client's delta under `codecs.up`; one that is encoded already, or is to stay exact, is left as it is."""
    return delta if codecs.up == "fp32" else encode_tensors(delta, lambda key: codecs.up, codecs.topk_share)


def encode_update(update: Update, max_bytes: int = MAX_BYTES, memory: Memory = fresh_memory) -> Bytes:
    """The delta as the client encoded it, or exactly."""
    header = {
        "type": "update",
        "round": update.round,
        "client": update.client,
        "tasks": list(update.tasks),
        "num_examples": dict(update.num_examples),
        "losses": dict(update.losses),
        "sums": dict(update.sums),
        "seen": dict(update.seen),
        "extra": {name: dict(extra.values) for name, extra in update.extra.items()},
    }
    seconds = encode(torch.tensor([update.traffic.seconds], dtype=torch.float64), "fp32")
    delta = encode_tensors(update.delta)
    tensors = {SECONDS: seconds, **_rows(update.rows), **_extra_tensors(update.extra), **delta.coded}
    return pack(header, CodedTensors(tensors), max_bytes, memory)


def decode_update(data: Any, max_bytes: int = MAX_BYTES, max_tensor_bytes: int | None = None) -> tuple[Update, float]:
    """The update, and the seconds its client says it worked. Its delta is decoded when it is looked at.

    `max_tensor_bytes` bounds the delta once it is decoded; an answer has no more than its job (`answer_bytes`).
    """
    header, tensors = read_frame(data, max_bytes, max_tensor_bytes)
    coded = dict(tensors.coded)
    rows = _take_rows(coded)
    extra = _take_extra(coded)
    try:
        _expect(header, "update")
        seconds = float(decode(coded.pop(SECONDS)))
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"{seconds} seconds")
        update = Update(
            _whole(header["round"]),
            _name(header["client"]),
            _words(header["tasks"]),
            CodedTensors(coded),
            rows,
            {task: _count(count) for task, count in header["num_examples"].items()},
            _losses(header["losses"], header["num_examples"]),
            _sums(header["sums"]),
            seen=_seen(header["seen"], header["num_examples"]),
            # No client sends masks.
            extra=_extras(header["extra"], extra, {}),
        )
    except (*BROKEN, RuntimeError) as error:
        raise WireError(f"an update's header is not whole: {brief(error)}") from error
    return update, seconds


def answer_bytes(job: Job) -> int:
    """The most that the answer's tensors can take when decoded: each method may send as much as the weights are."""
    rows = 0 if job.rows is None else job.rows.nbytes
    weights = (claimed_bytes(tuple(weight.shape), CODES[weight.dtype]) for weight in job.weights.values())
    return sum(weights) * (1 + len(job.settings.get("methods", ()))) + rows + 8


def _rows(rows: np.ndarray | None) -> dict[Key, Coded]:
    return {} if rows is None else {ROWS: encode_rows(rows)}


def _take_rows(coded: dict[Key, Coded]) -> np.ndarray | None:
    rows = coded.pop(ROWS, None)
    if rows is not None and rows.codec != "rows":
        raise WireError("the token rows are not a list of rows")
    return None if rows is None else decode(rows).numpy()


def _extra_tensors(extras: Mapping[str, Extra]) -> dict[Key, Coded]:
    """The tensors of all capabilities, exact; masks eight to a byte."""
    coded = {}
    for name, extra in extras.items():
        for slot, values in extra.tensors.items():
            for key, value in values.items():
                if value.dtype == torch.bool:
                    packed = torch.from_numpy(np.packbits(value.numpy()))
                    coded[Key(f"{BITS}{name}/{slot}/{key.scope}", key.name)] = encode(packed, "fp32")
                else:
                    coded[Key(f"{EXTRA}{name}/{slot}/{key.scope}", key.name)] = encode(value, "fp32")
    return coded


def _take_extra(coded: dict[Key, Coded]) -> dict[Key, Coded]:
    """The coded tensors of capabilities, taken out of a message's."""
    return {key: coded.pop(key) for key in list(coded) if key.scope.startswith((EXTRA, BITS))}


def _extras(values: Any, tensors: Mapping[Key, Coded], weights: Mapping[Key, Coded]) -> dict[str, Extra]:
    """What a message has of every capability.

    A tensor without a name in the header, or a mask of no weight, is refused.
    """
    if not _is_object(values) or len(values) > MOST_EXTRAS or not all(map(_is_plain_name, values)):
        raise ValueError("its extras are not values by capability")
    if not all(map(_is_object, values.values())):
        raise ValueError("an extra's values have no names")
    slots: dict[str, dict[str, dict[Key, Coded]]] = {name: {} for name in values}
    masks: dict[str, dict[str, dict[Key, Tensor]]] = {name: {} for name in values}
    for placed, coded in tensors.items():
        kind, name, slot, scope = placed.scope.split("/", 3)
        key = Key(scope, placed.name)
        if not _is_plain_name(slot) or slot in (masks if kind + "/" == EXTRA else slots)[name]:
            raise ValueError("an extra's tensors have no slot of their own")
        if kind + "/" == EXTRA:
            slots[name].setdefault(slot, {})[key] = coded
            continue
        masks[name].setdefault(slot, {})[key] = _mask(coded, weights[key])
        # A mask takes eight times the bytes that it travels in.
        if sum(map(len, masks.values())) > MOST_MASKS:
            raise ValueError("more masks than any capability sends")
    return {
        name: Extra(plain, {**{slot: CodedTensors(by_key) for slot, by_key in slots[name].items()}, **masks[name]})
        for name, plain in values.items()
    }


def _mask(coded: Coded, weight: Coded) -> Tensor:
    """A mask of a weight's shape."""
    packed = decode(coded)
    if packed.dtype != torch.uint8 or packed.numel() != -(-weight.size // 8):
        raise ValueError("a mask that does not fit its weight")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=weight.size).astype(bool)).view(weight.shape)


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > MOST_TASKS or not all(map(_is_plain_name, values)):
        raise ValueError("not a list of names")
    return tuple(values)


def _name(value: Any) -> str:
    if not _is_plain_name(value):
        raise ValueError("not a name")
    return str(value)


def _is_plain_name(value: Any) -> bool:
    """Whether a client or a task may be called so: it will stand in file names, on terminals and in pages."""
    return is_name(value) and PLAIN_NAME.fullmatch(value) is not None


def _losses(losses: Mapping[str, Any], tasks: Collection[str]) -> dict[str, float]:
    if not set(losses) <= set(tasks):
        raise ValueError("a loss without examples")
    return {task: _number(loss) for task, loss in losses.items()}


def _number(value: Any) -> float:
    """A number that events can hold, or one that is none, as the loss of a model that diverged."""
    if type(value) not in (int, float) or (math.isfinite(value) and abs(value) > MOST_NUMBER):
        raise ValueError("not a number")
    return float(value)


def _sums(values: Any) -> dict[str, Mapping[str, Any]]:
    """The sums of each task; what is in them is checked against the task (`tasks/metrics.py`)."""
    if not _is_object(values) or not all(map(_is_object, values.values())):
        raise ValueError("its sums are not those of tasks")
    return dict(values)


def _kind(value: Any) -> JobKind:
    found: JobKind | None = next((kind for kind in get_args(JobKind) if kind == value), None)
    if found is None:
        raise ValueError(f"a job of another kind than {', '.join(get_args(JobKind))}")
    return found


def _addressee(value: Any) -> str:
    """Whom a job is for: any name, which the client compares with its name."""
    if not is_name(value):
        raise ValueError("not a name")
    return str(value)


def _settings(values: Any) -> dict[str, Any]:
    if not _is_object(values) or not all(map(is_name, values)):
        raise ValueError("its settings are not values by name")
    return dict(values)


def _digests(values: Any) -> dict[str, str]:
    """The digest of each fixed value; a site names files by them."""
    if not _is_object(values) or not all(map(is_name, values)):
        raise ValueError("its fixed values are not digests by name")
    if not all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in values.values()):
        raise ValueError("a fixed value's digest is not 16 hexadecimal digits")
    return dict(values)


def _codecs(values: Any) -> Codecs:
    codecs = Codecs(**{field.name: values[field.name] for field in fields(Codecs)})
    are_known = codecs.down in ("fp32", "fp16", "int8") and codecs.up in ("fp32", "fp16", "int8", "topk")
    if not are_known or not 0 < _number(codecs.topk_share) <= 1 or type(codecs.error_feedback) is not bool:
        raise ValueError("not codecs of ours")
    return codecs


def _is_object(value: Any) -> bool:
    """Whether it is an object of JSON."""
    return isinstance(value, dict)


def _seen(seen: Mapping[str, Any], tasks: Collection[str]) -> dict[str, int]:
    if not set(seen) <= set(tasks):
        raise ValueError("a task was seen without examples")
    return {task: _count(count) for task, count in seen.items()}


def _count(value: Any) -> int:
    return _whole(value, "count of examples", MOST_EXAMPLES)


def _whole(value: Any, what: str = "round", end: int = MOST_ROUND) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"not a {what}")
    return value


def _expect(header: Mapping[str, Any], kind: str) -> None:
    if header["type"] != kind:
        raise ValueError(f"a message of another type came where {kind} is due")
