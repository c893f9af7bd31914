"""Federated averaging as written by hand around transformers: clients one after the other, in one process or more."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from simulator.contestants.examples import SAMPLES, Tokens
from simulator.contestants.network import Network, num_parameters
from simulator.contestants.telling import Round, tell

Values = dict[str, Tensor]
# (the shared model, the tokens, client, round) -> the client's trained model
Train = Callable[[Network, Tokens, int, int], nn.Module]


def run(train: Train) -> None:
    """Take the workload from the command line and run its rounds with this way of training a client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    folder = args.workload / f"clients-{args.clients}"
    torch.set_num_threads(args.threads)
    network = Network(args.workload / "encoder")
    tell("model", parameters=num_parameters(network))
    shares = [list(range(part, args.clients, args.processes)) for part in range(args.processes)]
    context = get_context("spawn")
    pipes: list[Connection] = []
    tokens = Tokens(folder / "tokens.npz")
    for share in shares[1:]:
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, train, args, share), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for number in range(1, args.rounds + 1):
        with Round(number) as round_:
            before = network.state_dict()
            for pipe in pipes:
                pipe.send((number, before))
            sums = [_train_share(train, network, tokens, shares[0], number), *(pipe.recv() for pipe in pipes)]
            total = sum(share for _, share in sums)
            network.load_state_dict({name: sum(part[name] for part, _ in sums) / total for name in before})
            round_.samples = total
    for pipe in pipes:
        pipe.send(None)


def _serve(pipe: Connection, train: Train, args: argparse.Namespace, share: list[int]) -> None:
    torch.set_num_threads(args.threads)
    network = Network(args.workload / "encoder")
    tokens = Tokens(args.workload / f"clients-{args.clients}" / "tokens.npz")
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        number, values = call
        network.load_state_dict(values)
        pipe.send(_train_share(train, network, tokens, share, number))


def _train_share(train: Train, network: Network, tokens: Tokens, share: list[int], number: int) -> tuple[Values, int]:
    """Sums over these clients, weighted by samples; all their models stay in memory until then, as in such code."""
    trained = [train(network, tokens, client, number).state_dict() for client in share]
    sums = {name: sum(values[name] * SAMPLES for values in trained) for name in network.state_dict()}
    return sums, tokens.take_count()
