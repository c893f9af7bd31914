"""General distillation with the teacher's vocabulary: the first stage of TinyBERT (Jiao et al. 2020, section 3).

Teacher and student read the same tokens, so that embeddings, hidden states and attention scores are compared position
by position, special tokens included, by the losses of a task's intermediate stage. The student that comes out has the
teacher's tokenizer and as many attention heads, and `fedmtl distill --student FOLDER` goes on with it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from fedmtl.compress.distill.intermediate import StateLosses
from fedmtl.compress.distill.settings import DistillSettings, LossWeights
from fedmtl.compress.general import General
from fedmtl.compress.pretrain.batches import DeviceSide, Tokens
from fedmtl.compress.pretrain.settings import Losses, PretrainSettings
from fedmtl.compress.pretrain.student import Student, table_from_teacher
from fedmtl.compress.pretrain.targets import LiveTargets, Targets, Wanted
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.bert.layout import NUM_HEADS_KEY, mean_pool, num_heads
from fedmtl.model.encoder import Encoder
from fedmtl.seeds import derive_seed
from fedmtl.training.distillation import similarity_loss


def fit_to_teacher(settings: PretrainSettings, teacher: Encoder) -> PretrainSettings:
    """The settings with the teacher's number of heads, where none is given and it divides the student's width."""
    heads = num_heads(teacher.module.config)
    if settings.mask_words and teacher.tokenizer.mask_token_id is None:
        raise ConfigError("--mask-words: the teacher's vocabulary has no mask; leave it out")
    return settings if settings.heads or settings.hidden % heads else replace(settings, heads=heads)


def build_alike(settings: PretrainSettings, teacher: Encoder) -> tuple[Student, StateLosses]:
    """A student with the teacher's tokens, and the losses between both; its bits follow from settings and teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(settings.seed, "student"))
        encoder: Any = BertModel(_config(settings, teacher), add_pooling_layer=False).float().eval()
    if settings.teacher_table:
        _take_embeddings(encoder, teacher, settings)
    weights = LossWeights(settings.losses.hidden, settings.losses.attention, settings.losses.hidden)
    options = DistillSettings("", layer_map=settings.layer_map, weights=weights)
    losses = StateLosses(teacher.module, encoder, options, settings.seed)
    return Student(encoder, losses.projections), losses


def general_record(settings: PretrainSettings, teacher: Encoder, losses: StateLosses) -> General:
    """What the task's distillation has to know."""
    layers = int(teacher.module.config.num_hidden_layers)
    return General(settings.teacher.name, layers, teacher.hidden_size, losses.hidden)


def _config(settings: PretrainSettings, teacher: Encoder) -> Any:
    """The teacher's architecture in the student's size, or a plain BERT under a teacher of another kind."""
    above = teacher.module.config
    if above.model_type == "bert":
        config = copy.deepcopy(above)
        config.intermediate_size = above.intermediate_size * settings.hidden // above.hidden_size
        if hasattr(config, NUM_HEADS_KEY):
            delattr(config, NUM_HEADS_KEY)
    else:
        config = BertConfig(vocab_size=above.vocab_size, intermediate_size=4 * settings.hidden)
    config.hidden_size, config.num_hidden_layers = settings.hidden, settings.layers
    config.num_attention_heads, config.max_position_embeddings = settings.num_heads, settings.max_length
    config.pad_token_id = int(teacher.tokenizer.pad_token_id or 0)
    return config


@torch.no_grad()
def _take_embeddings(encoder: Any, teacher: Encoder, settings: PretrainSettings) -> None:
    """Start from the teacher's embeddings: whole where they have the student's width, else its principal components."""
    above = teacher.module.config
    if above.model_type == "bert" and above.hidden_size == settings.hidden:
        source = teacher.module.embeddings.state_dict()
        for name, value in encoder.embeddings.named_parameters():
            value.copy_(source[name][: len(value)])
        return
    rows = teacher.tokenizer.convert_ids_to_tokens(list(range(above.vocab_size)))
    pieces = {piece or f"[row {number}]": number for number, piece in enumerate(rows)}
    if len(pieces) < above.vocab_size:
        raise ModelError(f"--vocab teacher: {teacher.name} names a piece twice; write --no-teacher-table")
    encoder.get_input_embeddings().weight.copy_(table_from_teacher(pieces, teacher, settings.hidden))


class TokenTargets(LiveTargets):
    """Runs the teacher on the batch and answers with its states position by position."""

    def __init__(self, encoder: Encoder, tokens: DeviceSide, losses: StateLosses) -> None:
        super().__init__(encoder, tokens, Wanted((), None))
        self.losses = losses

    @torch.no_grad()
    def answer(self, tokens: Tokens, num_words: int) -> Targets:
        hidden = self.hidden_states(tokens)
        return Targets((), (), mean_pool(hidden[-1].float(), tokens.mask), self.losses.above.states(hidden))


def token_terms(
    student: Student, losses: StateLosses, tokens: Tokens, targets: Targets, weights: Losses, *, balanced: bool = False
) -> dict[str, Tensor]:
    """Each term whose weight is not 0, before it is weighted; on a GPU the student runs in bfloat16."""
    device = tokens.ids.device.type
    # Weights that were cast and cached would be stale when a recorded step is replayed.
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
        hidden = student(tokens.ids, tokens.mask, tokens.types)
    states = [state.float() for state in hidden]
    assert targets.states is not None, "the teacher read tokens of its vocabulary"
    terms = losses.compare(targets.states, losses.below.states(states), tokens.mask)
    sentences = mean_pool(states[-1], tokens.mask)
    if weights.similarity:
        projected = losses.projections.hidden(sentences)
        terms["similarity"] = similarity_loss(targets.sentences, projected, balanced=balanced)
    if weights.own_similarity:
        terms["own_similarity"] = similarity_loss(targets.sentences, sentences, balanced=balanced)
    return terms
