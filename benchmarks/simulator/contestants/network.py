"""The model of every contestant: the same BERT as the project's encoder folder, with a head per task."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from simulator.contestants.examples import TASKS, Batch

OUTPUTS = {"singles": 2, "pairs": 2, "scores": 1}
LEARNING_RATE = 5e-5


class Network(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = BertConfig.from_pretrained(folder)
        self.encoder = BertModel(shape)
        self.dropout = nn.Dropout(shape.hidden_dropout_prob)
        self.heads = nn.ModuleDict({task: nn.Linear(shape.hidden_size, OUTPUTS[task]) for task in TASKS})

    def outputs(self, task: str, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, token_type_ids=segments, attention_mask=mask).pooler_output
        return self.heads[task](self.dropout(hidden))

    def loss_of(self, task: str, batch: Batch) -> Tensor:
        return task_loss(task, self.outputs(task, batch.ids, batch.segments, batch.mask), batch.labels)


def task_loss(task: str, outputs: Tensor, labels: Tensor) -> Tensor:
    if task == "scores":
        return functional.mse_loss(outputs.squeeze(-1), labels)
    return functional.cross_entropy(outputs, labels)


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
