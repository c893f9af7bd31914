"""Keyed tensors that stay encoded until somebody looks at one.

A client encodes its update once, to know what was lost. A server that waits for a round to close holds the bytes of
each update, which belong to a file, and never more than one decoded tensor of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from fedmtl.errors import WireError
from fedmtl.federation.wire.codecs import Coded, decode, encode
from fedmtl.model.keys import Key


class CodedTensors(Mapping[Key, Tensor]):
    """Looks like weights; every look decodes anew."""

    def __init__(self, coded: Mapping[Key, Coded]) -> None:
        self.coded = coded

    def __getitem__(self, key: Key) -> Tensor:
        return decode(self.coded[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self.coded)

    def __len__(self) -> int:
        return len(self.coded)

    def __contains__(self, key: object) -> bool:
        return key in self.coded


def encode_tensors(
    tensors: Mapping[Key, Tensor], codec_of: Callable[[Key], str] = lambda key: "fp32", topk_share: float = 1.0
) -> CodedTensors:
    """Every tensor under its codec; tensors that are encoded already stay as they are."""
    if isinstance(tensors, CodedTensors):
        return tensors
    coded = {}
    for key, tensor in tensors.items():
        try:
            coded[key] = encode(tensor, codec_of(key), topk_share)
        except ValueError as error:
            raise WireError(f"{key.name} {error}") from error
    return CodedTensors(coded)
