import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
)

from fedmtl.compress.attention import AttentionTap, relation_heads
from fedmtl.compress.pretrain.batches import Tokens
from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.compress.pretrain.steps import hide_words, layer_weights
from fedmtl.compress.pretrain.student import build_student
from fedmtl.errors import ModelError
from fedmtl.training.optimizer import scheduled

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def test_a_hidden_word_is_hidden_in_all_its_pieces_and_special_tokens_never():
    words = torch.tensor([[-1, 0, 0, 1, 2, 2, 2, -1, -1]]).repeat(2, 1)
    tokens = Tokens(torch.arange(10, 19).repeat(2, 1), words >= -1, words)
    hidden = hide_words(tokens, torch.tensor([[True, False, True], [False, True, False]]), 4).ids == 4
    assert hidden.int().tolist() == [[0, 1, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0, 0]]


def test_padding_changes_no_state_of_the_student(tmp_path):
    student = build_student(PretrainSettings(tmp_path, (), hidden=16, heads=2), 50, 32)
    ids, mask = torch.tensor([[2, 9, 8, 3]]), torch.ones(1, 4, dtype=torch.bool)
    wide, wide_mask = torch.nn.functional.pad(ids, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    for short, long in zip(student(ids, mask), student(wide, wide_mask), strict=True):
        torch.testing.assert_close(short, long[:, :4])


def test_queries_keys_and_values_of_other_kinds_of_teachers():
    model = DistilBertModel(DistilBertConfig(vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=8))
    tap = AttentionTap(model, 1)
    model(torch.tensor([[1, 2, 3]]))
    assert [tuple(state.shape) for state in tap.take()] == [(1, 3, 8)] * 3


@pytest.mark.parametrize("num_groups", [1, 2])
def test_layers_that_share_their_weights_each_have_their_queries_keys_and_values(num_groups):
    config = AlbertConfig(embedding_size=8, **{**SIZES, "num_hidden_layers": 4}, num_hidden_groups=num_groups)
    model = AlbertModel(config, add_pooling_layer=False).eval()
    taps = {layer: AttentionTap(model, layer) for layer in (0, 1, 3, -1)}
    ids = torch.tensor([[1, 2, 3]])
    model(ids)  # of a pass before nothing is left
    for tap in taps.values():
        tap.take()
    states = model(ids, output_hidden_states=True).hidden_states
    for layer, tap in taps.items():
        # Of four layers in two groups, the first two are the first group's.
        group = model.encoder.albert_layer_groups[(layer % 4) // (4 // num_groups)].albert_layers[0]
        attention = group.attention
        wanted = [part(states[layer % 4]) for part in (attention.query, attention.key, attention.value)]
        for found, expected in zip(tap.take(), wanted, strict=True):
            torch.testing.assert_close(found, expected)


def test_an_encoder_without_separate_queries_is_refused_with_the_switches():
    sizes = {
        **SIZES,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    with pytest.raises(ModelError, match=r"modernbert has no .*`distill --weights attention=0`, or `pretrain --no-att"):
        AttentionTap(ModernBertModel(ModernBertConfig(**sizes)), 0)


def test_relation_heads_divide_both_widths():
    # 384 and 128 have 128 in common; of 1 to 12 the largest that divides it is 8.
    assert relation_heads(384, 128, 12) == 8
    assert relation_heads(30, 7, 12) == 1


def test_later_layers_weigh_more():
    assert layer_weights(2) == [0.3, 1.0, 2.0]


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    # Warm-up over a tenth; then half a cosine over the rest, halfway at 0.1 + 0.45.
    factors = [scheduled("cosine", share, 1.0, 0.1) for share in (0.05, 0.1, 0.55, 1.0)]
    assert factors == pytest.approx([0.5, 1.0, 0.5, 0.0])
