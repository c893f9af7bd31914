import hashlib
import struct

import pytest
import torch

from fedmtl.sharing.plan import Key, layer_of, owner_task, weights_sha256


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("embeddings.word_embeddings.weight", "embeddings"),
        ("encoder.layer.11.attention.self.query.weight", "encoder.layer.11"),
        ("transformer.layer.0.ffn.lin1.bias", "transformer.layer.0"),
        ("encoder.albert_layer_groups.0.albert_layers.0.ffn.bias", "encoder.albert_layer_groups.0"),
        ("layers.1.mlp.Wi.weight", "layers.1"),
        ("pooler.dense.bias", "pooler"),
        ("heads.sst2.weight", "heads.sst2"),
        ("heads.sst2.lora_A.weight", "heads.sst2"),
        ("adapters.sst2.layer.3.encoder.weight", "adapters.sst2"),
    ],
)
def test_a_parameter_belongs_to_a_layer(name, layer):
    assert layer_of(name) == layer


def test_heads_and_adapters_belong_to_a_task():
    assert owner_task("heads.sst2.weight") == "sst2"
    assert owner_task("adapters.sst2.shared.encoder.bias") == "sst2"
    assert owner_task("encoder.heads.weight") is None


def test_the_digest_is_over_scope_name_dtype_shape_and_little_endian_bytes():
    weights = {
        Key("task:b", "heads.b.bias"): torch.tensor([3], dtype=torch.int16),
        Key("all", "w"): torch.tensor([[1.0, -2.5]]),
    }
    text = b"all\0w\0torch.float32\0(1, 2)\0" + struct.pack("<2f", 1.0, -2.5)
    text += b"task:b\0heads.b.bias\0torch.int16\0(1,)\0" + struct.pack("<h", 3)
    assert weights_sha256(weights) == hashlib.sha256(text).hexdigest()


def test_the_digest_does_not_depend_on_order_or_on_what_stays_at_clients():
    one, two = (Key("all", "a"), torch.ones(2)), (Key("all", "b"), torch.zeros(2))
    own = (Key("client:c1", "a"), torch.ones(1))
    assert weights_sha256(dict([one, two])) == weights_sha256(dict([two, own, one]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Key("fixed", "w"), torch.ones(2, 2)),
        (Key("all", "v"), torch.ones(2, 2)),
        (Key("all", "w"), torch.ones(2, 2, dtype=torch.float64)),
        (Key("all", "w"), torch.ones(4)),
        (Key("all", "w"), torch.tensor([[1.0, 1.0], [1.0, 1.0000001]])),
    ],
    ids=["scope", "name", "dtype", "shape", "value"],
)
def test_the_digest_tells_apart(key, value):
    assert weights_sha256({key: value}) != weights_sha256({Key("all", "w"): torch.ones(2, 2)})


def test_the_digest_reads_a_view_as_its_values():
    matrix = torch.arange(6.0).reshape(2, 3)
    copied = matrix.t().contiguous()
    assert weights_sha256({Key("all", "w"): matrix.t()}) == weights_sha256({Key("all", "w"): copied})
