"""The terms of general distillation for one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmtl.compress.pretrain.attention import AttentionTap, relation_heads
from fedmtl.compress.pretrain.batches import Tokens
from fedmtl.compress.pretrain.settings import Losses
from fedmtl.compress.pretrain.student import Student
from fedmtl.compress.pretrain.targets import Targets
from fedmtl.model.pooling import mean_pool
from fedmtl.training.distillation import hidden_loss, relation_loss, similarity_loss

# Embeddings have no context yet, and what a user takes is the last layer: the weights rise from here to 2.
EMBEDDINGS_WEIGHT = 0.3
# As many as MiniLMv2 uses for small students.
MOST_RELATION_HEADS = 12


def loss_terms(
    student: Student,
    tap: AttentionTap | None,
    tokens: Tokens,
    word_mask: Tensor,
    targets: Targets,
    losses: Losses,
    *,
    balanced: bool = False,
) -> dict[str, Tensor]:
    """Each term that has a weight, without it; on a GPU the student runs in bfloat16."""
    device = tokens.ids.device.type
    # Weights that were cast and kept would be stale when a recorded step is replayed.
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
        states = student(tokens.ids, tokens.mask)
        relations = () if tap is None else tap.take()
    num_words = word_mask.shape[1]
    terms: dict[str, Tensor] = {}
    if losses.hidden:
        weights = layer_weights(len(states) - 1)
        words = _word_means(tokens, states, num_words)
        # Projected after the mean, which is the same as before it and less work.
        errors = [
            weight * hidden_loss(target, project(state), word_mask)
            for weight, target, project, state in zip(weights, targets.hidden, student.projections, words, strict=True)
        ]
        terms["hidden"] = torch.stack(errors).sum()
    sentences = mean_pool(states[-1].float(), tokens.mask)
    if losses.similarity:
        terms["similarity"] = similarity_loss(targets.sentences, student.projections[-1](sentences), balanced=balanced)
    if losses.own_similarity:
        terms["own_similarity"] = similarity_loss(targets.sentences, sentences, balanced=balanced)
    if relations:
        pairs = list(zip(targets.relations, _word_means(tokens, relations, num_words), strict=True))
        heads = relation_heads(pairs[0][0].shape[-1], pairs[0][1].shape[-1], MOST_RELATION_HEADS)
        terms["attention"] = torch.stack([relation_loss(*pair, word_mask, heads) for pair in pairs]).mean()
    return terms


def _word_means(tokens: Tokens, states: Sequence[Tensor], num_words: int) -> tuple[Tensor, ...]:
    # Side by side in one product: small models wait for launches, not for arithmetic.
    joined = tokens.word_means(torch.cat([state.float() for state in states], dim=-1), num_words)
    return torch.split(joined, [state.shape[-1] for state in states], dim=-1)


def layer_weights(num_layers: int) -> list[float]:
    return [EMBEDDINGS_WEIGHT, *(2 * layer / num_layers for layer in range(1, num_layers + 1))]


def hide_words(tokens: Tokens, is_hidden: Tensor, mask_id: int) -> Tokens:
    """The same tokens with some words [batch, word] replaced by the mask, piece by piece."""
    hidden = is_hidden.gather(1, tokens.words.clamp(min=0)) & (tokens.words >= 0)
    return Tokens(torch.where(hidden, mask_id, tokens.ids), tokens.mask, tokens.words)
