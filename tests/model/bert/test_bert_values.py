"""An encoder of values alone is the one that transformers would have built."""

import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from fedmtl.model.bert.layout import BertValues
from fedmtl.model.encoder import load_encoder
from fedmtl.model.multitask import build_model
from model.test_encoder import config_of
from model.tiny import PAIRS, encode, make_task, write_encoder


def load(folder, keep_pooler=None, *, values_only=True, **keys):
    return load_encoder(config_of(folder, **keys), 0, keep_pooler, values_only=values_only)


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    return folder


def test_names_order_and_values_are_those_of_transformers(folders):
    ours, theirs = (load(folders["bert"], values_only=only).module for only in (True, False))
    assert (type(ours), type(theirs)) == (BertValues, BertModel)
    left, right = (list(module.named_parameters()) for module in (ours, theirs))
    assert [name for name, _ in left] == [name for name, _ in right]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True))
    paddings = [module.get_input_embeddings().padding_idx for module in (ours, theirs)]
    assert paddings[0] == paddings[1]


def test_a_model_on_values_computes_the_same_bits(folders):
    task = make_task(text=("a", "b"))
    encoders = [load(folders["bert"], values_only=only) for only in (True, False)]
    models = [build_model(encoder, {"single": task}, seed=0) for encoder in encoders]
    ours, theirs = (model("single", encode(encoders[0].tokenizer, task, PAIRS)) for model in models)
    assert torch.equal(ours, theirs)
    assert encoders[0].accepts == encoders[1].accepts
    assert list(models[0].canonical()) == list(models[1].canonical())


def test_values_saved_under_a_model_with_a_head_or_in_half_precision_are_found(tmp_path):
    folder = write_encoder("bert", tmp_path / "bert")
    plain = dict(load(folder).module.named_parameters())

    def with_head(values):
        halves = {f"bert.{name}": value.half() for name, value in values.items()}
        return {**halves, "cls.predictions.bias": torch.zeros(3)}

    found = load(rewrite(folder, with_head)).module
    assert type(found) is BertValues
    assert {value.dtype for value in found.parameters()} == {torch.float32}
    assert all(torch.equal(value, plain[name].half().float()) for name, value in found.named_parameters())


def test_a_missing_pooler_is_none_unless_one_must_be_made(tmp_path):
    folder = write_encoder("bert", tmp_path / "bert", pooler=False)
    assert type(load(folder).module) is BertValues
    assert not load(folder).has_pooler
    assert type(load(folder, keep_pooler=True).module) is BertModel
    dropped = load(write_encoder("bert", tmp_path / "whole"), keep_pooler=False)
    assert not any("pooler" in name for name, _ in dropped.module.named_parameters())


def test_whatever_is_not_exactly_that_is_left_to_transformers(tmp_path, folders):
    assert type(load(folders["bert"], initial="random").module) is BertModel
    assert type(load(folders["electra"]).module).__name__ == "ElectraModel"
    more = rewrite(write_encoder("bert", tmp_path / "more"), lambda values: {**values, "extra": torch.zeros(1)})
    assert type(load(more).module) is BertModel
