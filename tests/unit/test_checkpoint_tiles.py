"""Tiles: every element in one, none across what two ranks need, by arithmetic alone whatever a shape claims."""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import numpy as np
import pytest
from codec_rig import random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint import tensor as module
from slackwater.checkpoint.changes import find_changes
from slackwater.checkpoint.element_sum import element_sum, seed_of, sum_change
from slackwater.checkpoint.tensor import (
    SHARDS,
    TILE_BYTES,
    WIDTHS,
    TensorSpec,
    Tile,
    TileWrite,
    tile_at,
    tile_count,
    tiles,
)
from slackwater.errors import InvalidInputError

UP, DOWN = "l.0.mlp.up_proj.weight", "l.0.mlp.down_proj.weight"
EXPERT = "l.0.mlp.experts.7.down_proj.weight"
DEGREES: Final = (1, 2, 4, 8, 16)
HUGE: Final = [
    (8192, 4096),
    (248_320, 4096),
    (154_880, 6144),
    (163_840, 7168),
    (4096, 12_288),
    (2**16, 2**17),  # 8 Gi elements
    (2**40, 16),
    (16, 2**40),
    (2**20, 2**20),
    (16 * 3, 16 * 5 * 2**22),
    (2**34,),
    (2**40,),
    (64, 2**20, 7),
    (2**31, 2**4, 2**3),
]
SEEDS = st.integers(0, 2**32 - 1)


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def lines_of(tensor: TensorSpec, tile: Tile) -> tuple[int, int]:
    """First line and end of a tile, on the axis along which its tensor is cut."""
    if tile.stride:
        line = tensor.num_elements // tensor.shape[0] // tensor.shape[1]
    else:
        line = tensor.num_elements // tensor.shape[0]
    assert tile.start % line == tile.cols % line == 0
    return tile.start // line, (tile.start + tile.cols) // line


@contextmanager
def tiles_of(num_bytes: int) -> Generator[None]:
    """Smaller tiles, so that small tensors are cut as huge ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_BYTES", num_bytes)
        yield


@pytest.mark.parametrize("name", [UP, DOWN, "lm_head.weight", "w.o_proj.weight_packed", "out_proj.weight"])
@pytest.mark.parametrize("shape", HUGE, ids=str)
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_every_ranks_slice_is_a_union_of_whole_tiles(name: str, shape: tuple[int, ...], dtype: str) -> None:
    tensor = spec(name, *shape, dtype=dtype)
    count = tile_count(tensor)
    axis = 1 if tile_at(tensor, 0).stride else 0
    assert (axis == 1) is (len(shape) > 1 and name not in {UP, "lm_head.weight"} and tensor.num_bytes > TILE_BYTES)
    lines = shape[axis]
    for degree in DEGREES:
        for rank in range(degree):
            first, end = rank * count // degree, (rank + 1) * count // degree
            assert lines_of(tensor, tile_at(tensor, first))[0] == rank * lines // degree
            assert lines_of(tensor, tile_at(tensor, end - 1))[1] == (rank + 1) * lines // degree


@pytest.mark.parametrize("name", [UP, DOWN, EXPERT])
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_tiles_of_a_huge_tensor_follow_on_each_other_and_keep_their_size(name: str, shape: tuple[int, ...]) -> None:
    tensor = spec(name, *shape)
    count = tile_count(tensor)
    near = {0, 1, count // 16 - 1, count // 16, count // 3, count // 2 - 1, count // 2, count - 2, count - 1}
    for index in sorted(index for index in near if 0 <= index < count):
        tile = tile_at(tensor, index)
        begin, end = lines_of(tensor, tile)
        assert tile.index == index
        assert tile.fits(tensor.num_elements)
        assert end - begin == 1 or tile.count * 2 <= TILE_BYTES
        follower = (
            lines_of(tensor, tile_at(tensor, index + 1))[0] if index + 1 < count else shape[1 if tile.stride else 0]
        )
        assert follower == end
    for index in (-1, count, 2**70):
        with pytest.raises(InvalidInputError, match="tiles, not a tile"):
            tile_at(tensor, index)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((), 1),
        ((0,), 0),
        ((0, 5), 0),
        ((5, 0), 0),
        ((2**40, 0), 0),
        ((1,), 1),
        ((7,), 1),
        ((2**22,), 1),
        ((1, 1, 1), 1),
    ],
)
def test_a_scalar_and_all_that_fits_is_one_tile_and_nothing_is_none(shape: tuple[int, ...], count: int) -> None:
    tensor = spec(DOWN, *shape)
    assert tile_count(tensor) == count
    assert [tile.count for tile in tiles(tensor)] == [tensor.num_elements] * count


def test_an_expert_is_not_cut_at_sixteenths_and_others_are() -> None:
    shape = (2048, 2048 + 16)
    assert tile_count(spec(EXPERT, *shape)) == 2
    assert tile_count(spec(UP, *shape)) == tile_count(spec(DOWN, *shape)) == SHARDS


def test_a_line_longer_than_a_tile_is_a_tile() -> None:
    assert [tile.count for tile in tiles(spec(UP, 3, 2**23))] == [2**23] * 3


SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 16, 32, 48, 64, 80, 33]), min_size=1, max_size=3).filter(
    lambda shape: np.prod(shape) <= 20_000
)


@settings(max_examples=examples(150))
@given(st.sampled_from([UP, DOWN, EXPERT]), SHAPES, st.sampled_from(["U8", "BF16", "F64"]), SEEDS)
def test_tiles_hold_every_element_once_and_their_sums_add_up(
    name: str, shape: list[int], dtype: str, seed: int
) -> None:
    tensor = spec(name, *shape, dtype=dtype)
    rng = np.random.default_rng(seed)
    old = random_bits(rng, dtype, tensor.num_elements)
    new = np.where(rng.random(old.size) < 0.1, random_bits(rng, dtype, old.size), old)
    with tiles_of(WIDTHS[dtype] * 100):
        cut = list(tiles(tensor))
    seen, copy = np.zeros(old.size, dtype=np.int64), np.zeros_like(old)
    whole, seed_of_name = Tile(index=0, start=0, cols=old.size), seed_of(name)
    total = moved = 0
    for tile in cut:
        places = tile.in_tensor(np.arange(tile.count, dtype=np.uint32))
        seen[places] += 1
        assert tile.fits(old.size)
        assert tile.take(old).tobytes() == old[places].tobytes()
        tile.put(copy, tile.take(old))
        total += element_sum(seed_of_name, tile, tile.take(old))
        changes = find_changes(tile.take(old), tile.take(new))
        assert changes is not None
        moved += sum_change(seed_of_name, tile, changes)
    assert (seen == 1).all()
    assert copy.tobytes() == old.tobytes()
    assert total % 2**64 == element_sum(seed_of_name, whole, old)
    assert (total + moved) % 2**64 == element_sum(seed_of_name, whole, new)


@settings(max_examples=examples(60))
@given(st.sampled_from([UP, DOWN]), st.sampled_from([16, 32, 48]), st.sampled_from([16, 48, 64]), SEEDS)
def test_a_rank_that_takes_its_tiles_alone_has_its_slice(name: str, rows: int, cols: int, seed: int) -> None:
    tensor = spec(name, rows, cols)
    bits = random_bits(np.random.default_rng(seed), "BF16", rows * cols)
    with tiles_of(64):
        cut = list(tiles(tensor))
    for degree, rank in itertools.product(DEGREES, range(16)):
        if rank >= degree or tensor.num_bytes <= 64:
            continue
        held = np.zeros_like(bits)
        for tile in cut[rank * len(cut) // degree : (rank + 1) * len(cut) // degree]:
            tile.put(held, tile.take(bits))
        own = (slice(None), slice(rank * cols // degree, (rank + 1) * cols // degree))
        if name == UP:
            own = (slice(rank * rows // degree, (rank + 1) * rows // degree), slice(None))
        wanted = np.zeros_like(bits)
        wanted.reshape(rows, cols)[own] = bits.reshape(rows, cols)[own]
        assert held.tobytes() == wanted.tobytes()


def test_a_write_reaches_the_rows_of_its_tile_and_no_others() -> None:
    bits = np.arange(12).astype("<u2")
    tile = Tile(index=1, start=2, rows=3, cols=2, stride=4)
    TileWrite(
        name="w", tile=tile, positions=np.array([0, 3, 5], dtype=np.uint32), values=np.array([70, 71, 72], "<u2")
    ).put(bits)
    assert bits.tolist() == [0, 1, 70, 3, 4, 5, 6, 71, 8, 9, 10, 72]
    TileWrite(name="w", tile=tile, positions=None, values=np.zeros(6, "<u2")).put(bits)
    assert bits.tolist() == [0, 1, 0, 0, 4, 5, 0, 0, 8, 9, 0, 0]


@pytest.mark.parametrize(
    ("tile", "elements", "is_inside"),
    [
        (Tile(index=0, start=0, cols=5), 5, True),
        (Tile(index=0, start=1, cols=5), 5, False),
        (Tile(index=0, start=-1, cols=5), 5, False),
        (Tile(index=0, start=0, cols=-1), 5, False),
        (Tile(index=0, start=2, rows=3, cols=2, stride=4), 12, True),
        (Tile(index=0, start=3, rows=3, cols=2, stride=4), 12, False),
        (Tile(index=0, start=2, rows=3, cols=2, stride=4), 16, False),
        (Tile(index=0, start=2, rows=4, cols=2, stride=4), 12, False),
        (Tile(index=0, start=0, rows=0, cols=2, stride=4), 0, False),
    ],
)
def test_a_tile_tells_whether_it_lies_inside(tile: Tile, elements: int, *, is_inside: bool) -> None:
    assert tile.fits(elements) is is_inside


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="dtype 'BF17' is unknown"):
        spec("w", 1, dtype="BF17")
