"""How fast each codec is, and how small: GB of float32 per second and core, encoding and decoding.

    OMP_NUM_THREADS=1 python benchmarks/wire.py --out wire.json

One message is a slice of a 2-layer 128-wide encoder, or (`--rows`) a larger one. Encoding is from tensors to a frame
with its checksum, decoding from the frame to every tensor. Figures are medians over repetitions of the processor's
time on one thread, the system's share included, so that others on the machine count less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.federation.messages import Update
from fedmtl.federation.wire import decode_update, encode_update
from fedmtl.federation.wire.codecs import encode_tensors
from fedmtl.sharing.plan import Key, Weights

CODECS = (("fp32", 1.0), ("fp16", 1.0), ("int8", 1.0), ("topk", 0.05), ("topk", 0.01))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2500, 200_000], help="token rows, one table per value")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for rows in arguments.rows:
        delta = slice_like(rows)
        for codec, share in CODECS:
            results.append(measure(delta, codec, share, arguments.repeat))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def slice_like(rows: int) -> Weights:
    """Deltas of the size and spread that training leaves, in the shapes of a 2-layer 128-wide encoder."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word": (rows, 128), "embeddings.position": (512, 128)}
    for layer in range(2):
        for name in ("query", "key", "value", "output"):
            shapes[f"{layer}.attention.{name}.weight"] = (128, 128)
            shapes[f"{layer}.attention.{name}.bias"] = (128,)
        shapes |= {f"{layer}.up.weight": (512, 128), f"{layer}.down.weight": (128, 512), f"{layer}.up.bias": (512,)}
    return {Key("all", name): torch.randn(shape, generator=generator) * 1e-3 for name, shape in shapes.items()}


def measure(delta: Weights, codec: str, share: float, repeat: int) -> dict[str, Any]:
    plain = sum(value.numel() * 4 for value in delta.values())

    def encode() -> np.ndarray:
        coded = encode_tensors(delta, lambda key: codec, share)
        return encode_update(Update(1, "client", ("task",), coded, None, {"task": 1}, {"task": 0.5}))

    def decode() -> None:
        update, _ = decode_update(frame)
        for _ in update.delta.values():
            pass

    frame = encode()
    return {
        "codec": codec if codec != "topk" else f"topk {share:g}",
        "mb": round(plain / 1e6, 2),
        "encoded_mb": round(len(frame) / 1e6, 3),
        "ratio": round(len(frame) / plain, 4),
        "encode_gb_s": round(plain / seconds(encode, repeat) / 1e9, 2),
        "decode_gb_s": round(plain / seconds(decode, repeat) / 1e9, 2),
    }


def seconds(work: Callable[[], Any], repeat: int) -> float:
    work()
    taken = []
    for _ in range(repeat):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
