import numpy as np
import torch

from fedmtl.federation.wire import pack, unpack
from fedmtl.federation.wire.frame import ALIGN
from fedmtl.sharing.plan import Key


def test_tensors_are_views_of_the_frame_where_they_can_be():
    frame = pack({"a": 1}, {Key("all", "odd"): torch.ones(3), Key("all", "w"): torch.arange(5.0)})
    header, tensors = unpack(frame)
    assert header == {"a": 1}
    assert list(tensors) == [Key("all", "odd"), Key("all", "w")]
    tensors[Key("all", "w")][0] = 7.0
    assert unpack_unchecked(frame) == 7.0
    assert len(frame) % ALIGN == 0


def unpack_unchecked(frame: np.ndarray) -> float:
    # the last 24 bytes are five floats and their padding
    return float(torch.frombuffer(frame, dtype=torch.float32, offset=len(frame) - 24, count=1))


def test_a_header_of_repeated_names_is_deflated():
    tensors = {Key("all", f"encoder.layer.{number}.attention.self.query.bias"): torch.zeros(1) for number in range(100)}
    assert len(pack({}, tensors)) < 100 * 8 + 1500
