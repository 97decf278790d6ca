"""Attention by AMX, over rows of bf16 that lie as its tiles want them.

Tokens of a slot that follow each other share products: up to 16 rows, a row being a token's head, of those that share
keys. Each row's sums have an order of their own, so nothing depends on who else is in the pass. Positions of a stretch
lie in one block of 32, whose values are copied where not every row may see all of them.

The formula is that of `slackwater.engine.torch.kernels.attention`. Products of queries and keys are exact, their sums
float32. Weights go into products as two bf16, the nearest and the nearest to what is left: 16 bits of precision.
"""

from functools import cache
from typing import Any

import numpy as np

from slackwater.checkpoint.jit import array_at, entry, float_of, kernel, summing_kernel
from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.attention import exp
from slackwater.engine.torch.kernels.bf16 import rounded

(
    SHAPES, SCRATCH, SCRATCH_BYTES, SLOTS, PLACES, STRETCHES, HEADS, KV_HEADS, SIZE, WIDTH,
    KEYS, VALUES, QUERY, QUERY_TOKEN, QUERY_HEAD, OUT, SCALE, KEY_IN, VALUE_IN, IN_TOKEN, IN_HEAD,
) = range(21)  # fmt: skip
"""Words of the jobs.

``SLOTS``, ``PLACES``: addresses of a slot and a position per token. ``STRETCHES``: of pairs, first token and how many.
``KEYS``: uint16 ``[slots, kv_heads, size / 2, width, 2]``, ``VALUES``: ``[slots, kv_heads, width / 2, size, 2]``.
``QUERY``, ``KEY_IN``, ``VALUE_IN``: bf16, with strides of tokens and heads in elements. ``OUT``: bf16
``[tokens, heads, size]``. ``SCALE``: bits of a float32.
"""
WORDS = 21
BLOCK = 32
"""Positions that are mixed at once; those of a stretch lie in one."""


def scratch_bytes(size: int, width: int) -> int:
    """What a thread needs: queries, scores, weights twice, the last values, and a tile of sums."""
    row = width + 48
    return 64 * (-(-(32 * size + 64 * row + 64 * row + 64 * size + 4096 + 64) // 64))


def _put(address: int, number: int, _thread: int) -> None:
    job = array_at(address, WORDS, np.int64)
    size, width, kv_heads = job[SIZE], job[WIDTH], job[KV_HEADS]
    token, head = number // kv_heads, number % kv_heads
    slot, place = array_at(job[SLOTS], token + 1, np.int64)[token], array_at(job[PLACES], token + 1, np.int64)[token]
    base = (slot * kv_heads + head) * size * width * 2
    came = (token * job[IN_TOKEN] + head * job[IN_HEAD]) * 2
    pairs = array_at(job[KEY_IN] + came, size // 2, np.uint32)
    keys = array_at(job[KEYS] + base, size // 2 * width, np.uint32)
    for pair in range(size // 2):
        keys[pair * width + place] = pairs[pair]
    states = array_at(job[VALUE_IN] + came, size, np.uint16)
    values = array_at(job[VALUES] + base + (place // 2 * size * 2 + place % 2) * 2, size * 2, np.uint16)
    for at in range(size):
        values[2 * at] = states[at]


@kernel
def _gather(job: Any, token: int, count: int, head: int, query: int) -> None:
    """Put the queries of a stretch into rows: tokens, and of each the heads that share keys."""
    size, group = job[SIZE], job[HEADS] // job[KV_HEADS]
    for row in range(count * group):
        at = (token + row // group) * job[QUERY_TOKEN] + (head * group + row % group) * job[QUERY_HEAD]
        source, target = (
            array_at(job[QUERY] + at * 2, size, np.uint16),
            array_at(query + row * size * 2, size, np.uint16),
        )
        target[:] = source


@kernel
def _score(query: int, size: int, keys: int, width: int, length: int, scores: int, stride: int) -> None:
    """Queries by keys, 32 positions at a time: float32 ``[16, length]``."""
    for place in range(0, length, 32):
        tiles.zero(0)
        tiles.zero(1)
        for at in range(0, size, 32):
            tiles.load(4, query + at * 2, size * 2)
            tiles.load(6, keys + (at // 2 * width + place) * 4, width * 4)
            tiles.load(7, keys + (at // 2 * width + place + 16) * 4, width * 4)
            tiles.multiply(0, 4, 6)
            tiles.multiply(1, 4, 7)
        tiles.store(0, scores + place * 4, stride * 4)
        tiles.store(1, scores + (place + 16) * 4, stride * 4)


@summing_kernel
def _largest(scores: Any, count: int) -> Any:
    """NaN where one is NaN. Floats are compared by integers of the same order, which go many at a time."""
    most, total = np.int32(-0x7FFFFFFF), np.float32(0.0)
    for at in range(count):
        bits = np.float32(scores[at]).view(np.int32)
        most = max(most, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        total += scores[at]
    largest = np.int32(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    return largest if total == total else total  # noqa: PLR0124  # NaN alone differs from itself


@summing_kernel
def _weigh(scores: Any, count: int, most: Any, scale: Any, high: Any, low: Any) -> Any:
    """Weights, not yet divided by their sum, which is returned."""
    total = np.float32(0.0)
    for at in range(count):
        weight = exp((scores[at] - most) * scale)
        total += weight
        near = rounded(weight)
        high[at] = near
        low[at] = rounded(weight - float_of(near))
    return total


@kernel
def _end(values: int, size: int, begin: int, first: int, count: int, end: int) -> int:
    """Copy the last 32 positions' values: zeros from the ``count``-th on, and for numbers that aren't finite from the
    ``first``-th on, which not every row of a product may see.

    Returns:
        The first position of such a number; ``count`` where there is none. Rows that see it get no numbers.
    """
    source, target = array_at(values + begin * size * 2, 32 * size, np.uint16), array_at(end, 32 * size, np.uint16)
    whole = (first - begin) // 2 * 2 * size
    for at in range(whole):
        target[at] = source[at]
    spoilt = count
    for at in range(whole, 32 * size):
        place = begin + at // (2 * size) * 2 + at % 2
        bits = source[at] if place < count else np.uint16(0)
        if place >= first and bits & np.uint16(0x7F80) == np.uint16(0x7F80):
            spoilt, bits = min(spoilt, place), np.uint16(0)
        target[at] = bits
    return spoilt


@kernel
def _mix(
    high: int, low: int, stride: int, values: int, size: int, length: int, end: int, first: int, sums: int
) -> None:
    """Weights by 64 dimensions of the values from ``first`` on: four tiles, one after another.

    ``end`` stands for the last 32 positions; 0 where they are as all rows may see them.
    """
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for place in range(0, length, 32):
        last = end != 0 and place + 32 == length
        at = (end if last else values + place * size * 2) + first * 4
        tiles.load(4, high + place * 2, stride * 2)
        tiles.load(5, low + place * 2, stride * 2)
        tiles.load(6, at, size * 4)
        tiles.load(7, at + 64, size * 4)
        tiles.multiply(0, 4, 6)
        tiles.multiply(0, 5, 6)
        tiles.multiply(1, 4, 7)
        tiles.multiply(1, 5, 7)
        if size - first > tiles.DEPTH:
            tiles.load(6, at + 128, size * 4)
            tiles.load(7, at + 192, size * 4)
            tiles.multiply(2, 4, 6)
            tiles.multiply(2, 5, 6)
            tiles.multiply(3, 4, 7)
            tiles.multiply(3, 5, 7)
    tiles.store(0, sums, 64)
    tiles.store(1, sums + 1024, 64)
    tiles.store(2, sums + 2048, 64)
    tiles.store(3, sums + 3072, 64)


@kernel
def _soften(job: Any, places: Any, token: int, rows: int, group: int, scores: int, stride: int, weights: int,
            totals: Any) -> None:  # fmt: skip
    """Each row's weights over exactly the positions that its token may see; zeros for the rest of the last tile."""
    scale, low = np.uint32(job[SCALE]).view(np.float32), weights + 32 * stride
    for row in range(rows):
        count = places[token + row // group] + 1
        of_row = array_at(scores + row * stride * 4, stride, np.float32)
        near = array_at(weights + row * stride * 2, stride, np.uint16)
        rest = array_at(low + row * stride * 2, stride, np.uint16)
        most = _largest(of_row, count)
        totals[row] = _weigh(of_row, count, most, scale, near, rest) if most < np.inf else np.float32(np.nan)
        near[count:] = np.uint16(0)
        rest[count:] = np.uint16(0)


@kernel
def _write(job: Any, token: int, rows: int, head: int, first: int, sums: Any, totals: Any) -> None:
    size, group = job[SIZE], job[HEADS] // job[KV_HEADS]
    for row in range(rows):
        at = ((token + row // group) * job[HEADS] + head * group + row % group) * size + first
        for tile in range(min(size - first, 64) // 16):
            out = array_at(job[OUT] + (at + tile * 16) * 2, 16, np.uint16)
            for d in range(16):
                out[d] = rounded(sums[tile * 256 + row * 16 + d] / totals[row])


def _attend(address: int, number: int, thread: int) -> None:
    job = array_at(address, WORDS, np.int64)
    size, width, kv_heads = job[SIZE], job[WIDTH], job[KV_HEADS]
    group, stretch, head = job[HEADS] // kv_heads, number // kv_heads, number % kv_heads
    pair = array_at(job[STRETCHES] + stretch * 16, 2, np.int64)
    token, rows = pair[0], pair[1] * group
    places = array_at(job[PLACES], token + pair[1], np.int64)
    base = (array_at(job[SLOTS], token + 1, np.int64)[token] * kv_heads + head) * size * width * 2
    count = places[token + pair[1] - 1] + 1
    length = (count + 31) // 32 * 32
    stride = length + 16

    query = job[SCRATCH] + thread * job[SCRATCH_BYTES]
    sums = query + 32 * size
    totals = array_at(sums + 4096, 16, np.float32)
    end = sums + 4096 + 64
    scores = end + 64 * size
    weights = scores + 64 * stride

    tiles.configure(job[SHAPES])
    _gather(job, token, pair[1], head, query)
    _score(query, size, job[KEYS] + base, width, length, scores, stride)
    _soften(job, places, token, rows, group, scores, stride, weights, totals)
    if count < length or pair[1] > 1:
        spoilt = _end(job[VALUES] + base, size, length - 32, places[token] + 1, count, end)
        for row in range(rows):
            if places[token + row // group] >= spoilt:
                totals[row] = np.float32(np.nan)
    else:
        end = 0
    for first in range(0, size, 64):
        _mix(weights, weights + 32 * stride, stride, job[VALUES] + base, size, length, end, first, sums)
        _write(job, token, rows, head, first, array_at(sums, 1024, np.float32), totals)
    tiles.release()


@cache
def put_entry() -> int:
    """Address of the block that writes one head's key and value of one token: ``token * kv_heads + head``."""
    return entry(_put)


@cache
def attend_entry() -> int:
    """Address of the block that attends for a stretch and the heads of one key: ``stretch * kv_heads + head``."""
    return entry(_attend)
