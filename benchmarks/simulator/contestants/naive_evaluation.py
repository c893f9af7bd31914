"""Scoring as the naive loop does it: every text padded to 128 tokens, task after task, batch after batch."""

from __future__ import annotations

import argparse
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch

from simulator.contestants.examples import TASKS, Tokens
from simulator.contestants.network import Network, num_parameters
from simulator.contestants.telling import Round, tell

WIDTH = 128
BATCH = 64

_loaded: dict[str, tuple[Network, Tokens]] = {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--clients", type=int, help="not used: scoring happens at the server")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    arguments = (args.workload, args.threads)
    pool: Pool | None = get_context("spawn").Pool(args.processes, _open, arguments) if args.processes > 1 else None
    if pool is None:
        _open(*arguments)
    else:
        pool.map(_ready, range(args.processes))
    tell("model", parameters=num_parameters(Network(args.workload / "encoder")))
    shares = [(part, args.processes) for part in range(args.processes)]
    for number in range(1, args.rounds + 1):
        with Round(number) as round_:
            round_.samples = sum(pool.map(_score, shares, chunksize=1)) if pool else _score(shares[0])
    if pool:
        pool.terminate()


def _open(workload: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _loaded["site"] = Network(workload / "encoder").eval(), Tokens(workload / "validation.npz")


def _ready(_: int) -> bool:
    return bool(_loaded)


@torch.no_grad()
def _score(share: tuple[int, int]) -> int:
    """Every n-th batch of all tasks; how many examples those had."""
    network, tokens = _loaded["site"]
    part, parts = share
    size = len(tokens.labels) // len(TASKS)
    batches = [
        (task, np.arange(start, min(start + BATCH, (index + 1) * size)))
        for index, task in enumerate(TASKS)
        for start in range(index * size, (index + 1) * size, BATCH)
    ]
    for task, batch in batches[part::parts]:
        made = tokens.batch(batch, task, WIDTH)
        network.outputs(task, made.ids, made.segments, made.mask).numpy()
    return tokens.take_count()


if __name__ == "__main__":
    main()
