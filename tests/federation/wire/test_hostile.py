"""What a stranger may send: the answer is a WireError, soon, and without much memory."""

import json
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.errors import WireError
from fedmtl.federation.messages import Job, Update
from fedmtl.federation.validate import expect, refusal
from fedmtl.federation.wire import decode_job, decode_update, encode_job, encode_update, unpack
from fedmtl.federation.wire.codecs import FP16_HEAD, INT8_HEAD, TOPK_HEAD, encode_tensors
from fedmtl.federation.wire.frame import CHECKSUM, FRAME, MAGIC, START, VERSION, checksum
from fedmtl.sharing.plan import Key, SharingPlan

PLAN = SharingPlan((("*", "all"),))
KEY = Key("all", "w")
WEIGHTS = {KEY: torch.linspace(-1, 1, 8 * 40).view(8, 40)}
ROWS = np.array([0, 1, 2, 3, 8, 9, 200, 30_000])
JOB = Job("train", 1, "c", ("t",), WEIGHTS, PLAN, ROWS, 0, 0, {})
HEADER = {
    "type": "update",
    "round": 1,
    "client": "c",
    "tasks": ["t"],
    "num_examples": {"t": 1},
    "losses": {},
    "sums": {},
    "seen": {"t": 1},
    "extra": {},
}
SECONDS = ["", "seconds", "raw", "f8", [1], 8]
LIMIT = 1 << 20
CODECS = ["fp32", "fp16", "int8", "topk"]


def frame_of(text: bytes, payload: bytes = b"") -> bytes:
    """A frame whose lengths and checksum are right, whatever it holds."""
    deflated = zlib.compress(text)
    deflated += b"\0" * (-(START + len(deflated)) % 8)
    head = FRAME.pack(MAGIC, VERSION, len(deflated), len(payload))
    return head + CHECKSUM.pack(checksum(head, deflated + payload)) + deflated + payload


def forged(*entries: list, payload: bytes = b"", **changes: object) -> bytes:
    """An update with these tensors; the seconds come first."""
    header = {**HEADER, **changes, "tensors": [SECONDS, *entries]}
    return frame_of(json.dumps(header).encode(), b"\0" * 8 + payload + b"\0" * (-len(payload) % 8))


def entry(codec: str, data: bytes, shape: list, dtype: str = "f4") -> bytes:
    return forged(["all", "w", codec, dtype, shape, len(data)], payload=data)


def extra_tensor(scope: str, dtype: str, count: int, name: str = "w") -> bytes:
    """An update of eight values with something of the capability `one`, and a tensor of so many zeros in this scope."""
    size = count * {"f4": 4, "u1": 1}[dtype]
    weight, more = ["all", "w", "raw", "f4", [8], 32], [scope, name, "raw", dtype, [count], size]
    return forged(weight, more, payload=b"\0" * (32 + size), extra={"one": {}})


def good(codec: str) -> np.ndarray:
    delta = encode_tensors(WEIGHTS, lambda key: codec, 0.2)
    return encode_update(Update(1, "c", ("t",), delta, ROWS, {"t": 1}, {}))


def fate(frame: object) -> str:
    """What a server makes of a message; anything but these three is a crash."""
    try:
        update, _ = decode_update(frame, LIMIT, 8 * 40 * 4 + 8 * len(ROWS) + 8)
    except WireError:
        return "no message"
    return "refused" if refusal(update, expect(JOB)) else "accepted"


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(data):
    with pytest.raises(WireError):
        unpack(data)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_flipped_byte_is_noticed(codec, data):
    frame = good(codec)
    assert fate(frame) == "accepted"
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    assert fate(frame) == "no message"


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@settings(max_examples=60)
def test_swapped_bytes_are_noticed(codec, data):
    frame = good(codec)
    a, b = (data.draw(st.integers(0, len(frame) - 1)) for _ in range(2))
    if frame[a] != frame[b]:
        frame[a], frame[b] = frame[b], frame[a]
        assert fate(frame) == "no message"


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_cut_anywhere_is_noticed(codec):
    frame = good(codec)
    assert {fate(frame[:length]) for length in range(0, len(frame), 7)} == {"no message"}
    assert fate(bytes(frame) + b"\0" * 8) == "no message"


@given(st.sampled_from(["raw", "fp16", "int8", "topk", "rows", "pickle"]), st.binary(max_size=100), st.data())
def test_a_tensor_of_any_bytes_leaves_no_bad_number(codec, content, data):
    shape = data.draw(st.lists(st.integers(0, 20), max_size=3))
    frame = entry(codec, content, shape, data.draw(st.sampled_from(["f4", "f8", "i8", "f2"])))
    try:
        update, _ = decode_update(frame, LIMIT, LIMIT)
    except WireError:
        return
    job = Job("train", 1, "c", ("t",), {KEY: torch.zeros(shape)}, PLAN, None, 0, 0, {})
    if refusal(update, expect(job)) is None:
        assert bool(torch.isfinite(update.delta[KEY]).all())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*HEADER, "tensors"]), JSON, max_size=3), JSON)
def test_a_header_of_any_values_is_a_wire_error_or_an_update_to_judge(changes, instead):
    header = {**HEADER, "tensors": [SECONDS], **changes}
    for text in (json.dumps(header), json.dumps(instead)):
        assert fate(frame_of(text.encode(), b"\0" * 8)) in ("no message", "refused", "accepted")
        with pytest.raises(WireError):
            decode_job(frame_of(text.encode(), b"\0" * 8))


@given(st.lists(JSON, max_size=7))
def test_a_tensor_described_by_any_values_is_a_wire_error(description):
    with pytest.raises(WireError):
        decode_update(forged(description))


BIG = 1 << 40
INT8_ONE = INT8_HEAD.pack(4)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pickle.dumps({"a": 1}) * 20, "not a fedmtl frame"),
        (struct.pack(FRAME.format, MAGIC, VERSION, 10, 10 * 2**30) + b"0123" + b"0123456789", "bytes"),
        (struct.pack(FRAME.format, MAGIC, VERSION - 1, 0, 0) + b"0123", "of this version"),
        (frame_of(b"[" * 100_000), "not whole"),
        (frame_of(b'{"a": NaN}'), "tensors"),
        (frame_of(b" " * 10_000_000), "too large"),
        (frame_of(b"\xff\xfe"), "not whole"),
        (entry("raw", b"", [1_000_000]), "more than"),
        (entry("raw", b"0123", [2]), "does not fit"),
        (entry("raw", b"", [0, BIG, BIG, BIG]), "more than"),
        (entry("raw", b"", [-1]), "shape"),
        (entry("raw", b"", [True]), "shape"),
        (entry("raw", b"", [0] * 9), "shape"),
        (entry("gzip", b"0123", [1]), "unknown codec"),
        (entry("raw", b"0123", [1], "O"), "described by"),
        (entry("int8", INT8_ONE + struct.pack("<H4b", 0x7F80, 1, 1, 1, 1), [1, 4]), "scale"),
        (entry("int8", INT8_ONE + struct.pack("<H4b", 0x7FC0, 1, 1, 1, 1), [1, 4]), "scale"),
        (entry("int8", INT8_ONE + struct.pack("<H4b", 0xBF80, 1, 1, 1, 1), [1, 4]), "scale"),
        (entry("int8", INT8_HEAD.pack(0) + b"\0" * 4, [1, 4]), "blocks of 0"),
        (entry("int8", INT8_HEAD.pack(1 << 31) + b"\0" * 4, [1, 4]), "blocks of"),
        (entry("int8", b"\0", [1, 4]), "does not fit"),
        (entry("int8", INT8_ONE + b"\0" * 6, [1, 4], "i8"), "codec int8 of i8"),
        (entry("fp16", FP16_HEAD.pack(2**30) + b"\0" * 8, [1, 4]), "to the power"),
        (entry("topk", TOPK_HEAD.pack(1, 2, 0) + b"\0\0" + b"\0\x04", [1, 4]), "past the end"),
        (entry("topk", TOPK_HEAD.pack(5, 2, 0) + b"\0" * 12, [1, 4]), "5 entries of 4"),
        (entry("topk", TOPK_HEAD.pack(2**63, 2**63, 0), [1, 4]), "entries of"),
        (entry("topk", TOPK_HEAD.pack(0, 1, 0) + b"\0", [BIG]), "more than"),
        (entry("rows", b"\0" + b"\x80" * 9 + b"\1", [1], "i8"), "cannot hold|too many bytes"),
        (entry("rows", b"\1" + b"\xff" * 4, [1], "i8"), "32 indices came"),
        (forged(["all", "w", "raw", "f4", [1], 4], ["all", "w", "raw", "f4", [1], 4], payload=b"0" * 16), "twice"),
        (forged(payload=b"0" * 8), "are described"),
        (forged(tasks=[["t"]]), "list of names"),
        (forged(tasks=[str(number) for number in range(5000)]), "list of names"),
        (forged(client="c" * 1000), "not a name"),
        (forged(client="[/b]"), "not a name"),
        (forged(client="\x1b[2J"), "not a name"),
        (forged(tasks=["<b>"]), "list of names"),
        (forged(losses={"other": 1.0}), "without examples"),
        (forged(num_examples={"t": 10**400}), "examples"),
        (forged(num_examples={"t": 1.5}), "examples"),
        (forged(seen={"t": -1}), "examples"),
        (forged(seen={"u": 1}), "seen without examples"),
        (forged(extra=[]), "not values by capability"),
        (forged(extra={"a/b": {}}), "not values by capability"),
        (forged(extra={"<b>": {}}), "not values by capability"),
        (forged(extra={"\x1b[2J": {}}), "not values by capability"),
        (forged(extra={"c" * 1000: {}}), "not values by capability"),
        (forged(extra={f"c{number}": {} for number in range(101)}), "not values by capability"),
        (forged(extra={"one": 5}), "values have no names"),
        (forged(extra={"one": [["conflicts", 1]]}), "values have no names"),
        (extra_tensor("extra/two/slot/all", "f4", 8), "not whole"),
        (extra_tensor("extra/one", "f4", 8), "not whole"),
        (extra_tensor("extra/one/slot", "f4", 8), "not whole"),
        (extra_tensor("extra//slot/all", "f4", 8), "not whole"),
        (extra_tensor("extra/one/<b>/all", "f4", 8), "no slot of their own"),
        (extra_tensor("extra/one//all", "f4", 8), "no slot of their own"),
        (extra_tensor("extra/one/\x1b[2J/all", "f4", 8), "no slot of their own"),
        # No client sends masks, whatever their size.
        (extra_tensor("bits/one/slot/all", "u1", 1), "not whole"),
        (extra_tensor("bits/one/slot/all", "u1", 2), "not whole"),
        (forged(round=float("inf")), "not whole"),
        (forged(["", "rows", "raw", "i8", [1], 8], payload=b"0" * 8), "not a list of rows"),
    ],
)
def test_each_is_refused_by_its_name_and_takes_no_memory(frame, reason):
    tracemalloc.start()
    with pytest.raises(WireError, match=reason) as refused:
        decode_update(frame, LIMIT, LIMIT)
    assert len(str(refused.value)) < 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * LIMIT


JOB_HEADER = {
    "type": "job",
    "kind": "train",
    "round": 1,
    "client": "c",
    "tasks": ["t"],
    "plan": PLAN.to_dict(),
    "seed": 0,
    "state_round": 0,
    "settings": {},
    "fixed": {},
    "codecs": {"down": "fp32", "up": "fp32", "topk_share": 1.0, "error_feedback": True},
    "extra": {},
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "delete"}, "a job of another kind"),
        ({"kind": ["train"]}, "a job of another kind"),
        ({"round": "1"}, "not a round"),
        ({"round": True}, "not a round"),
        ({"round": 1.5}, "not a round"),
        ({"state_round": -1}, "not a round"),
        ({"seed": 1 << 70}, "not a seed"),
        ({"client": ["c"]}, "not a name"),
        ({"plan": 5}, "its content cannot be read"),
        ({"plan": {"rules": [["*", 1]], "groups": []}}, "its rules cannot be read"),
        ({"plan": {"rules": [["*", "group"]], "groups": []}}, "a depth of groups"),
        ({"plan": {"rules": [["*", "all"]], "groups": [7]}}, "its groups cannot be read"),
        ({"settings": 3}, "not values by name"),
        ({"settings": [["batch_size", 1]]}, "not values by name"),
        ({"fixed": 3}, "not digests by name"),
        ({"fixed": {"w": "../../x"}}, "hexadecimal"),
        ({"fixed": {"w": "/etc/passwd"}}, "hexadecimal"),
        ({"codecs": {"down": "fp32", "up": "pickle", "topk_share": 1.0, "error_feedback": True}}, "not codecs"),
        ({"codecs": {"down": "fp32", "up": "topk", "topk_share": float("nan"), "error_feedback": True}}, "not codecs"),
        ({"codecs": {"down": "fp32", "up": "fp32", "topk_share": 1.0, "error_feedback": 1}}, "not codecs"),
        ({"extra": [["one", {}]]}, "not values by capability"),
        ({"extra": {"../x": {}}}, "not values by capability"),
        ({"extra": {f"c{number}": {} for number in range(101)}}, "not values by capability"),
        ({"extra": {"one": 1}}, "values have no names"),
    ],
)
def test_a_job_is_refused_for_what_no_server_of_ours_sends(changes, reason):
    good = frame_of(json.dumps({**JOB_HEADER, "tensors": []}).encode())
    assert decode_job(good).client == "c"
    bad = frame_of(json.dumps({**JOB_HEADER, "tensors": [], **changes}).encode())
    with pytest.raises(WireError, match=reason):
        decode_job(bad)


def test_a_tensor_of_a_capability_is_read_where_others_are_refused():
    update, _ = decode_update(extra_tensor("extra/one/slot/all", "f4", 8), LIMIT, LIMIT)
    assert update.extra["one"].slot("slot")[KEY].tolist() == [0.0] * 8


def masked_job(*entries: tuple[str, str, int], name: str = "w") -> bytes:
    """A job of eight values, with tensors of so many zeros in these scopes."""
    sizes = [count * {"f4": 4, "u1": 1}[dtype] for _, dtype, count in entries]
    tensors = [["all", "w", "raw", "f4", [8], 32]]
    tensors += [
        [scope, name, "raw", dtype, [count], size] for (scope, dtype, count), size in zip(entries, sizes, strict=True)
    ]
    header = {**JOB_HEADER, "extra": {"one": {}}, "tensors": tensors}
    payload = b"\0" * 32 + b"".join(b"\0" * (size + -size % 8) for size in sizes)
    return frame_of(json.dumps(header).encode(), payload)


def test_as_many_masks_as_a_capability_may_have_are_read():
    masks = [(f"bits/one/m{number}/all", "u1", 1) for number in range(8)]
    found = decode_job(masked_job(*masks)).extra["one"]
    assert [found.slot(f"m{number}")[KEY].tolist() for number in range(8)] == [[False] * 8] * 8
    with pytest.raises(WireError, match="more masks than any capability sends"):
        decode_job(masked_job(*masks, ("bits/one/m8/all", "u1", 1)))


@pytest.mark.parametrize(
    ("entries", "name", "reason"),
    [
        ([("extra/two/slot/all", "f4", 8)], "w", "not whole"),
        ([("bits/two/slot/all", "u1", 1)], "w", "not whole"),
        ([("bits/one/slot", "u1", 1)], "w", "not whole"),
        ([("bits/one/slot/all", "u1", 1)], "v", "not whole"),
        ([("bits/one/slot/task:t", "u1", 1)], "w", "not whole"),
        ([("bits/one/<b>/all", "u1", 1)], "w", "no slot of their own"),
        ([("bits/one/slot/all", "u1", 2)], "w", "does not fit its weight"),
        ([("bits/one/slot/all", "u1", 0)], "w", "does not fit its weight"),
        ([("bits/one/slot/all", "f4", 1)], "w", "does not fit its weight"),
        ([("bits/one/slot/all", "u1", 1), ("extra/one/slot/all", "f4", 8)], "w", "no slot of their own"),
        ([("extra/one/slot/all", "f4", 8), ("bits/one/slot/all", "u1", 1)], "w", "no slot of their own"),
    ],
)
def test_a_job_with_tensors_of_no_capability_or_masks_of_no_weight_is_refused(entries, name, reason):
    with pytest.raises(WireError, match=reason):
        decode_job(masked_job(*entries, name=name))


@pytest.mark.parametrize(
    "changes",
    [
        {"round": "1"},
        {"round": 1.9},
        {"round": True},
        {"sums": [["t", {}]]},
        {"sums": {"t": 5}},
        {"losses": {"t": "0.5"}},
        {"extra": {"one": ["1"]}},
    ],
)
def test_an_updates_values_are_of_their_own_type(changes):
    assert fate(forged()) == "refused"  # Whole, and not what the job asked for.
    assert fate(forged(**changes)) == "no message"


@pytest.mark.parametrize(
    ("value", "times"), [("[]", 1_500_000), ("{}", 1_500_000), ("[[[[]]]]", 400_000), ("999", 2_500_000)]
)
def test_a_header_of_many_small_values_takes_no_memory(value, times):
    # Some random letters, so that the rest may inflate to what it does: 3 to 10 MB that would take about 100.
    padding = np.random.default_rng(1).integers(97, 123, times // 4, dtype=np.uint8).tobytes().decode()
    text = (
        json.dumps({**HEADER, "tensors": [SECONDS], "padding": padding})[:-1]
        + f', "x": [{",".join([value] * times)}]}}'
    )
    frame = frame_of(text.encode(), b"\0" * 8)
    del text, padding
    tracemalloc.start()
    with pytest.raises(WireError, match="too many values"):
        decode_update(frame, 1 << 30, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * LIMIT


def test_other_rows_than_those_sent_are_refused():
    for rows in ([0, 1, 2, 3, 8, 9, 200, 30_001], [0, 1, 2, 3, 8, 9, 200, 2**34]):
        update = Update(1, "c", ("t",), WEIGHTS, np.array(rows), {"t": 1}, {})
        assert fate(encode_update(update)) == "refused"


def test_half_floats_that_are_no_numbers_are_refused():
    for bad in (0x7C00, 0x7E00, 0xFC00):
        frame = good("fp16")
        update, _ = decode_update(frame)
        coded = update.delta.coded[KEY]
        coded.data[FP16_HEAD.size : FP16_HEAD.size + 2] = np.frombuffer(struct.pack("<H", bad), dtype=np.uint8)
        assert "not numbers" in (refusal(update, expect(JOB)) or "")


def test_a_job_over_the_limit_is_not_read():
    with pytest.raises(WireError, match=r"wire.max_bytes is 1000"):
        decode_job(encode_job(JOB), max_bytes=1000)
    # int8 fits into the message's limit, but not what it decodes to
    delta = encode_tensors({KEY: torch.zeros(100, 100)}, lambda key: "int8")
    frame = encode_update(Update(1, "c", ("t",), delta, None, {"t": 1}, {}))
    assert len(frame) < 20_000
    with pytest.raises(WireError, match="more than 20000 bytes"):
        decode_update(frame, max_bytes=20_000)
