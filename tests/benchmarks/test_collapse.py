"""The encoders of benchmarks/collapse.py compute what they are said to, and its table says when a run left chance."""

import argparse

import pytest
import torch
from transformers import AutoModel

from collapse import PAPER, build_encoders, cells, left_at, training_of
from model.tiny import SINGLES, encode, make_task, make_tokenizer, write_encoder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("collapse")
    for name in ("minilm-l6", "minilm-l3"):
        write_encoder("bert", root / name)
    build_encoders(root, root / "built")
    return root


def states(folder, with_types):
    inputs = encode(make_tokenizer("bert"), make_task(), SINGLES)
    model = AutoModel.from_pretrained(folder).eval()
    types = {"token_type_ids": inputs.segments} if with_types else {}
    with torch.inference_mode():
        hidden = model(input_ids=inputs.ids, attention_mask=inputs.mask, **types).last_hidden_state
    return hidden[inputs.mask.bool()]


def test_the_distilbert_computes_what_the_bert_of_three_layers_does(built):
    expected = states(built / "minilm-l3", with_types=True)
    torch.testing.assert_close(states(built / "built" / "distilbert", with_types=False), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(states(built / "built" / "bert", with_types=True), expected, rtol=0, atol=1e-5)


def test_the_albert_has_one_layer_which_is_the_mean_of_all(built):
    plain = AutoModel.from_pretrained(built / "minilm-l6")
    layers = [layer.attention.self.query.weight for layer in plain.encoder.layer]
    albert = AutoModel.from_pretrained(built / "built" / "albert")
    query = albert.encoder.albert_layer_groups[0].albert_layers[0].attention.query.weight
    torch.testing.assert_close(query, torch.stack(list(layers)).mean(0))
    assert states(built / "built" / "albert", with_types=True).isfinite().all()


def make_options(**given):
    options = {"clients": [1, 4, 32], "seeds": [0, 1], "only": "sgd-imdb bert dense", "examples": 1024, "rounds": 6}
    return argparse.Namespace(**{**options, **given})


def test_one_client_gets_the_papers_rate_times_steps():
    first = cells(make_options())[0]
    # 1,024 examples are 32 batches, two epochs of them in each of 6 rounds.
    assert training_of(first, make_options())["learning_rate"] * (6 * 2 * 32) == pytest.approx(PAPER["sgd-imdb"])
    # 25,000 examples are 782 batches: 2e-5 x 100 rounds x 2 epochs x 782.
    assert PAPER["sgd-imdb"] == pytest.approx(3.128)


def test_the_ends_of_every_seed_come_before_what_is_between():
    order = [(cell.clients, cell.seed) for cell in cells(make_options())]
    assert order == [(1, 0), (32, 0), (1, 1), (32, 1), (4, 0), (4, 1)]


def test_a_run_leaves_chance_at_the_first_evaluation_that_is_better_by_more_than_the_margin():
    one = {"chance": 0.5, "learning_rate": 0.01, "steps": 400, "curve": {"0": 0.9, "2": 0.55, "10": 0.7, "4": 0.56}}
    # After 4 of 10 rounds: 0.01 x 400 x 4 / 10.
    assert left_at(one) == pytest.approx(1.6)
    assert left_at({**one, "curve": {"0": 0.9, "10": 0.55}}) is None
