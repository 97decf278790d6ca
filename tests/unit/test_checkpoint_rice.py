"""Bit streams against a slow reader and a slow writer that work on text of ones and zeros."""

import numpy as np
import pytest
from bit_rig import Part, packed, slow_golomb, slow_golomb_numbers, slow_rice, slow_rice_numbers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.rice import (
    MAX_WIDTH,
    Numbers,
    golomb_bytes,
    golomb_numbers,
    golomb_width,
    read_signs,
    rice_bytes,
    rice_numbers,
    rice_width,
    signs_bytes,
)

WIDTHS = st.integers(0, MAX_WIDTH)
RISING = st.lists(st.integers(0, 400), max_size=12, unique=True).map(sorted)
RICE_PARTS = st.lists(st.tuples(RISING, st.integers(0, 9)), max_size=4)
SIZES = st.integers(0, 2**63 - 1) | st.integers(0, 300) | st.integers(2**63 - 2**25, 2**63 - 1)
GOLOMB_PARTS = st.lists(st.tuples(st.lists(SIZES, max_size=8), WIDTHS), max_size=4)


def arrays(parts: list[Part]) -> list[tuple[Numbers, int]]:
    return [(np.array(part, dtype=np.int64), width) for part, width in parts]


def in_canaries(shape: list[tuple[int, int]]) -> tuple[list[Numbers], list[tuple[Numbers, int]]]:
    """Arrays to be written between numbers that nobody may write."""
    wholes = [np.full(count + 16, -7, dtype=np.int64) for count, _ in shape]
    return wholes, [(whole[8:-8], width) for whole, (_, width) in zip(wholes, shape, strict=True)]


def assert_canaries_live(wholes: list[Numbers]) -> None:
    assert all((whole[:8] == -7).all() and (whole[-8:] == -7).all() for whole in wholes)


@given(RICE_PARTS)
def test_rice_streams_are_those_of_the_slow_writer_and_lead_back(parts: list[Part]) -> None:
    quotients, lows = rice_bytes(arrays(parts))
    assert (quotients, lows) == slow_rice(parts)
    shape = [(len(part), width) for part, width in parts]
    wholes, room = in_canaries(shape)
    limits = [part[-1] + 1 if part else 0 for part, _ in parts]
    assert rice_numbers(room, memoryview(quotients), memoryview(lows), limits)
    assert [part.tolist() for part, _ in room] == [part for part, _ in parts]
    assert_canaries_live(wholes)


@given(RICE_PARTS, st.data())
def test_a_number_at_its_limit_is_refused(parts: list[Part], data: st.DataObject) -> None:
    full = [index for index, (part, _) in enumerate(parts) if part]
    assume(full)
    quotients, lows = rice_bytes(arrays(parts))
    limits = [401] * len(parts)
    tight = data.draw(st.sampled_from(full))
    limits[tight] = parts[tight][0][-1]
    _, room = in_canaries([(len(part), width) for part, width in parts])
    assert not rice_numbers(room, memoryview(quotients), memoryview(lows), limits)


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=3),
    st.binary(max_size=24),
    st.binary(max_size=24),
)
def test_any_rice_stream_is_read_as_slowly_or_refused(
    shape: list[tuple[int, int]], quotients: bytes, noise: bytes
) -> None:
    lows = (noise + bytes(24))[: (sum(count * width for count, width in shape) + 7) // 8]
    limits = [500] * len(shape)
    wanted = slow_rice_numbers(shape, quotients, lows, limits)
    wholes, room = in_canaries(shape)
    taken = rice_numbers(room, memoryview(quotients), memoryview(lows), limits)
    assert taken == (wanted is not None)
    assert wanted is None or [part.tolist() for part, _ in room] == wanted
    assert_canaries_live(wholes)


@given(GOLOMB_PARTS)
def test_golomb_streams_are_those_of_the_slow_writer_and_lead_back(parts: list[Part]) -> None:
    stream = golomb_bytes(arrays(parts))
    assert stream == slow_golomb(parts)
    wholes, room = in_canaries([(len(part), width) for part, width in parts])
    assert golomb_numbers(room, memoryview(stream))
    assert [part.tolist() for part, _ in room] == [part for part, _ in parts]
    assert_canaries_live(wholes)


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, 6), WIDTHS), max_size=3), st.binary(max_size=40))
def test_any_golomb_stream_is_read_as_slowly_or_refused(shape: list[tuple[int, int]], stream: bytes) -> None:
    wanted = slow_golomb_numbers(shape, stream)
    wholes, room = in_canaries(shape)
    assert golomb_numbers(room, memoryview(stream)) == (wanted is not None)
    assert wanted is None or [part.tolist() for part, _ in room] == wanted
    assert_canaries_live(wholes)


@pytest.mark.parametrize("width", [0, 1, 12, MAX_WIDTH])
def test_the_largest_number_is_taken_and_a_larger_one_refused(width: int) -> None:
    _, room = in_canaries([(1, width)])
    assert golomb_numbers(room, memoryview(slow_golomb([([2**63 - 1], width)])))
    assert room[0][0].tolist() == [2**63 - 1]
    for number in (2**63, 2**64 - 1, 2**64, 2**88):
        assert not golomb_numbers(room, memoryview(slow_golomb([([number], width)])))


@given(st.lists(st.sampled_from([-1, 1]), max_size=40))
def test_signs_are_one_bit_each(signs: list[int]) -> None:
    section = signs_bytes(np.array(signs, dtype=np.int64))
    assert section == packed("".join("1" if sign < 0 else "0" for sign in signs))
    found = np.zeros(len(signs), dtype=np.int64)
    assert read_signs(found, memoryview(section))
    assert found.tolist() == signs
    if len(signs) % 8:
        assert not read_signs(found, memoryview(section[:-1] + bytes([section[-1] | 0x80])))
    assert not read_signs(found, memoryview(section + b"\0"))


@given(RISING.filter(bool))
def test_the_rice_width_costs_little_more_than_the_best(rising: list[int]) -> None:
    count, total = len(rising), rising[-1] + 1 - len(rising)

    def cost(width: int) -> int:
        return count * (1 + width) + (total >> width)

    width = rice_width(count, total)
    assert 0 <= width <= MAX_WIDTH
    assert cost(width) <= 1.05 * min(map(cost, range(MAX_WIDTH + 1)))


@pytest.mark.parametrize(("count", "total"), [(0, 0), (0, 9), (5, 0), (1, 2**62), (2**32, 2**60)])
def test_the_rice_width_stays_in_its_bounds(count: int, total: int) -> None:
    assert 0 <= rice_width(count, total) <= MAX_WIDTH


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_the_golomb_width_is_in_a_valley(sizes: list[int]) -> None:
    numbers = np.array(sizes, dtype=np.int64)
    width = golomb_width(numbers)
    around = [near for near in (width - 1, width, width + 1) if 0 <= near <= MAX_WIDTH]
    lengths = {near: len(slow_golomb([(sizes * 8, near)])) for near in around}
    assert lengths[width] == min(lengths.values())
