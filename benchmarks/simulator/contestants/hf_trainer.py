"""transformers' Trainer, one per client: dynamic padding, examples grouped by length, fused AdamW, nothing logged."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from simulator.contestants.examples import BATCH, Tokens, task_of
from simulator.contestants.network import LEARNING_RATE, Network
from simulator.contestants.plain import run

logging.set_verbosity_error()
OUTPUT = tempfile.mkdtemp(prefix="trainer-")


class Client(Dataset):
    """A client's examples by position; `input_ids` lets the Trainer see their lengths."""

    def __init__(self, tokens: Tokens, client: int) -> None:
        self._tokens, self._indices = tokens, tokens.examples(client)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(self._indices[index])
        start, stop = self._tokens.offsets[number], self._tokens.offsets[number + 1]
        return {"input_ids": self._tokens.ids[start:stop], "number": number}


class Single(nn.Module):
    """The model with one task's loss, in the form the Trainer calls."""

    def __init__(self, network: Network, task: str) -> None:
        super().__init__()
        self.network, self.task = network, task

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.network.loss_of(self.task, batch)}


def train(network: Network, tokens: Tokens, client: int, number: int) -> nn.Module:
    model, task = copy.deepcopy(network), task_of(client)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"batch": tokens.batch([row["number"] for row in rows], task)}

    trainer = Trainer(
        Single(model, task), _settings(number), data_collator=collate, train_dataset=Client(tokens, client)
    )
    trainer.train()
    return model


def _settings(number: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=OUTPUT,
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=number,
    )


if __name__ == "__main__":
    run(train)
