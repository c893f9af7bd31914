import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.model.bert.layout import (
    NUM_HEADS_KEY,
    attention_width,
    build_encoder,
    has_fewer_heads,
    keep_heads,
    num_heads,
)
from fedmtl.model.encoder import load_encoder
from fedmtl.model.encoder_files import holds_bert_values
from model.tiny import LENGTH, WIDTH, make_config, make_tokenizer, write_encoder

CONFIG = {"max_length": LENGTH}


@pytest.fixture
def folder(tmp_path):
    """An encoder with one of two heads, 16 wide, as `fedmtl prune --heads 0.5` writes it."""
    tokenizer = make_tokenizer("bert")
    config = make_config("bert", tokenizer)
    keep_heads(config, 1)
    torch.manual_seed(3)
    build_encoder(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def load(folder, **options):
    return load_encoder(ModelConfig(server_model=str(folder), **CONFIG), 0, **options).module


def test_the_config_says_how_many_heads_there_are_and_how_large(folder):
    told = json.loads((folder / "config.json").read_text())
    assert (told["num_attention_heads"], told[NUM_HEADS_KEY], told["hidden_size"]) == (2, 1, 32)
    config = AutoConfig.from_pretrained(folder)
    assert (num_heads(config), attention_width(config), has_fewer_heads(config)) == (1, 16, True)


def test_with_all_heads_nothing_is_said_and_the_module_is_transformers_own():
    config = make_config("bert", make_tokenizer("bert"))
    keep_heads(config, 2)
    assert NUM_HEADS_KEY not in config.to_dict()
    modules = []
    for build in (build_encoder, AutoModel.from_config):
        torch.manual_seed(5)
        modules.append(build(config).state_dict())
    assert all(torch.equal(value, modules[1][name]) for name, value in modules[0].items())


def test_values_are_loaded_to_the_same_bits_with_code_and_without(folder):
    assert holds_bert_values(ModelConfig(server_model=str(folder), **CONFIG))
    module, values = load(folder), load(folder, values_only=True)
    assert [type(each).__name__ for each in (module, values)] == ["BertModel", "BertValues"]
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters() if ".0.attention." in name}
    layer = "encoder.layer.0.attention."
    assert shapes[f"{layer}self.query.weight"] == (16, WIDTH)
    assert shapes[f"{layer}self.value.bias"] == (16,)
    assert shapes[f"{layer}output.dense.weight"] == (WIDTH, 16)
    others = dict(values.named_parameters())
    assert all(torch.equal(value, others[name]) for name, value in module.named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(others)


def test_a_random_start_has_the_same_shape(folder):
    fresh = load_encoder(ModelConfig(server_model=str(folder), initial="random", **CONFIG), 0).module
    assert fresh.encoder.layer[1].attention.self.key.weight.shape == (16, WIDTH)


def test_a_pooler_that_was_not_saved_is_fresh_and_the_rest_is_loaded(folder):
    kept = load(folder, keep_pooler=False)
    kept.save_pretrained(folder)
    module = load(folder, keep_pooler=True)
    assert module.pooler.dense.weight.abs().max() > 0
    assert torch.equal(
        module.encoder.layer[1].attention.self.value.weight, kept.encoder.layer[1].attention.self.value.weight
    )
    assert load(folder).pooler is None


def test_plain_transformers_refuses_it(folder):
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        AutoModel.from_pretrained(folder)


def test_a_folder_whose_values_are_of_other_shapes_is_told(tmp_path):
    folder = write_encoder("bert", tmp_path)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, NUM_HEADS_KEY: 1}))
    with pytest.raises(ModelError, match=f"`{NUM_HEADS_KEY}: 1`, but its model.safetensors is not such a bert encoder"):
        load(folder)
