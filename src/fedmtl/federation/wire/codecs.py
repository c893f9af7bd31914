"""How tensors travel. `encode` chooses the bytes of one, `check` refuses bad ones, `decode` gives the tensor back.

raw    the tensor's memory
fp16   16-bit floats times a power of two, of the tensor
int8   8-bit integers with a scale for every block
topk   the largest entries of an update as 16-bit floats, and where they stand
rows   sorted indices

All are deterministic: rounding is to nearest, and no sum is taken. Sorted indices are gaps as variable-length numbers,
or a bitmap where that is shorter; the first byte says which. Keyed tensors stay encoded until somebody looks at one: a
client encodes its update once, to know what was lost, and a server that waits for a round to close holds the bytes of
each update, which belong to a file, and never more than one decoded tensor of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmtl.errors import WireError
from fedmtl.sharing.plan import Key

GAPS, BITMAP = 0, 1
# Seven bits a byte: five bytes hold an index below 2**35, and nobody has a tensor that large.
MOST_BYTES = 5

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def encode_indices(indices: Indices) -> Bytes:
    """The bytes of indices that rise strictly from 0 or more."""
    if not len(indices):
        return np.array([GAPS], dtype=np.uint8)
    gaps = _encode_gaps(np.diff(indices, prepend=-1) - 1)
    bitmap_size = int(indices[-1]) // 8 + 1
    if len(gaps) <= bitmap_size:
        return np.concatenate([np.array([GAPS], dtype=np.uint8), gaps])
    bits = np.zeros(8 * bitmap_size, dtype=np.uint8)
    bits[indices] = 1
    return np.concatenate([np.array([BITMAP], dtype=np.uint8), np.packbits(bits)])


def decode_indices(data: Bytes, count: int, end: int | None = None) -> Indices:
    """The `count` indices, all below `end`; a ValueError for any other bytes, before much memory is taken."""
    # One index takes a bit at least, and a bitmap is sent only where gaps would be longer.
    if len(data) < 1 or count > 8 * len(data) or len(data) > 1 + MOST_BYTES * count:
        raise ValueError(f"{len(data)} bytes cannot hold {count} indices")
    if data[0] == GAPS:
        gaps = _decode_gaps(data[1:])
        indices: Indices = np.cumsum(gaps + 1) - 1
    elif data[0] == BITMAP:
        indices = np.flatnonzero(np.unpackbits(data[1:]))
    else:
        raise ValueError(f"indices of the unknown kind {data[0]}")
    if len(indices) != count:
        raise ValueError(f"{len(indices)} indices came, {count} are due")
    if end is not None and count and indices[-1] >= end:
        raise ValueError(f"the index {indices[-1]} is past the end, {end}")
    return indices


def _encode_gaps(gaps: Indices) -> Bytes:
    lengths = np.ones(len(gaps), dtype=np.int64)
    for more in range(1, MOST_BYTES):
        lengths += gaps >= 1 << 7 * more
    starts = np.cumsum(lengths) - lengths
    encoded = np.empty(int(lengths.sum()), dtype=np.uint8)
    for position in range(int(lengths.max())):
        here = lengths > position
        follows = np.where(lengths[here] > position + 1, 0x80, 0)
        encoded[starts[here] + position] = (gaps[here] >> 7 * position) & 0x7F | follows
    return encoded


def _decode_gaps(data: Bytes) -> Indices:
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise ValueError("the last index is cut off")
    lengths = np.diff(ends, prepend=-1)
    starts = ends - lengths + 1
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > MOST_BYTES:
        raise ValueError("an index has too many bytes")
    gaps = np.zeros(len(ends), dtype=np.int64)
    for position in range(longest):
        here = lengths > position
        gaps[here] |= (data[starts[here] + position] & 0x7F).astype(np.int64) << 7 * position
    return gaps


# The most values that share a scale, and the fewest for which a row is cut evenly.
LONGEST_BLOCK, SHORTEST_BLOCK = 128, 32
# Values quantized in one go: few enough to stay in a core's cache.
CHUNK = 1 << 16
LARGEST = 127
# Scales are the upper half of a 32-bit float. From this pattern on 127 times the scale would overflow.
SCALE_END = 0x7C00
SMALLEST_SCALE = 2.0**-100
# Multiplied by two to this power, the largest value of a tensor comes to lie below the largest 16-bit float, 65504.
HALF_TOP = 15
MOST_EXPONENT = 114
DTYPES = {
    "f4": torch.float32,
    "f8": torch.float64,
    "f2": torch.float16,
    "i8": torch.int64,
    "i4": torch.int32,
    "u1": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ITEM_SIZES = {code: int(code[1]) for code in DTYPES}
FP16_HEAD = struct.Struct("<ixxxx")
INT8_HEAD = struct.Struct("<Ixxxx")
TOPK_HEAD = struct.Struct("<QQixxxx")


def block_length(shape: tuple[int, ...]) -> int:
    """How many values share a scale: an even part of a row, so that a row means the same in every slice."""
    width = shape[-1] if shape else 1
    for length in range(LONGEST_BLOCK, SHORTEST_BLOCK - 1, -1):
        if width % length == 0:
            return length
    return LONGEST_BLOCK


def to_int8(values: Tensor, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale of every block as upper float halves, and the values as multiples of it; flat float32 in."""
    padded = _padded(values, block)
    scales = torch.empty(len(padded), dtype=torch.float32)
    codes = torch.empty(padded.shape, dtype=torch.int8)
    step = max(1, CHUNK // block)
    for start in range(0, len(padded), step):
        part = padded[start : start + step]
        scale = _rounded_up(part.abs().amax(1).div_(LARGEST))
        scales[start : start + step] = scale
        # A block of zeros has scale 0, and 0 times anything but infinity is 0.
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        codes[start : start + step] = (part * inverse[:, None]).round_()
    halves = (scales.numpy().view(np.uint32) >> 16).astype(np.uint16)
    if bool((halves >= SCALE_END).any()):
        raise ValueError("holds values that are not numbers, or too large ones")
    return halves, codes.reshape(-1)[: len(values)].numpy()


def from_int8(halves: np.ndarray, codes: np.ndarray, block: int) -> Tensor:
    """The flat float32 values of `to_int8`."""
    scales = torch.from_numpy((halves.astype(np.uint32) << 16).view(np.float32))
    values = torch.empty(len(codes), dtype=torch.float32)
    source = torch.from_numpy(codes)
    values_whole, source_whole = _blocks(values, block), _blocks(source, block)
    step = max(1, CHUNK // block)
    for start in range(0, len(values_whole), step):
        part = values_whole[start : start + step]
        part.copy_(source_whole[start : start + step]).mul_(scales[start : start + len(part), None])
    rest = len(values_whole) * block
    if rest < len(values):
        values[rest:].copy_(source[rest:]).mul_(scales[-1])
    return values


def to_half(values: Tensor) -> tuple[int, np.ndarray]:
    """The exponent of a power of two, and the values times that power as 16-bit floats; flat float32 in.

    Without it small updates would fall among the subnormal numbers, and large ones overflow.
    """
    largest = max(map(abs, map(float, torch.aminmax(values)))) if len(values) else 0.0
    if not math.isfinite(largest):
        raise ValueError("holds values that are not numbers")
    exponent = HALF_TOP - max(math.frexp(largest)[1], HALF_TOP - MOST_EXPONENT)
    halves = torch.empty(len(values), dtype=torch.float16)
    for start in range(0, len(values), CHUNK):
        halves[start : start + CHUNK] = values[start : start + CHUNK] * 2.0**exponent
    return exponent, halves.numpy()


def from_half(exponent: int, halves: np.ndarray) -> Tensor:
    """The flat float32 values of `to_half`."""
    return torch.from_numpy(halves).float().mul_(2.0**-exponent)


def _padded(values: Tensor, block: int) -> Tensor:
    missing = -len(values) % block
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, block)


def _blocks(values: Tensor, block: int) -> Tensor:
    """The whole blocks, as a view."""
    return values[: len(values) // block * block].view(-1, block)


def _rounded_up(scales: Tensor) -> Tensor:
    """The next float whose lower half is zero, so that no value is past 127; tiny scales become 0."""
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    bits = scales.numpy().view(np.uint32)
    return torch.from_numpy(((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32))


@dataclass(frozen=True)
class Coded:
    """A tensor's bytes, and what is needed to read them; `dtype` is a code of DTYPES."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Codec:
    """`check` raises a ValueError for bytes from which `decode` could not make the tensor they claim to be."""

    check: Callable[[Coded], None]
    decode: Callable[[Coded], Tensor]


def encode(tensor: Tensor, codec: str, topk_share: float = 1.0) -> Coded:
    """The tensor under that codec of the config; vectors and whole numbers are few and stay exact under all of them."""
    tensor = tensor.detach().cpu().contiguous()
    if codec == "fp32" or tensor.dim() < 2 or not tensor.dtype.is_floating_point or not tensor.numel():
        return _coded("raw", tensor, tensor.reshape(-1).numpy().view(np.uint8))
    flat = tensor.reshape(-1).float()
    if codec == "fp16":
        exponent, halves = to_half(flat)
        return _coded(codec, tensor, _joined(FP16_HEAD.pack(exponent), halves))
    if codec == "int8":
        block = block_length(tuple(tensor.shape))
        return _coded(codec, tensor, _joined(INT8_HEAD.pack(block), *to_int8(flat, block)))
    assert codec == "topk", codec
    indices = largest_indices(flat, max(1, math.ceil(topk_share * len(flat))))
    exponent, halves = to_half(flat[torch.from_numpy(indices)])
    index = encode_indices(indices)
    head = TOPK_HEAD.pack(len(indices), len(index), exponent)
    return _coded(codec, tensor, _joined(head, halves, index))


def encode_rows(rows: np.ndarray) -> Coded:
    return Coded("rows", "i8", (len(rows),), encode_indices(rows))


def check(coded: Coded) -> None:
    """Raise a ValueError where the bytes are not what they claim; nothing of the tensor's size is taken for it."""
    if coded.codec not in CODECS or coded.dtype not in DTYPES:
        raise ValueError(f"unknown codec {coded.codec} of {coded.dtype}")
    if coded.codec not in ("raw", "rows") and not DTYPES[coded.dtype].is_floating_point:
        raise ValueError(f"codec {coded.codec} of {coded.dtype}")
    CODECS[coded.codec].check(coded)


def decode(coded: Coded) -> Tensor:
    """The tensor; of bytes that passed `check`."""
    return CODECS[coded.codec].decode(coded)


def largest_indices(values: Tensor, count: int) -> np.ndarray:
    """Where the `count` largest magnitudes stand, in order; of equal ones the first, so that a rerun agrees."""
    sizes = values.abs().numpy()
    if not np.isfinite(sizes.max()):
        raise ValueError("holds values that are not numbers")
    if count >= len(sizes):
        return np.arange(len(sizes))
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen = sizes > least
    chosen[np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _check_raw(coded: Coded) -> None:
    _expect_bytes(coded, coded.size * ITEM_SIZES[coded.dtype])


def _decode_raw(coded: Coded) -> Tensor:
    array = coded.data.view(np.dtype("<" + coded.dtype)).reshape(coded.shape)
    return torch.from_numpy(_usable(array))


def _check_fp16(coded: Coded) -> None:
    _expect_bytes(coded, FP16_HEAD.size + 2 * coded.size)
    _check_exponent(*FP16_HEAD.unpack_from(coded.data.data))


def _decode_fp16(coded: Coded) -> Tensor:
    (exponent,) = FP16_HEAD.unpack_from(coded.data.data)
    return _shaped(coded, from_half(exponent, _part(coded, FP16_HEAD.size, coded.size, "<f2")))


def _check_int8(coded: Coded) -> None:
    _expect_bytes(coded, INT8_HEAD.size, at_least=True)
    (block,) = INT8_HEAD.unpack_from(coded.data.data)
    if not 1 <= block <= LONGEST_BLOCK:
        raise ValueError(f"blocks of {block} values")
    _expect_bytes(coded, INT8_HEAD.size + 2 * -(-coded.size // block) + coded.size)
    if bool((_int8_scales(coded, block) >= SCALE_END).any()):
        raise ValueError("a scale is not a finite number")


def _decode_int8(coded: Coded) -> Tensor:
    (block,) = INT8_HEAD.unpack_from(coded.data.data)
    scales = _int8_scales(coded, block)
    codes = _part(coded, INT8_HEAD.size + scales.nbytes, coded.size, "i1")
    return _shaped(coded, from_int8(scales, codes, block))


def _int8_scales(coded: Coded, block: int) -> np.ndarray:
    return _part(coded, INT8_HEAD.size, -(-coded.size // block), "<u2")


def _check_topk(coded: Coded) -> None:
    _expect_bytes(coded, TOPK_HEAD.size, at_least=True)
    count, index_bytes, exponent = TOPK_HEAD.unpack_from(coded.data.data)
    _check_exponent(exponent)
    if count > coded.size:
        raise ValueError(f"{count} entries of {coded.size}")
    _expect_bytes(coded, TOPK_HEAD.size + 2 * count + index_bytes)
    decode_indices(coded.data[TOPK_HEAD.size + 2 * count :], count, coded.size)


def _decode_topk(coded: Coded) -> Tensor:
    count, _, exponent = TOPK_HEAD.unpack_from(coded.data.data)
    indices = decode_indices(coded.data[TOPK_HEAD.size + 2 * count :], count, coded.size)
    values = torch.zeros(coded.size)
    values[torch.from_numpy(indices)] = from_half(exponent, _part(coded, TOPK_HEAD.size, count, "<f2"))
    return _shaped(coded, values)


def _check_rows(coded: Coded) -> None:
    if coded.dtype != "i8" or len(coded.shape) != 1:
        raise ValueError("rows are a list of whole numbers")
    decode_indices(coded.data, coded.size)


def _decode_rows(coded: Coded) -> Tensor:
    return torch.from_numpy(decode_indices(coded.data, coded.size))


CODECS = {
    "raw": Codec(_check_raw, _decode_raw),
    "fp16": Codec(_check_fp16, _decode_fp16),
    "int8": Codec(_check_int8, _decode_int8),
    "topk": Codec(_check_topk, _decode_topk),
    "rows": Codec(_check_rows, _decode_rows),
}


def _coded(codec: str, tensor: Tensor, data: Bytes) -> Coded:
    return Coded(codec, CODES[tensor.dtype], tuple(tensor.shape), data)


def _joined(head: bytes, *parts: np.ndarray) -> Bytes:
    return np.concatenate([np.frombuffer(head, dtype=np.uint8), *(part.view(np.uint8) for part in parts)])


def _part(coded: Coded, start: int, count: int, dtype: str) -> np.ndarray:
    """Values of another type out of the bytes."""
    kind = np.dtype(dtype)
    return _usable(coded.data[start : start + count * kind.itemsize].view(kind))


def _usable(array: np.ndarray) -> np.ndarray:
    """A copy where torch would warn of read-only memory, or values do not lie where it wants them."""
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _shaped(coded: Coded, values: Tensor) -> Tensor:
    return values.view(coded.shape).to(DTYPES[coded.dtype])


def _check_exponent(exponent: int) -> None:
    if not -MOST_EXPONENT <= exponent <= MOST_EXPONENT:
        raise ValueError(f"a scale of two to the power of {exponent}")


def _expect_bytes(coded: Coded, expected: int, at_least: bool = False) -> None:
    if len(coded.data) < expected or (len(coded.data) > expected and not at_least):
        raise ValueError(f"a {coded.codec} tensor of {coded.shape} does not fit into {len(coded.data)} bytes")


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
