"""Jobs and Updates as bytes, and back: a frame of JSON and raw tensors. Nothing in it can run code.

magic  version  header length  payload length  crc32  | header (JSON) | tensors, little-endian, 8-byte aligned
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import WireError
from fedmtl.federation.messages import Job, Update
from fedmtl.model.keys import Key, Weights
from fedmtl.model.plan import SharingPlan

MAGIC = b"FMTL"
VERSION = 1
FRAME = struct.Struct("<4sHxxIQI")
MAX_BYTES = 1 << 34
ALIGN = 8
DTYPES = {"f4": torch.float32, "f8": torch.float64, "f2": torch.float16, "i8": torch.int64, "i4": torch.int32}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ROWS = Key("", "rows")

if sys.byteorder != "little":
    raise ImportError("fedmtl's wire format needs a little-endian machine")


def encode_job(job: Job) -> bytearray:
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
    }
    return pack(header, _with_rows(job.weights, job.rows))


def decode_job(data: Any) -> Job:
    header, tensors = unpack(data)
    rows = tensors.pop(ROWS, None)
    try:
        _expect(header, "job")
        return Job(
            header["kind"],
            int(header["round"]),
            str(header["client"]),
            tuple(header["tasks"]),
            tensors,
            SharingPlan.from_dict(header["plan"]),
            None if rows is None else rows.numpy(),
            int(header["seed"]),
            int(header["state_round"]),
            header["settings"],
            header["fixed"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a job's header is not whole: {error!r}") from error


def encode_update(update: Update) -> bytearray:
    header = {
        "type": "update",
        "round": update.round,
        "client": update.client,
        "tasks": list(update.tasks),
        "num_examples": dict(update.num_examples),
        "losses": dict(update.losses),
        "sums": dict(update.sums),
        # Of fixed width, so that equal runs have equal sizes.
        "seconds": f"{update.traffic.seconds:013.3f}",
    }
    return pack(header, _with_rows(update.delta, update.rows))


def decode_update(data: Any) -> tuple[Update, float]:
    """The update, and the seconds its client says it worked."""
    header, tensors = unpack(data)
    rows = tensors.pop(ROWS, None)
    try:
        _expect(header, "update")
        update = Update(
            int(header["round"]),
            str(header["client"]),
            tuple(header["tasks"]),
            tensors,
            None if rows is None else rows.numpy(),
            {str(task): int(count) for task, count in header["num_examples"].items()},
            {str(task): float(loss) for task, loss in header["losses"].items()},
            dict(header["sums"]),
        )
        return update, float(header["seconds"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"an update's header is not whole: {error!r}") from error


def pack(header: Mapping[str, Any], tensors: Weights) -> bytearray:
    """One frame; tensors keep their order."""
    arrays: list[np.ndarray] = []
    table: list[list[Any]] = []
    offset = 0
    for key, tensor in tensors.items():
        array = tensor.detach().cpu().contiguous().numpy()
        table.append([key.scope, key.name, CODES[tensor.dtype], list(array.shape), offset])
        arrays.append(array)
        offset += -(-array.nbytes // ALIGN) * ALIGN
    text = json.dumps({**header, "tensors": table}, separators=(",", ":")).encode()
    text += b" " * (-(FRAME.size + len(text)) % ALIGN)
    frame = bytearray(FRAME.size + len(text) + offset)
    frame[FRAME.size : FRAME.size + len(text)] = text
    body = np.frombuffer(frame, dtype=np.uint8, offset=FRAME.size + len(text), count=offset) if offset else None
    for array, (*_, start) in zip(arrays, table, strict=True):
        if body is not None and array.nbytes:
            body[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    del body
    crc = zlib.crc32(memoryview(frame)[FRAME.size :])
    FRAME.pack_into(frame, 0, MAGIC, VERSION, len(text), offset, crc)
    return frame


def unpack(data: Any, max_bytes: int = MAX_BYTES) -> tuple[dict[str, Any], Weights]:
    """The header and the tensors of a frame; tensors are views of `data`. Anything else is a WireError."""
    view = memoryview(data).cast("B")
    if len(view) < FRAME.size:
        raise WireError("the message is shorter than a frame")
    magic, version, text_length, payload_length, crc = FRAME.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise WireError("the message is not a fedmtl frame of this version")
    if text_length + payload_length > max_bytes or FRAME.size + text_length + payload_length != len(view):
        raise WireError(f"the frame says {text_length + payload_length} bytes, {len(view) - FRAME.size} came")
    if zlib.crc32(view[FRAME.size :]) != crc:
        raise WireError("the message's checksum does not fit")
    try:
        header = json.loads(bytes(view[FRAME.size : FRAME.size + text_length]))
        payload = view[FRAME.size + text_length :]
        tensors = {Key(scope, name): _tensor(payload, *rest) for scope, name, *rest in header.pop("tensors")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WireError(f"the frame's header is not whole: {error!r}") from error
    return header, tensors


def _tensor(payload: memoryview, code: str, shape: list[int], offset: int) -> Tensor:
    dtype = DTYPES[code]
    count = int(np.prod([int(n) for n in shape], dtype=object)) if shape else 1
    size = count * torch.empty((), dtype=dtype).element_size()
    if offset < 0 or any(n < 0 for n in shape) or offset + size > len(payload):
        raise ValueError(f"a tensor of {size} bytes at {offset} does not fit into {len(payload)}")
    array = np.frombuffer(payload[offset : offset + size], dtype=np.dtype("<" + code)).reshape(shape)
    # Read-only memory would make torch warn; such a message is copied.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _with_rows(weights: Weights, rows: np.ndarray | None) -> Weights:
    return weights if rows is None else {ROWS: torch.from_numpy(rows), **weights}


def _expect(header: Mapping[str, Any], kind: str) -> None:
    if header["type"] != kind:
        raise ValueError(f"a message of type {header['type']} came where {kind} is due")
