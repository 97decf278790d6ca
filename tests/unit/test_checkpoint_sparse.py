"""Sparse bodies against a slow writer that goes from element to element, as the format's page says it."""

import struct
from dataclasses import dataclass

import numpy as np
import pytest
from bit_rig import packed, slow_golomb, slow_rice
from codec_rig import moved, on_line, random_bits, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.changes import find_changes
from slackwater.checkpoint.contexts import field
from slackwater.checkpoint.sparse import decode_sparse, encode_sparse
from slackwater.checkpoint.tensor import Bits
from slackwater.checkpoint.varint import read_varint, varint
from slackwater.errors import CorruptError

SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Row:
    """What a body says of a context, before its streams."""

    last: int
    widths: tuple[int, int, int]
    changes: int
    larger: int


def rows_of(body: bytes) -> list[Row]:
    at, rows = 20, list[Row]()
    for _ in range(struct.unpack_from("<IH", body)[1]):
        last, widths = struct.unpack_from("<BH", body, at)
        changes, at = read_varint("here", memoryview(body), at + 3)
        larger, at = read_varint("here", memoryview(body), at)
        rows.append(Row(last, (widths & 31, widths >> 5 & 31, widths >> 10), changes, larger))
    return rows


def slow_body(dtype: str, olds: list[Bits], news: list[Bits], rows: list[Row]) -> bytes:
    """The body with these contexts and widths."""
    (shift, mask), modulus = field(dtype), 1 << 8 * olds[0].itemsize
    seen, ranks, steps = [0] * len(rows), [list[int]() for _ in rows], [list[int]() for _ in rows]
    for old, new in zip(olds, news, strict=True):
        for pattern, before, after in zip(old.tolist(), on_line(old).tolist(), on_line(new).tolist(), strict=True):
            context = next(index for index, row in enumerate(rows) if (pattern >> shift & mask) <= row.last)
            if before != after:
                step = (after - before) % modulus
                ranks[context].append(seen[context])
                steps[context].append(step - modulus if step >= modulus // 2 else step)
            seen[context] += 1
    runs = [[index for index, step in enumerate(part) if abs(step) > 1] for part in steps]
    sizes = [[abs(step) - 2 for step in part if abs(step) > 1] for part in steps]
    streams = [(*row.widths, *found) for row, *found in zip(rows, ranks, runs, sizes, strict=True)]
    gap_quotients, gap_lows = slow_rice([(rank, gap) for gap, _, _, rank, _, _ in streams])
    run_quotients, run_lows = slow_rice([(run, width) for _, width, _, _, run, _ in streams])
    size_codes = slow_golomb([(size, width) for _, _, width, _, _, size in streams])
    count = sum(map(len, steps))
    head = struct.pack("<IHHIII", count, len(rows), 0, len(gap_quotients), len(run_quotients), len(size_codes))
    table = b"".join(
        struct.pack("<BH", row.last, row.widths[0] | row.widths[1] << 5 | row.widths[2] << 10)
        + varint(len(part))
        + varint(len(run))
        for row, part, run in zip(rows, steps, runs, strict=True)
    )
    signs = packed("".join("1" if step < 0 else "0" for part in steps for step in part))
    return b"".join((head, table, gap_quotients, gap_lows, signs, run_quotients, run_lows, size_codes))


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["U8", "F8_E5M2", "BF16", "F32", "I64", "F64"]),
    st.sampled_from(["neighbours", "mostly neighbours", "bits", "sign flips", "almost largest"]),
    st.lists(st.sampled_from([1, 7, 64, 200, 700]), min_size=1, max_size=3),
    st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    st.booleans(),
    SEEDS,
)
def test_bodies_are_those_of_the_slow_writer_and_lead_back(
    dtype: str, move: str, sizes: list[int], density: float, by_exponent: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    olds = [weights(rng, dtype, size) if size % 2 else random_bits(rng, dtype, size) for size in sizes]
    news = [moved(rng, dtype, old, move, density) for old in olds]
    changes = [find_changes(old, new) for old, new in zip(olds, news, strict=True)]
    found = [part for part in changes if part is not None]
    if not any(part.count for part in found):
        return
    body = encode_sparse(dtype, olds, found, by_exponent=by_exponent)
    rows = rows_of(body)
    assert body == slow_body(dtype, olds, news, rows)
    assert by_exponent or [row.last for row in rows] == [255]
    decoded = decode_sparse("here", dtype, olds, memoryview(body))
    for part, wanted in zip(decoded, found, strict=True):
        assert part.positions.tolist() == wanted.positions.tolist()
        assert part.new.tolist() == wanted.new.tolist()
        assert part.old.tolist() == wanted.old.tolist()


@pytest.mark.parametrize("last", [0, 100, 254])
def test_any_cut_of_the_classes_is_read(last: int) -> None:
    """Contexts are the writer's choice, those without a change too."""
    rng = np.random.default_rng(1)
    olds = [random_bits(rng, "BF16", 150), weights(rng, "BF16", 90)]
    news = [moved(rng, "BF16", old, "mostly neighbours", 0.2) for old in olds]
    rows = [Row(last, (3, 0, 2), 0, 0), Row(255, (0, 1, 24), 0, 0)]
    body = slow_body("BF16", olds, news, rows)
    decoded = decode_sparse("here", "BF16", olds, memoryview(body))
    for part, old, new in zip(decoded, olds, news, strict=True):
        assert part.positions.tolist() == np.flatnonzero(old != new).tolist()
        assert part.new.tolist() == new[old != new].tolist()


@given(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 127, 128, 16383, 16384, 2**28, 2**32 - 1]), st.integers(0, 5))
def test_varints_have_one_form_that_leads_back(number: int, begin: int) -> None:
    coded = varint(number)
    assert len(coded) == max(1, -(-number.bit_length() // 7))
    assert read_varint("here", memoryview(bytes(begin) + coded + b"\xff"), begin) == (number, begin + len(coded))
    for cut in range(len(coded)):
        with pytest.raises(CorruptError, match=f"here: varint at byte {begin}"):
            read_varint("here", memoryview(bytes(begin) + coded[:cut]), begin)


@pytest.mark.parametrize("coded", ["8000", "808000", "ff00", "8080808010", "ffffffff1f", "ffffffffff01", "8080808080"])
def test_a_varint_in_a_longer_form_or_beyond_32_bits_is_refused(coded: str) -> None:
    with pytest.raises(CorruptError, match="too long or too large"):
        read_varint("here", memoryview(bytes.fromhex(coded)), 0)
