"""Flower's client: tokens and model stay in the actor, batches by length, fused AdamW, one thread."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from simulator.contestants.examples import Tokens, task_of
from simulator.contestants.network import LEARNING_RATE, Network

app = ClientApp()


@cache
def _loaded() -> tuple[Network, Tokens]:
    """Made once per actor process."""
    torch.set_num_threads(1)
    folder = Path(os.environ["BENCH_WORKLOAD"])
    tokens = Tokens(folder / f"clients-{os.environ['BENCH_CLIENTS']}" / "tokens.npz")
    return Network(folder / "encoder"), tokens


@app.train()
def train(message: Message, context: Context) -> Message:
    network, tokens = _loaded()
    client = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    network.train()
    task = task_of(client)
    # The other tasks' heads get no gradient, so that they are neither stepped nor decayed.
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
    for batch in tokens.bucketed(client, np.random.default_rng([number, client])):
        optimizer.zero_grad(set_to_none=True)
        network.loss_of(task, tokens.batch(batch, task)).backward()
        optimizer.step()
    reply = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": tokens.take_count()}),
    }
    return Message(RecordDict(reply), reply_to=message)
