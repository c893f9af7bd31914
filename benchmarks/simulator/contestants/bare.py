"""The project's training function on the same batches in the same number of processes, and nothing around it.

No jobs, no encoding, no updates, no averaging. Slices are cut and bound before the clock starts.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fedmtl.config.file import load_config
from fedmtl.experiment.prepare import prepare
from fedmtl.federation.dispatch import Dispatch, sample_clients
from fedmtl.model.multitask import BoundModel
from fedmtl.training.local import train
from simulator.contestants.telling import tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    args = parser.parse_args()
    context = get_context("spawn")
    pipes: list[Connection] = []
    for part in range(args.processes):
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, args.config, part, args.processes), daemon=True).start()
        pipes.append(ours)
    sizes = [pipe.recv() for pipe in pipes]
    tell("model", parameters=sizes[0])
    tell("begin")
    for number in range(1, args.rounds + 1):
        for pipe in pipes:
            pipe.send(number)
        spent = [pipe.recv() for pipe in pipes]
        samples = sum(count for _, count in spent)
        tell("round", round=number, seconds=max(s for s, _ in spent), samples=samples, megabytes=None)
    for pipe in pipes:
        pipe.send(None)


def _serve(pipe: Connection, path: Path, part: int, parts: int) -> None:
    torch.set_num_threads(1)
    prepared = prepare(load_config(path))
    state, server, device = prepared.state, prepared.server, torch.device("cpu")
    dispatch = Dispatch(server)
    pipe.send(sum(value.numel() for value in state.weights.values()))
    while (number := pipe.recv()) is not None:
        seconds, samples = 0.0, 0
        chosen = sample_clients(server, prepared.clients, number)
        for client, tasks in list(chosen.items())[part::parts]:
            rows = prepared.clients[client].rows
            job = dispatch.job("train", state, client, tasks, rows, number, {})
            bound = BoundModel(prepared.model, state.plan, tasks, client, job.weights, job.rows, device)
            shards = {task: prepared.population.train[client][task] for task in tasks}
            started = time.perf_counter()
            train(bound, shards, server.settings, round_number=number, seed=job.seed, device=device)
            seconds += time.perf_counter() - started
            samples += sum(map(len, shards.values()))
        pipe.send((seconds, samples))


if __name__ == "__main__":
    main()
