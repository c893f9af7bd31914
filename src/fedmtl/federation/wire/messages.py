"""Jobs and Updates as frames."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import ConfigError, WireError
from fedmtl.federation.messages import Codecs, Job, Update
from fedmtl.federation.wire.codecs import CODES, Coded, CodedTensors, decode, encode, encode_rows, encode_tensors
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
from fedmtl.federation.wire.indices import Bytes
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan

ROWS = Key("", "rows")
# Not in the header, which is deflated: equal runs have messages of equal size.
SECONDS = Key("", "seconds")
# In front of the scope of a weight, for which of its entries stay zero.
PRUNED = "pruned/"
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
    }
    weights = encode_tensors(job.weights, lambda key: "fp32" if key.scope == "fixed" else job.codecs.down)
    tensors = {**_rows(job.rows), **_bits(job.pruned), **weights.coded}
    return pack(header, CodedTensors(tensors), max_bytes, memory)


def decode_job(data: Any, max_bytes: int = MAX_BYTES) -> Job:
    header, tensors = read_frame(data, max_bytes)
    coded = dict(tensors.coded)
    rows = _take_rows(coded)
    bits = {key: coded.pop(key) for key in list(coded) if key.scope.startswith(PRUNED)}
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
            _from_bits(bits, coded),
        )
    except (*BROKEN, ConfigError) as error:
        raise WireError(f"a job's header is not whole: {brief(error)}") from error


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
        "conflicts": update.conflicts,
    }
    if update.inner_products:
        header["inner_products"] = {layer: [list(row) for row in own] for layer, own in update.inner_products.items()}
    seconds = encode(torch.tensor([update.traffic.seconds], dtype=torch.float64), "fp32")
    delta = encode_tensors(update.delta)
    return pack(header, CodedTensors({SECONDS: seconds, **_rows(update.rows), **delta.coded}), max_bytes, memory)


def decode_update(data: Any, max_bytes: int = MAX_BYTES, max_tensor_bytes: int | None = None) -> tuple[Update, float]:
    """The update, and the seconds its client says it worked. Its delta is decoded when it is looked at.

    `max_tensor_bytes` bounds the delta once it is decoded; an answer has no more than its job (`answer_bytes`).
    """
    header, tensors = read_frame(data, max_bytes, max_tensor_bytes)
    coded = dict(tensors.coded)
    rows = _take_rows(coded)
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
            conflicts=_share(header["conflicts"]),
            inner_products=_products(header.get("inner_products", {}), len(header["tasks"])),
        )
    except (*BROKEN, RuntimeError) as error:
        raise WireError(f"an update's header is not whole: {brief(error)}") from error
    return update, seconds


def answer_bytes(job: Job) -> int:
    """The most that the answer's tensors can take once they are decoded."""
    rows = 0 if job.rows is None else job.rows.nbytes
    weights = (claimed_bytes(tuple(weight.shape), CODES[weight.dtype]) for weight in job.weights.values())
    return sum(weights) + rows + 8


def _rows(rows: np.ndarray | None) -> dict[Key, Coded]:
    return {} if rows is None else {ROWS: encode_rows(rows)}


def _take_rows(coded: dict[Key, Coded]) -> np.ndarray | None:
    rows = coded.pop(ROWS, None)
    if rows is not None and rows.codec != "rows":
        raise WireError("the token rows are not a list of rows")
    return None if rows is None else decode(rows).numpy()


def _bits(pruned: Mapping[Key, Tensor]) -> dict[Key, Coded]:
    """Whether each weight is pruned, eight to a byte; under a lossy codec a zero alone would not tell."""
    return {
        Key(PRUNED + key.scope, key.name): encode(torch.from_numpy(np.packbits(mask.numpy())), "fp32")
        for key, mask in pruned.items()
    }


def _from_bits(bits: Mapping[Key, Coded], weights: Mapping[Key, Coded]) -> dict[Key, Tensor]:
    pruned = {}
    for own, coded in bits.items():
        key = Key(own.scope.removeprefix(PRUNED), own.name)
        weight, packed = weights[key], decode(coded)
        if packed.dtype != torch.uint8 or packed.numel() != -(-weight.size // 8):
            raise ValueError(f"{own.name}: pruned places that do not fit the weight")
        flat = np.unpackbits(packed.numpy(), count=weight.size).astype(bool)
        pruned[key] = torch.from_numpy(flat).view(weight.shape)
    return pruned


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
    """The sums of each task; what is in them is checked against the task (`tasks/sums.py`)."""
    if not _is_object(values) or not all(map(_is_object, values.values())):
        raise ValueError("its sums are not those of tasks")
    return dict(values)


def _kind(value: Any) -> Literal["train", "evaluate"]:
    if value not in ("train", "evaluate"):
        raise ValueError("a job of another kind than train and evaluate")
    return "train" if value == "train" else "evaluate"


def _addressee(value: Any) -> str:
    """Whom a job is for: any name, which the client compares with its own."""
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


def _share(value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):
        raise ValueError("not a share")
    return None if value is None else float(value)


def _products(values: Mapping[str, Any], size: int) -> dict[str, list[list[float]]]:
    """For each layer a number for every two tasks."""
    for layer, rows in values.items():
        if not is_name(layer) or len(rows) != size or any(len(row) != size for row in rows):
            raise ValueError(f"not {size} by {size} inner products of a layer")
    products = {layer: [[_number(value) for value in row] for row in rows] for layer, rows in values.items()}
    if not all(math.isfinite(value) for rows in products.values() for row in rows for value in row):
        raise ValueError("inner products that are not numbers")
    return products


def _count(value: Any) -> int:
    return _whole(value, "count of examples", MOST_EXAMPLES)


def _whole(value: Any, what: str = "round", end: int = MOST_ROUND) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"not a {what}")
    return value


def _expect(header: Mapping[str, Any], kind: str) -> None:
    if header["type"] != kind:
        raise ValueError(f"a message of another type came where {kind} is due")
