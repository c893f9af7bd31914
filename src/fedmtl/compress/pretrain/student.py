"""The student: a small BERT without a pooler, and projections into the teacher's width that are thrown away later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.model.flat import is_decayed
from fedmtl.seeds import derive_seed


class Student(nn.Module):
    """An encoder with one projection for each of its hidden states, embeddings first."""

    def __init__(self, config: BertConfig, teacher_width: int) -> None:
        super().__init__()
        self.encoder: Any = BertModel(config, add_pooling_layer=False)
        self.projections = nn.ModuleList(
            nn.Linear(config.hidden_size, teacher_width) for _ in range(config.num_hidden_layers + 1)
        )

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """All hidden states [batch, token, width], embeddings first."""
        # Four dimensions: of two, the encoder would ask the device whether any is padded, and wait for it.
        output = self.encoder(ids, attention_mask=mask[:, None, None, :], output_hidden_states=True)
        states: tuple[Tensor, ...] = output.hidden_states
        return states


def build_student(
    settings: PretrainSettings, num_pieces: int, teacher_width: int, table: Tensor | None = None
) -> Student:
    """A student in evaluation mode, so without dropout, whose bits follow from the settings and the table given."""
    config = BertConfig(
        vocab_size=num_pieces,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.max_length,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(settings.seed, "student"))
        student = Student(config, teacher_width).float().eval()
    if table is not None:
        with torch.no_grad():
            student.encoder.get_input_embeddings().weight.copy_(table)
    return student


def build_optimizer(student: Student, settings: PretrainSettings) -> torch.optim.Optimizer:
    """AdamW; tables, norms and biases are not decayed."""
    owned = [(module, p) for module in student.modules() for p in module.parameters(recurse=False)]
    groups = [
        {"params": [p for module, p in owned if is_decayed(module, p)], "weight_decay": settings.weight_decay},
        {"params": [p for module, p in owned if not is_decayed(module, p)], "weight_decay": 0.0},
    ]
    device = next(student.parameters()).device
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=0.0, fused=True)
    # On the device, so that a recorded step takes the rate it has when it is replayed.
    return torch.optim.AdamW(groups, lr=torch.zeros((), device=device), fused=True, capturable=True)
