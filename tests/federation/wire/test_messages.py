from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.errors import WireError
from fedmtl.federation.messages import Codecs, Job, Traffic, Update
from fedmtl.federation.wire import decode_job, decode_update, encode_job, encode_update
from fedmtl.federation.wire.codecs import CodedTensors, encode_tensors
from fedmtl.federation.wire.messages import answer_bytes
from fedmtl.sharing.plan import Extra, Key, SharingPlan

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


@pytest.mark.parametrize("carry", [bytearray, bytes, memoryview, lambda frame: frame])
def test_a_job_comes_back_bit_for_bit(carry):
    rows, codecs = np.array([0, 7]), Codecs("fp32", "topk", 0.25, False)
    fixed = {"x": "0123456789abcdef"}
    job = Job("train", 4, "ä b", ("sst2", "qqp"), WEIGHTS, PLAN, rows, 2**62, 3, {"lr": 1e-5}, fixed, codecs)
    back = decode_job(carry(encode_job(job)))
    assert same(back.weights, job.weights)
    assert back.rows is not None
    assert back.rows.tolist() == [0, 7]
    assert (back.kind, back.round, back.client, back.tasks, back.plan) == ("train", 4, "ä b", ("sst2", "qqp"), PLAN)
    assert (back.seed, back.state_round, back.settings, back.fixed) == (2**62, 3, {"lr": 1e-5}, fixed)
    assert back.codecs == codecs


def test_an_update_comes_back_bit_for_bit():
    update = Update(
        1, "c", ("sst2",), WEIGHTS, None, {"sst2": 3}, {"sst2": 0.5}, {"sst2": {"loss": 1.0}}, Traffic(seconds=2.0),
        {"sst2": 6}, {"pcgrad": Extra({"conflicts": 0.25})},
    )  # fmt: skip
    back, seconds = decode_update(encode_update(update))
    assert same(dict(back.delta), WEIGHTS)
    assert (back.rows, back.num_examples, back.losses, back.sums, seconds) == (
        None,
        {"sst2": 3},
        {"sst2": 0.5},
        {"sst2": {"loss": 1.0}},
        2.0,
    )
    assert (back.seen, back.extra) == ({"sst2": 6}, {"pcgrad": Extra({"conflicts": 0.25})})


VALUES = {"list": [[2.5, -1.0], [-1.0, 0.5]], "text": "x", "nothing": None, "inner": {"a": [1, 2]}}
EMBEDDINGS, HEAD = Key("all", "embeddings.weight"), Key("task:sst2", "heads.sst2.bias")
MASKS = {
    EMBEDDINGS: torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool),
    HEAD: torch.tensor([False, True, False]),
    Key("all", "empty"): torch.zeros(0, 4, dtype=torch.bool),
}
EXTRAS = {
    "values": Extra(VALUES),
    "nothing": Extra(),
    "tensors": Extra({"step": 3}, {"first": WEIGHTS, "second": {HEAD: torch.tensor([1.5, -0.0, 1e-30])}}),
    "masks": Extra(tensors={"mask": MASKS}),
    "both": Extra(tensors={"mask": {HEAD: MASKS[HEAD]}, "slot": {EMBEDDINGS: WEIGHTS[EMBEDDINGS]}}),
}
JOB = Job("train", 4, "c", ("sst2", "qqp"), WEIGHTS, PLAN, None, 1, 3, {}, extra=EXTRAS)
# No client sends masks.
SENT = {name: EXTRAS[name] for name in ("values", "nothing", "tensors")}
UPDATE = Update(1, "c", ("sst2", "qqp"), WEIGHTS, None, {"sst2": 3, "qqp": 1}, {}, extra=SENT)


@pytest.mark.parametrize(
    ("back", "extras"),
    [
        (lambda: decode_job(encode_job(JOB)), EXTRAS),
        (lambda: decode_job(encode_job(replace(JOB, codecs=Codecs("int8")))), EXTRAS),
        (lambda: decode_update(encode_update(UPDATE))[0], SENT),
    ],
    ids=["job", "coarse job", "update"],
)
def test_what_capabilities_send_comes_back_bit_for_bit(back, extras):
    found = back()
    assert list(found.extra) == list(extras)
    for name, extra in extras.items():
        assert found.extra[name].values == extra.values
        assert set(found.extra[name].tensors) == set(extra.tensors)
        for slot, tensors in extra.tensors.items():
            assert same(dict(found.extra[name].tensors[slot]), dict(tensors)), (name, slot)
    assert list(found.weights if isinstance(found, Job) else found.delta) == list(WEIGHTS)


def test_a_mask_travels_eight_to_a_byte_and_no_capability_costs_nothing():
    weights = {Key("all", "w"): torch.zeros(80_000)}
    mask = {"pruning": Extra(tensors={"mask": {Key("all", "w"): torch.ones(80_000, dtype=torch.bool)}})}
    plain = Job("train", 1, "c", ("t",), weights, PLAN, None, 0, 0, {})
    added = len(encode_job(replace(plain, extra=mask))) - len(encode_job(plain))
    assert 10_000 <= added < 10_000 + 100
    assert b"bits" not in bytes(encode_job(plain))


def test_each_method_of_a_job_may_send_as_much_as_the_weights_are():
    weights = {Key("all", "w"): torch.zeros(4, 8)}
    job = Job("train", 1, "c", ("t",), weights, PLAN, None, 0, 0, {"methods": {"one": {}}})
    # The delta and the tensors of one method, 4 * 8 floats of four bytes each, and the seconds.
    assert answer_bytes(job) == 2 * 128 + 8
    one = {"one": Extra(tensors={"slot": weights})}
    update = Update(1, "c", ("t",), weights, None, {"t": 1}, {}, extra=one)
    back, _ = decode_update(encode_update(update), max_tensor_bytes=answer_bytes(job))
    assert same(dict(back.extra["one"].slot("slot")), weights)
    two = {"one": Extra(tensors={"slot": weights, "more": {Key("all", "w"): torch.zeros(1)}})}
    with pytest.raises(WireError, match="more than 264 bytes"):
        decode_update(encode_update(replace(update, extra=two)), max_tensor_bytes=answer_bytes(job))


def test_a_fixed_value_stays_exact_under_every_codec():
    value = torch.randn(8, 64)
    weights = {Key("fixed", "base"): value, Key("all", "layer"): value}
    for codec in ("fp16", "int8"):
        back = decode_job(encode_job(Job("train", 1, "c", ("t",), weights, PLAN, None, 0, 0, {}, {}, Codecs(codec))))
        assert torch.equal(back.weights[Key("fixed", "base")], value)
        assert not torch.equal(back.weights[Key("all", "layer")], value)


def test_an_update_is_sent_as_its_client_encoded_it():
    delta = encode_tensors({Key("all", "w"): torch.randn(8, 64)}, lambda key: "int8")
    back, _ = decode_update(encode_update(Update(1, "c", ("t",), delta, None, {"t": 1}, {})))
    assert torch.equal(back.delta[Key("all", "w")], delta[Key("all", "w")])


def test_an_update_that_waits_holds_no_memory_but_its_message():
    delta = encode_tensors({Key("all", "w"): torch.randn(8, 64)}, lambda key: "int8")
    frame = encode_update(Update(1, "c", ("t",), delta, None, {"t": 1}, {}))
    back, _ = decode_update(frame)
    assert isinstance(back.delta, CodedTensors)
    assert all(np.shares_memory(coded.data, frame) for coded in back.delta.coded.values())
    assert back.delta[Key("all", "w")] is not back.delta[Key("all", "w")]


def test_the_size_is_the_tensors_and_a_small_header():
    weights = {Key("all", "w"): torch.zeros(100_000)}
    encoded = encode_update(Update(1, "c", ("t",), weights, None, {"t": 1}, {}))
    assert 400_000 <= len(encoded) < 400_000 + 300


def test_the_size_does_not_depend_on_how_long_a_client_worked():
    sizes = {
        len(encode_update(Update(1, "c", ("t",), {}, None, {"t": 1}, {}, {}, Traffic(seconds=seconds))))
        for seconds in (0.0, 1.25, 123456.789, 1e-9)
    }
    assert len(sizes) == 1


def test_an_update_larger_than_its_job_is_refused():
    weights = {Key("all", "w"): torch.zeros(4, 8)}
    job = Job("train", 1, "c", ("t",), weights, PLAN, np.array([0, 5]), 0, 0, {})
    # 4 * 8 floats of four bytes, two rows and the seconds of eight; then 4 * 10 floats, and no rows
    assert answer_bytes(job) == 128 + 16 + 8
    fits = encode_update(Update(1, "c", ("t",), weights, np.array([0, 5]), {"t": 1}, {}))
    decode_update(fits, max_tensor_bytes=answer_bytes(job))
    large = encode_update(Update(1, "c", ("t",), {Key("all", "w"): torch.zeros(4, 10)}, None, {"t": 1}, {}))
    with pytest.raises(WireError, match="more than 152 bytes"):
        decode_update(large, max_tensor_bytes=answer_bytes(job))


def test_a_message_of_another_kind_is_refused():
    job = encode_job(Job("train", 1, "c", ("t",), {}, PLAN, None, 0, 0, {}))
    with pytest.raises(WireError, match="of another type came where update is due"):
        decode_update(job)


def test_what_cannot_be_sent_is_said_when_it_is_encoded():
    job = Job("train", 1, "c", ("t",), {Key("all", "w"): torch.zeros(1000)}, PLAN, None, 0, 0, {})
    with pytest.raises(WireError, match=r"is over wire.max_bytes, 1000"):
        encode_job(job, max_bytes=1000)


@pytest.mark.parametrize(
    "change",
    [{"traffic": Traffic(seconds=-1.0)}, {"traffic": Traffic(seconds=1e200)}, {"losses": {"sst2": 1e200}}],
    ids=["negative seconds", "endless seconds", "an enormous loss"],
)
def test_an_update_that_no_event_could_hold_is_refused(change):
    update = Update(1, "a", ("sst2",), {}, None, {"sst2": 1}, {"sst2": 0.5})
    decode_update(encode_update(update))
    with pytest.raises(WireError, match="an update's header is not whole"):
        decode_update(encode_update(replace(update, **change)))
