"""Attention of tokens over the rows of their slots: one compiled kernel for prompts and for decoding.

Each token's heads are computed by themselves, in single precision, over exactly the keys that it may see. So nothing
depends on who else is in the pass, nothing is padded, and what lies beyond a token's position is never read.

The formula is softmax(q K^T * scale) V, with grouped query heads (Ainslie et al., 2023). The exponential is the
polynomial of the Cephes library's ``expf``: its relative error is about 1e-7.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.jit import float_of, kernel, summing_kernel

Held = npt.NDArray[Any]
"""Bf16 bits as uint16, or float32. Keys are ``[slots, kv_heads, head_dim, window]``, so a query meets many at once;
values ``[slots, kv_heads, window, head_dim]``."""


@summing_kernel
def exp(x: Any) -> Any:
    """The exponential of ``x``, which isn't positive."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    f = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel
def put(keys: Any, values: Any, key_states: Any, value_states: Any, slots: Any, positions: Any) -> None:
    """Write tokens' keys and values where they belong.

    Args:
        keys: `Held`; so are ``values``.
        values: As said.
        key_states: ``[kv_heads, tokens, head_dim]``, of the same dtype.
        value_states: As ``key_states``.
        slots: ``[tokens]``, int64.
        positions: ``[tokens]``, int64.
    """
    for token in range(slots.shape[0]):
        slot, position = slots[token], positions[token]
        for head in range(key_states.shape[0]):
            for at in range(key_states.shape[2]):
                keys[slot, head, at, position] = key_states[head, token, at]
                values[slot, head, position, at] = value_states[head, token, at]


@summing_kernel
def _scores(query: Any, keys: Any, count: int, scale: Any, scores: Any) -> Any:
    """``query`` by the first ``count`` keys; returns the largest, NaN where one is NaN.

    Eight dimensions a pass: the sums stay in a cache.
    """
    for j in range(count):
        scores[j] = np.float32(0.0)
    for d in range(0, query.shape[0], 8):
        q0, q1, q2, q3 = query[d] * scale, query[d + 1] * scale, query[d + 2] * scale, query[d + 3] * scale
        q4, q5, q6, q7 = query[d + 4] * scale, query[d + 5] * scale, query[d + 6] * scale, query[d + 7] * scale
        k0, k1, k2, k3, k4, k5, k6, k7 = (
            keys[d], keys[d + 1], keys[d + 2], keys[d + 3], keys[d + 4], keys[d + 5], keys[d + 6], keys[d + 7],
        )  # fmt: skip
        for j in range(count):
            low = (q0 * float_of(k0[j]) + q1 * float_of(k1[j])) + (q2 * float_of(k2[j]) + q3 * float_of(k3[j]))
            high = (q4 * float_of(k4[j]) + q5 * float_of(k5[j])) + (q6 * float_of(k6[j]) + q7 * float_of(k7[j]))
            scores[j] += low + high
    most, total = scores[0], np.float32(0.0)
    for j in range(count):
        most = max(most, scores[j])
        total += scores[j]
    return most if total == total else total  # noqa: PLR0124  # NaN alone differs from itself


@summing_kernel
def _weigh(scores: Any, count: int, most: Any) -> Any:
    """Make scores weights, not yet divided by their sum, which is returned."""
    total = np.float32(0.0)
    for j in range(count):
        weight = exp(scores[j] - most)
        scores[j] = weight
        total += weight
    return total


@summing_kernel
def _mix(weights: Any, values: Any, count: int, total: Any, out: Any) -> None:
    """The mean of the first ``count`` values, eight at a time: the sums stay in a cache."""
    size = out.shape[0]
    for d in range(size):
        out[d] = np.float32(0.0)
    whole = count // 8 * 8
    for j in range(0, whole, 8):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        w4, w5, w6, w7 = weights[j + 4], weights[j + 5], weights[j + 6], weights[j + 7]
        v0, v1, v2, v3, v4, v5, v6, v7 = (
            values[j], values[j + 1], values[j + 2], values[j + 3],
            values[j + 4], values[j + 5], values[j + 6], values[j + 7],
        )  # fmt: skip
        for d in range(size):
            low = (w0 * float_of(v0[d]) + w1 * float_of(v1[d])) + (w2 * float_of(v2[d]) + w3 * float_of(v3[d]))
            high = (w4 * float_of(v4[d]) + w5 * float_of(v5[d])) + (w6 * float_of(v6[d]) + w7 * float_of(v7[d]))
            out[d] += low + high
    for j in range(whole, count):
        weight, value = weights[j], values[j]
        for d in range(size):
            out[d] += weight * float_of(value[d])
    for d in range(size):
        out[d] /= total


@kernel
def attend(
    queries: Any,
    keys: Any,
    values: Any,
    slots: Any,
    positions: Any,
    begin: int,
    end: int,
    scale: Any,
    out: Any,
    scratch: Any,
) -> None:
    """Attention of tokens ``[begin, end)`` of a pass, each over the rows of its slot up to its own.

    Args:
        queries: ``[tokens, heads, head_dim]``, float32.
        keys: `Held`; so are ``values``.
        values: As ``keys``.
        slots: ``[tokens]``, int64: of each token.
        positions: ``[tokens]``, int64: likewise.
        begin: The first token.
        end: Where to stop.
        scale: float32: scores are multiplied by it.
        out: As ``queries``; written.
        scratch: ``[window]``, float32, of this call alone.
    """
    group = queries.shape[1] // keys.shape[1]
    for token in range(begin, end):
        slot, count = slots[token], positions[token] + 1
        for head in range(queries.shape[1]):
            shared = head // group
            most = _scores(queries[token, head], keys[slot, shared], count, scale, scratch)
            if not most < np.inf:  # the weights make no numbers: neither does this
                out[token, head, :] = np.nan
                continue
            total = _weigh(scratch, count, most)
            _mix(scratch, values[slot, shared], count, total, out[token, head])
