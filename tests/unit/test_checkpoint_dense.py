"""Dense bodies against a slow writer and a slow reader of single elements."""

import contextlib
import struct

import numpy as np
import pytest
from codec_rig import SIZES, moved, on_line, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.dense import LARGER_SHARE, decode_dense, encode_dense
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError

DTYPES = st.sampled_from(["U8", "BF16", "F32", "F64"])
SEEDS = st.integers(0, 2**32 - 1)


def slow_codes(old: Bits, new: Bits) -> list[int]:
    modulus = 1 << 8 * old.itemsize
    steps = [(b - a) % modulus for a, b in zip(on_line(old).tolist(), on_line(new).tolist(), strict=True)]
    return [{0: 0, 1: 1, modulus - 1: 2}.get(step, 3) for step in steps]


def slow_body(olds: list[Bits], news: list[Bits]) -> bytes:
    packed, larger = b"", b""
    for old, new in zip(olds, news, strict=True):
        codes = slow_codes(old, new)
        filled = codes + [0] * (-len(codes) % 4)
        packed += bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in zip(*[iter(filled)] * 4, strict=True))
        larger += new[np.array(codes) == 3].tobytes()
    return struct.pack("<I", len(larger) // olds[0].itemsize) + packed + larger


@settings(max_examples=examples(80))
@given(
    DTYPES,
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    st.sampled_from(["neighbours", "mostly neighbours", "bits", "largest"]),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]),
    SEEDS,
)
def test_bodies_are_those_of_the_slow_writer_and_lead_back(
    dtype: str, sizes: list[int], move: str, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    olds = [random_bits(rng, dtype, size) for size in sizes]
    news = [moved(rng, dtype, old, move, density) for old in olds]
    larger = sum(slow_codes(old, new).count(3) for old, new in zip(olds, news, strict=True))
    body = encode_dense(olds, news)
    if body is None:
        assert larger * LARGER_SHARE > sum(sizes)
        return
    assert larger * LARGER_SHARE <= sum(sizes)
    assert body == slow_body(olds, news)
    found = decode_dense("here", olds, memoryview(body))
    assert [bits.tobytes() for bits in found] == [new.tobytes() for new in news]


@pytest.mark.parametrize("width", [1, 2])
def test_every_narrow_pattern_takes_every_code(width: int) -> None:
    old = np.arange(256**width).astype(f"<u{width}")
    for code in range(4):
        packed = bytes([code * 0b01010101]) * (old.size // 4)
        larger = old[::-1].tobytes() if code == 3 else b""
        body = struct.pack("<I", old.size if code == 3 else 0) + packed + larger
        (new,) = decode_dense("here", [old], memoryview(body))
        if code == 3:
            assert new.tobytes() == larger
        else:
            steps = (on_line(new).astype(np.int64) - on_line(old)) % old.size
            assert set(steps.tolist()) == {(0, 1, old.size - 1)[code]}


@settings(max_examples=examples(150))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 6), st.binary(max_size=40), st.booleans())
def test_any_body_is_read_as_slowly_or_refused(
    sizes: list[int], count: int, noise: bytes, is_long_enough: bool
) -> None:
    olds = [random_bits(np.random.default_rng(size), "BF16", size) for size in sizes]
    length = sum((size + 3) // 4 for size in sizes) + 2 * count
    rest = (noise + bytes(length))[:length] if is_long_enough else noise
    body = struct.pack("<I", count) + rest
    before = [old.tobytes() for old in olds]
    with contextlib.suppress(CorruptError):
        news = decode_dense("here", olds, memoryview(body))
        codes = [code for old, new in zip(olds, news, strict=True) for code in slow_codes(old, new)]
        assert codes.count(3) <= count  # code 3 may say what codes 0 to 2 say
        assert len(body) == 4 + length
    assert [old.tobytes() for old in olds] == before
