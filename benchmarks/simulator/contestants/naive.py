"""The naive loop: a deep copy of the model per client, every text padded to 128 tokens, AdamW as it comes."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from simulator.contestants.examples import Tokens, task_of
from simulator.contestants.network import LEARNING_RATE, Network
from simulator.contestants.plain import run

WIDTH = 128


def train(network: Network, tokens: Tokens, client: int, number: int) -> nn.Module:
    model = copy.deepcopy(network)
    model.train()
    task = task_of(client)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in tokens.shuffled(client, np.random.default_rng([number, client])):
        optimizer.zero_grad()
        model.loss_of(task, tokens.batch(batch, task, WIDTH)).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    run(train)
