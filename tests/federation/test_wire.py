import pickle
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.errors import WireError
from fedmtl.federation.messages import Job, Traffic, Update
from fedmtl.federation.wire import FRAME, MAGIC, VERSION, decode_job, decode_update, encode_job, encode_update, unpack
from fedmtl.model.keys import Key
from fedmtl.model.plan import SharingPlan

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")), ({"qqp": "pair"},))
WEIGHTS = {
    Key("all", "embeddings.weight"): torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    Key("task:sst2", "heads.sst2.bias"): torch.tensor([1.0, -0.0, float("nan")]),
    Key("all", "scalar"): torch.tensor(2.5, dtype=torch.float64),
    Key("all", "empty"): torch.zeros(0, 4),
}


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def test_a_job_comes_back_bit_for_bit():
    job = Job("train", 4, "ä b", ("sst2", "qqp"), WEIGHTS, PLAN, np.array([0, 7]), 2**62, 3, {"lr": 1e-5}, {"x": "ab"})
    back = decode_job(encode_job(job))
    assert same(back.weights, job.weights)
    assert back.rows is not None
    assert back.rows.tolist() == [0, 7]
    assert (back.kind, back.round, back.client, back.tasks, back.plan) == ("train", 4, "ä b", ("sst2", "qqp"), PLAN)
    assert (back.seed, back.state_round, back.settings, back.fixed) == (2**62, 3, {"lr": 1e-5}, {"x": "ab"})


def test_an_update_comes_back_bit_for_bit():
    update = Update(
        1, "c", ("sst2",), WEIGHTS, None, {"sst2": 3}, {"sst2": 0.5}, {"sst2": {"loss": 1.0}}, Traffic(seconds=2.0)
    )
    back, seconds = decode_update(encode_update(update))
    assert same(back.delta, update.delta)
    assert (back.rows, back.num_examples, back.losses, back.sums, seconds) == (
        None,
        {"sst2": 3},
        {"sst2": 0.5},
        {"sst2": {"loss": 1.0}},
        2.0,
    )


def test_the_size_is_the_tensors_and_a_small_header():
    weights = {Key("all", "w"): torch.zeros(100_000)}
    encoded = encode_update(Update(1, "c", ("t",), weights, None, {"t": 1}, {}))
    assert 400_000 <= len(encoded) < 400_000 + 300


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(data):
    with pytest.raises(WireError):
        unpack(data)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_noticed(position, flip):
    frame = encode_update(Update(1, "c", ("t",), {Key("all", "w"): torch.ones(50)}, None, {"t": 1}, {}))
    frame[position % len(frame)] ^= flip
    if position % len(frame) in (6, 7):
        return  # padding of the frame's head, which means nothing
    with pytest.raises(WireError):
        decode_update(frame)


def test_a_pickle_is_not_read():
    with pytest.raises(WireError):
        decode_update(pickle.dumps({"a": 1}) * 20)


def test_a_length_field_of_ten_gigabytes_allocates_nothing():
    frame = struct.pack(FRAME.format, MAGIC, VERSION, 10, 10 * 2**30, 0) + b"0123456789"
    with pytest.raises(WireError, match="bytes"):
        unpack(frame)


def test_a_tensor_outside_the_payload_is_refused():
    text = b'{"tensors":[["all","w","f4",[1000000],0]]}'
    frame = struct.pack(FRAME.format, MAGIC, VERSION, len(text), 0, zlib.crc32(text)) + text
    with pytest.raises(WireError, match="does not fit"):
        unpack(frame)


def test_a_message_of_another_kind_is_refused():
    job = encode_job(Job("train", 1, "c", ("t",), {}, PLAN, None, 0, 0, {}))
    with pytest.raises(WireError, match="type job"):
        decode_update(job)
