"""Losses that make a student resemble its teacher; all are 0 where it does.

Each takes tensors and a mask of what is real, and knows nothing of where they come from. What is padded is in no
sum and no count, so padding changes no loss. The teacher's side gets no gradient.

* hidden states and attention scores: TinyBERT (Jiao et al. 2020). Its code also averages over padding; we do not.
* relations: MiniLMv2 (Wang et al. 2021).
* outputs: soft targets (Hinton et al. 2015).
* similarity: relations between the sentences of a batch (Park et al. 2019), here of cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmtl.tasks.task import Task

# Of a balanced similarity: cosines up to .2, .4, .6, .8 and above.
LEVELS = 5
# TinyBERT's bound: a score this low is a mask's, and says nothing.
MASKED_SCORE = -1e2


def hidden_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of states [batch, position, width] over the real positions."""
    errors = (student.float() - teacher.detach().float()).square().mean(-1)
    return _mean(errors, mask)


def attention_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of raw scores [batch, head, position, position] over pairs of real positions.

    Scores of -100 and less count as 0, as a mask's do in TinyBERT's code.
    """
    target, scores = (
        torch.where(part <= MASKED_SCORE, 0.0, part) for part in (teacher.detach().float(), student.float())
    )
    return _mean((scores - target).square().mean(1), mask[:, :, None] & mask[:, None, :])


def relation_loss(teacher: Tensor, student: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    """Return how far the student's similarities between positions are from the teacher's.

    States [batch, position, width] are split into `num_heads`, whatever the widths; a position's relation is the
    softmax of its scaled products with all real ones. The mean divergence over real positions and heads.
    """
    target, relations = _log_relations(teacher.detach(), mask, num_heads), _log_relations(student, mask, num_heads)
    terms = torch.where(mask[:, None, None, :], target.exp() * (target - relations), 0.0)
    return _mean(terms.sum(-1).mean(1), mask)


def similarity_loss(teacher: Tensor, student: Tensor, *, balanced: bool = False) -> Tensor:
    """Mean squared difference of the cosines between all vectors [batch, width]; the widths may differ.

    Nearly all pairs of a batch are unlike. With `balanced`, half of the loss is the mean over five levels of likeness,
    each counting the same however few its pairs are; a vector with itself is no pair there.
    """
    target, vectors = F.normalize(teacher.detach().float(), dim=-1), F.normalize(student.float(), dim=-1)
    cosines = target @ target.T
    errors = (vectors @ vectors.T - cosines).square()
    if not balanced:
        return errors.mean()
    levels = (cosines * LEVELS).floor().clamp(0, LEVELS - 1).fill_diagonal_(-1)
    members = levels == torch.arange(LEVELS, device=levels.device)[:, None, None]
    sizes = members.sum((1, 2))
    means = torch.where(members, errors, 0.0).sum((1, 2)) / sizes.clamp(min=1)
    return (errors.mean() + means.sum() / (sizes > 0).sum().clamp(min=1)) / 2


def outputs_loss(task: Task, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """How far the student's outputs are from its teacher's, by the measure of the task's kind."""
    return task.kind_of.distillation_loss(task, teacher.detach().to(student.dtype), student, temperature)


def _log_relations(states: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    batch, length, width = states.shape
    heads = states.float().reshape(batch, length, num_heads, width // num_heads).transpose(1, 2)
    scores = heads @ heads.transpose(2, 3) / heads.shape[-1] ** 0.5
    # A finite floor: a row that is all padding then still has a softmax.
    return F.log_softmax(scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min), dim=-1)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
