"""Triton kernels for a stacked BERT: attention within short sequences, and sums that are normalized.

Masks of dropout are not stored: a kernel draws them from a seed on the device and the index of each value, and the
backward pass draws them again. `p` is the share that is dropped, `grown` what the others are multiplied by.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(bits):
    """MurmurHash3's last step: every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _keep_mask(seed, site, at, p):
    """Which values dropout leaves. Two keyed hashes: Philox would take longer than all else a kernel does."""
    key = tl.load(seed) + site
    first = _mixed(key.to(tl.uint32))
    second = _mixed((key >> 32).to(tl.uint32) ^ first)
    bits = _mixed(_mixed(at.to(tl.uint32) ^ first) + second)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= p


@triton.jit
def _row(of, bias, offsets, features, mask, columns_mask):
    """Values with a layer's bias added."""
    return (tl.load(of + offsets, mask, 0.0) + tl.load(bias + features, columns_mask, 0.0)[None, :]).to(
        of.dtype.element_ty
    )


@triton.jit
def _shares(query, key, inside, scale):
    """softmax(q k') over the keys that are there."""
    scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    raised = tl.exp(scores - tl.max(scores, 1)[:, None])
    return raised / tl.sum(raised, 1)[:, None]


@triton.jit
def attend_forward(
    joined, bias, stride, out, starts, lengths, seed, site, p, grown, scale, width, size, sequences,
    DROP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program per sequence and head; queries, keys and values lie side by side, without their bias."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, filled = rows < length, columns < size
    mask = inside[:, None] & filled[None, :]
    features = head * size + columns
    offsets = (start + rows)[:, None] * (3 * width) + features[None, :]
    bias += sequence // sequences * stride
    query = _row(joined, bias, offsets, features, mask, filled)
    key = _row(joined, bias, offsets + width, features + width, mask, filled)
    value = _row(joined, bias, offsets + 2 * width, features + 2 * width, mask, filled)
    shares = _shares(query, key, inside, scale)
    if DROP:
        cell = ((sequence * tl.num_programs(1) + head) * BLOCK + rows)[:, None] * BLOCK + rows[None, :]
        shares = tl.where(_keep_mask(seed, site, cell, p), shares * grown, 0.0)
    # Rows past the sequence have the bias for a value, and a share of nothing.
    mixed = tl.dot(shares.to(value.dtype), value)
    tl.store(out + (start + rows)[:, None] * width + features[None, :], mixed.to(out.dtype.element_ty), mask)


@triton.jit
def attend_backward(
    joined, bias, stride, gradient, back, starts, lengths, seed, site, p, grown, scale, width, size, sequences,
    DROP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, filled = rows < length, columns < size
    mask = inside[:, None] & filled[None, :]
    features = head * size + columns
    offsets = (start + rows)[:, None] * (3 * width) + features[None, :]
    bias += sequence // sequences * stride
    query = _row(joined, bias, offsets, features, mask, filled)
    key = _row(joined, bias, offsets + width, features + width, mask, filled)
    value = _row(joined, bias, offsets + 2 * width, features + 2 * width, mask, filled)
    given = tl.load(gradient + (start + rows)[:, None] * width + features[None, :], mask, 0.0)
    shares = _shares(query, key, inside, scale)
    by_share = tl.dot(given, tl.trans(value))
    dropped = shares
    if DROP:
        cell = ((sequence * tl.num_programs(1) + head) * BLOCK + rows)[:, None] * BLOCK + rows[None, :]
        keep = _keep_mask(seed, site, cell, p)
        dropped = tl.where(keep, shares * grown, 0.0)
        by_share = tl.where(keep, by_share * grown, 0.0)
    kind = value.dtype
    by_value = tl.dot(tl.trans(dropped.to(kind)), given)
    by_score = (shares * (by_share - tl.sum(by_share * shares, 1)[:, None]) * scale).to(kind)
    by_query, by_key = tl.dot(by_score, key), tl.dot(tl.trans(by_score), query)
    tl.store(back + offsets, by_query.to(kind), mask)
    tl.store(back + offsets + width, by_key.to(kind), mask)
    tl.store(back + offsets + 2 * width, by_value.to(kind), mask)


@triton.jit
def firsts_forward(
    asking, asking_bias, asking_stride, joined, bias, stride, out, starts, lengths, seed, site, p, grown, scale, width,
    size, sequences, DROP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One query per sequence; keys and values lie side by side."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, filled = rows < length, columns < size
    mask = inside[:, None] & filled[None, :]
    features = head * size + columns
    client = sequence // sequences
    offsets = (start + rows)[:, None] * (2 * width) + features[None, :]
    bias += client * stride
    key = _row(joined, bias, offsets, features, mask, filled).to(tl.float32)
    value = _row(joined, bias, offsets + width, features + width, mask, filled).to(tl.float32)
    query = tl.load(asking + sequence * width + features, filled, 0.0).to(tl.float32)
    query += tl.load(asking_bias + client * asking_stride + features, filled, 0.0).to(tl.float32)
    scores = tl.where(inside, tl.sum(key * query[None, :], 1) * scale, float("-inf"))
    raised = tl.exp(scores - tl.max(scores, 0))
    shares = raised / tl.sum(raised, 0)
    if DROP:
        cell = (sequence * tl.num_programs(1) + head) * BLOCK + rows
        shares = tl.where(_keep_mask(seed, site, cell, p), shares * grown, 0.0)
    mixed = tl.sum(shares[:, None] * value, 0)
    tl.store(out + sequence * width + features, mixed.to(out.dtype.element_ty), filled)


@triton.jit
def firsts_backward(
    asking, asking_bias, asking_stride, joined, bias, stride, gradient, back_asking, back, starts, lengths, seed, site,
    p, grown, scale, width, size, sequences, DROP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, filled = rows < length, columns < size
    mask = inside[:, None] & filled[None, :]
    features = head * size + columns
    client = sequence // sequences
    offsets = (start + rows)[:, None] * (2 * width) + features[None, :]
    bias += client * stride
    key = _row(joined, bias, offsets, features, mask, filled).to(tl.float32)
    value = _row(joined, bias, offsets + width, features + width, mask, filled).to(tl.float32)
    query = tl.load(asking + sequence * width + features, filled, 0.0).to(tl.float32)
    query += tl.load(asking_bias + client * asking_stride + features, filled, 0.0).to(tl.float32)
    given = tl.load(gradient + sequence * width + features, filled, 0.0).to(tl.float32)
    scores = tl.where(inside, tl.sum(key * query[None, :], 1) * scale, float("-inf"))
    raised = tl.exp(scores - tl.max(scores, 0))
    shares = raised / tl.sum(raised, 0)
    by_share = tl.sum(value * given[None, :], 1)
    dropped = shares
    if DROP:
        cell = (sequence * tl.num_programs(1) + head) * BLOCK + rows
        keep = _keep_mask(seed, site, cell, p)
        dropped = tl.where(keep, shares * grown, 0.0)
        by_share = tl.where(keep, by_share * grown, 0.0)
    by_score = shares * (by_share - tl.sum(by_share * shares, 0)) * scale
    kind = back.dtype.element_ty
    tl.store(back_asking + sequence * width + features, tl.sum(by_score[:, None] * key, 0).to(kind), filled)
    tl.store(back + offsets, (by_score[:, None] * query[None, :]).to(kind), mask)
    tl.store(back + offsets + width, (dropped[:, None] * given[None, :]).to(kind), mask)


@triton.jit
def norm_forward(
    inputs, added, residual, out, summed, means, scales, weight, bias, stride, seed, site, p, grown, epsilon, num_rows,
    width, HAS_SUM: tl.constexpr, DROP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of one client.

    With HAS_SUM a bias is `added` to the inputs, some are dropped and the residual joins them before they are
    normalized; without, some are dropped after.
    """
    client = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    filled = columns < width
    gamma = tl.load(weight + client * stride + columns, filled, 0.0).to(tl.float32)
    beta = tl.load(bias + client * stride + columns, filled, 0.0).to(tl.float32)
    if HAS_SUM:
        shift = tl.load(added + client * stride + columns, filled, 0.0).to(tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & filled[None, :]
        at = (client * num_rows + row)[:, None] * width + columns[None, :]
        value = tl.load(inputs + at, mask, 0.0).to(tl.float32)
        if HAS_SUM:
            value += shift[None, :]
            if DROP:
                value = tl.where(_keep_mask(seed, site, at, p), value * grown, 0.0)
            value += tl.load(residual + at, mask, 0.0).to(tl.float32)
            tl.store(summed + at, value.to(summed.dtype.element_ty), mask)
            value = value.to(summed.dtype.element_ty).to(tl.float32)
        mean = tl.sum(value, 1) / width
        centred = tl.where(filled[None, :], value - mean[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + epsilon)
        found = centred * scale[:, None] * gamma[None, :] + beta[None, :]
        if DROP and not HAS_SUM:
            found = tl.where(_keep_mask(seed, site, at, p), found * grown, 0.0)
        tl.store(out + at, found.to(out.dtype.element_ty), mask)
        tl.store(means + client * num_rows + row, mean, row < num_rows)
        tl.store(scales + client * num_rows + row, scale, row < num_rows)


@triton.jit
def norm_backward(
    gradient, summed, means, scales, weight, stride, back_inputs, back_residual, by_weight, by_bias, by_added, seed,
    site, p, grown, num_rows, width,
    HAS_SUM: tl.constexpr, DROP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same rows; each program writes its share of the gradients of weight and biases to a separate row."""
    client = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    filled = columns < width
    gamma = tl.load(weight + client * stride + columns, filled, 0.0).to(tl.float32)
    weight_total = tl.zeros((BLOCK,), tl.float32)
    bias_total = tl.zeros((BLOCK,), tl.float32)
    added_total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & filled[None, :]
        at = (client * num_rows + row)[:, None] * width + columns[None, :]
        given = tl.load(gradient + at, mask, 0.0).to(tl.float32)
        if DROP and not HAS_SUM:
            given = tl.where(_keep_mask(seed, site, at, p), given * grown, 0.0)
        mean = tl.load(means + client * num_rows + row, row < num_rows, 0.0)
        scale = tl.load(scales + client * num_rows + row, row < num_rows, 0.0)
        value = tl.load(summed + at, mask, 0.0).to(tl.float32)
        normal = tl.where(mask, (value - mean[:, None]) * scale[:, None], 0.0)
        weight_total += tl.sum(given * normal, 0)
        bias_total += tl.sum(given, 0)
        scaled = given * gamma[None, :]
        shift = tl.sum(scaled, 1) / width
        tilt = tl.sum(scaled * normal, 1) / width
        moved = (scaled - shift[:, None] - normal * tilt[:, None]) * scale[:, None]
        kind = back_inputs.dtype.element_ty
        if HAS_SUM:
            tl.store(back_residual + at, moved.to(kind), mask)
            if DROP:
                moved = tl.where(_keep_mask(seed, site, at, p), moved * grown, 0.0)
            added_total += tl.sum(tl.where(mask, moved, 0.0), 0)
        tl.store(back_inputs + at, moved.to(kind), mask)
    share = (client * tl.num_programs(0) + tl.program_id(0)) * width + columns
    tl.store(by_weight + share, weight_total, filled)
    tl.store(by_bias + share, bias_total, filled)
    if HAS_SUM:
        tl.store(by_added + share, added_total, filled)


@triton.jit
def gelu_forward(
    inputs, bias, stride, out, num_rows, width, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """GELU of some rows and columns of one client, a bias added first."""
    client = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    filled = columns < width
    shift = tl.load(bias + client * stride + columns, filled, 0.0).to(tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & filled[None, :]
        at = (client * num_rows + row)[:, None] * width + columns[None, :]
        value = tl.load(inputs + at, mask, 0.0).to(tl.float32) + shift[None, :]
        found = value * 0.5 * (1 + tl.erf(value * 0.7071067811865476))
        tl.store(out + at, found.to(out.dtype.element_ty), mask)


@triton.jit
def gelu_backward(
    inputs, bias, stride, gradient, back, by_bias, num_rows, width,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    filled = columns < width
    shift = tl.load(bias + client * stride + columns, filled, 0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & filled[None, :]
        at = (client * num_rows + row)[:, None] * width + columns[None, :]
        value = tl.load(inputs + at, mask, 0.0).to(tl.float32) + shift[None, :]
        slope = 0.5 * (1 + tl.erf(value * 0.7071067811865476))
        slope += value * tl.exp(-0.5 * value * value) * 0.3989422804014327
        moved = tl.load(gradient + at, mask, 0.0).to(tl.float32) * slope
        total += tl.sum(moved, 0)
        tl.store(back + at, moved.to(back.dtype.element_ty), mask)
    tl.store(by_bias + (client * tl.num_programs(0) + tl.program_id(0)) * width + columns, total, filled)


@triton.jit
def _gram(of, width, first, first_length, second, second_length, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The products of all pairs of tokens of two sequences, in single precision."""
    rows = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, width, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        filled = (columns < width)[None, :]
        left = tl.load(of + (first + rows)[:, None] * width + columns[None, :],
                       (rows < first_length)[:, None] & filled, 0.0)  # fmt: skip
        right = tl.load(of + (second + rows)[:, None] * width + columns[None, :],
                        (rows < second_length)[:, None] & filled, 0.0)  # fmt: skip
        found = tl.dot(left, tl.trans(right), found)
    return found


@triton.jit
def linear_squares(
    inputs, gradient, starts, lengths, found, aligned, inner, outer, num_examples, sequences,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per example: the sum over pairs (s, t) of its tokens of (a_s . a_t) (g_s . g_t), and the square of
    the sum over its tokens of |a_t| |g_t|, as if all of them pointed the same way."""
    example = tl.program_id(0)
    base = example // num_examples * sequences + example % num_examples
    rows = tl.arange(0, BLOCK)
    total = 0.0
    norms = 0.0
    for one in tl.static_range(PARTS):
        for other in tl.static_range(one + 1):
            first, second = base + one * num_examples, base + other * num_examples
            first_start, first_length = tl.load(starts + first), tl.load(lengths + first)
            second_start, second_length = tl.load(starts + second), tl.load(lengths + second)
            given = _gram(gradient, outer, first_start, first_length, second_start, second_length, BLOCK, CHUNK)
            seen = _gram(inputs, inner, first_start, first_length, second_start, second_length, BLOCK, CHUNK)
            if BIAS:
                seen += 1.0
            both = seen * given
            total += tl.sum(tl.sum(both, 1), 0) * (1.0 if one == other else 2.0)
            if one == other:
                of_tokens = tl.sum(tl.where(rows[:, None] == rows[None, :], both, 0.0), 1)
                norms += tl.sum(tl.sqrt(tl.maximum(of_tokens, 0.0)), 0)
    tl.store(found + example, total)
    tl.store(aligned + example, norms * norms)


@triton.jit
def example_sums(
    values, starts, lengths, found, width, num_examples, sequences,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per example and some columns: the sum over its tokens, in their order."""
    example = tl.program_id(0)
    base = example // num_examples * sequences + example % num_examples
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    filled = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        start, length = tl.load(starts + base + part * num_examples), tl.load(lengths + base + part * num_examples)
        for first in range(0, length, ROWS):
            row = first + tl.arange(0, ROWS)
            mask = (row < length)[:, None] & filled[None, :]
            at = (start + row)[:, None] * width + columns[None, :]
            total += tl.sum(tl.load(values + at, mask, 0.0).to(tl.float32), 0)
    tl.store(found + example.to(tl.int64) * width + columns, total, filled)
