"""Changes that are held until they are encoded, and what of them is no number."""

from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.capture import Copied, Scattered, capture
from slackwater.checkpoint.nans import has_nan
from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, tiles
from slackwater.errors import InvalidInputError

CHUNK: Final = 1 << 16


def random_bits(count: int, width: int, seed: int) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << 8, count * width, dtype=np.uint8).view(f"<u{width}")


def changed(old: Bits, share: float, seed: int) -> Bits:
    new = old.copy()
    new[np.random.default_rng(seed).random(old.size) < share] ^= 1
    return new


def comes_back(tile: Tile, old: Bits, new: Bits) -> None:
    captured = capture(tile, old, new)
    before, after = tile.take(old), tile.take(new)
    assert (captured is None) == bool((before == after).all())
    if captured is not None:
        assert captured.onto(before).tobytes() == after.tobytes()
        assert captured.num_bytes <= after.nbytes + 4 * (1 + tile.count // CHUNK)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.one_of(st.integers(1, 300), st.integers(CHUNK - 70, CHUNK + 70), st.integers(2 * CHUNK, 2 * CHUNK + 3)),
    share=st.sampled_from([0.0, 1e-4, 0.014, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_changes_of_a_row_come_back(width: int, count: int, share: float, seed: int) -> None:
    old = random_bits(count + 130, width, seed)
    comes_back(Tile(index=0, start=65, cols=count), old, changed(old, share, seed))


@given(
    rows=st.integers(1, 90), cols=st.integers(1, 140), before=st.integers(0, 9), after=st.integers(0, 9),
    share=st.sampled_from([0.0, 0.014, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_changes_of_a_rectangle_come_back(
    rows: int, cols: int, before: int, after: int, share: float, seed: int
) -> None:
    stride = before + cols + after
    tile = Tile(index=0, start=before, rows=rows, cols=cols, stride=stride)
    old = random_bits(rows * stride, 2, seed)
    comes_back(tile, old, changed(old, share, seed))


def test_every_tile_of_a_large_tensor_comes_back() -> None:
    spec = TensorSpec(name="a.down_proj.weight", dtype="BF16", shape=(4099, 3200))
    old = random_bits(spec.num_elements, 2, 0)
    new = changed(old, 0.014, 1)
    for tile in tiles(spec):
        comes_back(tile, old, new)


@pytest.mark.parametrize("place", [0, 63, 64, CHUNK - 1, CHUNK, 2 * CHUNK + 4])
def test_one_changed_element_takes_a_few_bytes(place: int) -> None:
    old = np.zeros(2 * CHUNK + 5, dtype=np.uint16)
    new = old.copy()
    new[place] = 0x7FC1
    captured = capture(Tile(index=0, start=0, cols=old.size), old, new)
    assert isinstance(captured, Scattered)
    assert captured.num_bytes == 2 + 2 + 3 * 4
    assert captured.onto(old).tobytes() == new.tobytes()


def test_a_tile_that_changes_more_than_it_is_long_is_copied_once() -> None:
    old = np.zeros(1000, dtype=np.uint16)
    new = np.ones(1000, dtype=np.uint16)
    captured = capture(Tile(index=0, start=0, cols=1000), old, new)
    assert isinstance(captured, Copied)
    new[:] = 7
    assert captured.onto(old).tolist() == [1] * 1000


def test_what_is_written_afterwards_is_not_captured() -> None:
    old = np.zeros(1000, dtype=np.uint16)
    new = old.copy()
    new[[3, 999]] = 5
    captured = capture(Tile(index=0, start=0, cols=1000), old, new)
    new[:] = 9
    assert captured is not None
    assert np.flatnonzero(captured.onto(old)).tolist() == [3, 999]


@pytest.mark.parametrize("offset", [1, 3])
def test_bits_at_odd_addresses_and_with_gaps_are_read(offset: int) -> None:
    raw = np.arange(2100, dtype=np.uint8)
    old = raw[offset : offset + 2000].view("<u2")
    new = np.repeat(old, 2)[::2]
    new[77] ^= 1
    comes_back(Tile(index=0, start=0, cols=1000), old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(9, np.uint16), np.zeros(10, np.uint16)),
        (np.zeros(10, np.uint16), np.zeros(10, np.uint8)),
        (np.zeros((2, 5), np.uint16), np.zeros((2, 5), np.uint16)),
        (np.zeros(9, np.uint16), np.zeros(9, np.uint16)),
    ],
    ids=["sizes", "dtypes", "not flat", "too short"],
)
def test_bits_of_another_tensor_are_refused(old: Bits, new: Bits) -> None:
    with pytest.raises(InvalidInputError, match="tile 4 can't go from"):
        capture(Tile(index=4, start=0, cols=10), old, new)


@pytest.mark.parametrize(
    ("dtype", "width", "last"),
    [("F16", 2, 0x7C00), ("BF16", 2, 0x7F80), ("F32", 4, 0x7F80_0000), ("F64", 8, 0x7FF0_0000_0000_0000),
     ("F8_E4M3", 1, 0x7E), ("F8_E5M2", 1, 0x7C)],
)  # fmt: skip
def test_only_bits_above_infinity_are_no_numbers(dtype: str, width: int, last: int) -> None:
    sign = 1 << (8 * width - 1)
    for bits, expected in ((0, False), (sign, False), (last, False), (last | sign, False),
                           (last + 1, True), ((last + 1) | sign, True), (2 * sign - 1, True)):  # fmt: skip
        assert has_nan(dtype, np.array([0, bits], dtype=f"<u{width}")) is expected
        assert has_nan(dtype, np.array([0, bits], dtype=np.uint64)) is expected
    assert not has_nan(dtype, np.empty(0, dtype=f"<u{width}"))
    assert has_nan(dtype, np.array([0] * 100_000 + [last + 1], dtype=f"<u{width}"))


def test_integers_are_always_numbers() -> None:
    assert not has_nan("U8", np.array([255], dtype=np.uint8))
