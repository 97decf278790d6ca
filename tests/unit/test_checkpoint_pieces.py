"""Pieces: at tiles' edges and nowhere else, each tile in one, and the same bits in it as in the whole tensor."""

import re
from collections.abc import Generator
from itertools import pairwise

import numpy as np
import pytest
from codec_rig import random_bits
from hypothesis import given
from hypothesis import strategies as st
from pieces_rig import edges_of, small_tiles

from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import (
    WHOLE,
    Piece,
    cut_axis,
    cut_out,
    held_elements,
    held_numbers,
    held_tile,
    locate,
    num_lines,
    piece_shape,
    stripes,
    tiles_in,
)
from slackwater.checkpoint.tensor import Bits, TensorSpec, tile_at, tile_count, tiles
from slackwater.errors import InvalidInputError, WrongBaseError

UP, DOWN, EXPERT = "l.0.mlp.up_proj.weight", "l.0.mlp.down_proj.weight", "l.0.mlp.experts.7.down_proj.weight"
TILE = 256


@pytest.fixture(scope="module", autouse=True)
def tiles_are_small() -> Generator[None]:
    with small_tiles(TILE):
        yield


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def sliced(tensor: TensorSpec, piece: Piece, bits: Bits) -> Bits:
    """The piece as numpy cuts it."""
    lines = slice(piece.begin, piece.end)
    index = (slice(None), lines) if cut_axis(tensor) else (lines,)
    return bits.reshape(tensor.shape)[index].reshape(-1)


@st.composite
def parted(draw: st.DrawFn) -> tuple[TensorSpec, list[Piece]]:
    """A tensor of several tiles, and pieces of it in order."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 48), st.integers(1, 48)),
            st.tuples(st.integers(1, 4).map(lambda n: 16 * n), st.integers(1, 4).map(lambda n: 16 * n)),
            st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4)),
            st.tuples(st.integers(1, 2000)),
        )
    )
    tensor = spec(draw(st.sampled_from([UP, DOWN, EXPERT])), *shape, dtype=draw(st.sampled_from(["U8", "BF16", "F32"])))
    edges = edges_of(tensor)
    inner = sorted(draw(st.sets(st.sampled_from(edges), max_size=6))) if edges else []
    cuts = [0, *inner, num_lines(tensor)]
    return tensor, [Piece(begin=begin, end=end) for begin, end in pairwise(cuts)]


@given(parted(), st.integers(0, 2**32 - 1))
def test_pieces_have_every_tile_once_with_the_bits_that_it_has_in_the_whole(
    case: tuple[TensorSpec, list[Piece]], seed: int
) -> None:
    tensor, pieces = case
    bits = random_bits(np.random.default_rng(seed), tensor.dtype, tensor.num_elements)
    assert [index for piece in pieces for index in tiles_in(tensor, piece)] == list(range(tile_count(tensor)))
    for piece in pieces:
        held, parts = {tensor.name: piece}, cut_out(tensor, piece, bits)
        np.testing.assert_array_equal(parts, sliced(tensor, piece, bits))
        assert not np.shares_memory(parts, bits)
        assert held_elements(tensor, held) == parts.size == int(np.prod(piece_shape(tensor, piece)))
        for tile in tiles(tensor):
            local = held_tile(tensor, tile, held)
            assert (local is not None) is (tile.index in tiles_in(tensor, piece))
            if local is None:
                with pytest.raises(WrongBaseError, match=f"tile {tile.index} isn't held: lines {piece.begin} to"):
                    locate(tensor, tile, held)
            else:
                assert local == locate(tensor, tile, held)
                assert (local.index, local.count) == (tile.index, tile.count)
                assert local.fits(parts.size)
                np.testing.assert_array_equal(local.take(parts), tile.take(bits))
                written = np.zeros_like(parts)
                local.put(written, tile.take(bits))
                np.testing.assert_array_equal(local.take(written), tile.take(bits))


@given(parted(), st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_stripes_make_a_piece_out_of_parts_of_its_tensor_and_back(
    case: tuple[TensorSpec, list[Piece]], most: int, seed: int
) -> None:
    tensor, pieces = case
    bits = random_bits(np.random.default_rng(seed), tensor.dtype, tensor.num_elements)
    back = np.zeros_like(bits)
    row = bits.itemsize * (tensor.num_elements // tensor.shape[0] if cut_axis(tensor) else 1)
    for piece in pieces:
        made: list[Bits] = []
        for stripe in stripes(tensor, piece, most):
            assert (stripe.span.stop - stripe.span.start) * bits.itemsize <= max(most, row)
            assert stripe.held.start == sum(map(len, made))
            made.append(stripe.tile.take(bits[stripe.span]))
            stripe.tile.put(back[stripe.span], made[-1])
        np.testing.assert_array_equal(np.concatenate(made), sliced(tensor, piece, bits))
    np.testing.assert_array_equal(back, bits)
    whole = [bits[stripe.span] for stripe in stripes(tensor, None, most)]
    np.testing.assert_array_equal(np.concatenate(whole), bits)


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("name", "axis"), [(UP, 0), (DOWN, 1), ("lm_head.weight", 0)])
def test_up_to_sixteen_ranks_share_a_tensor_out_evenly(degree: int, name: str, axis: int) -> None:
    tensor = spec(name, 64, 64)
    assert cut_axis(tensor) == axis
    count = tile_count(tensor)
    for rank in range(degree):
        piece = Piece(begin=rank * 64 // degree, end=(rank + 1) * 64 // degree)
        assert tiles_in(tensor, piece) == range(rank * count // degree, (rank + 1) * count // degree)


def test_arithmetic_alone_finds_the_tiles_of_absurd_shapes() -> None:
    tensor = spec(DOWN, 2**20, 2**24)
    piece = Piece(begin=2**20, end=2**21)
    held = tiles_in(tensor, piece)
    local = held_tile(tensor, tile_at(tensor, held[0]), {DOWN: piece})
    assert local is not None
    assert (local.start, local.rows, local.stride) == (0, 2**20, 2**20)


@pytest.mark.parametrize(
    ("tensor", "begin", "end", "words"),
    [
        (spec(UP, 64, 64), 0, 3, f"piece of {UP} ends at line 3 of axis 0, inside a tile: that has lines 2 to 4"),
        (spec(DOWN, 64, 64), 1, 64, f"piece of {DOWN} ends at line 1 of axis 1"),
        (spec(UP, 64, 64), 4, 4, f"lines 4 to 4 of axis 0 of {UP} are no piece of it: it has 64"),
        (spec(UP, 64, 64), 8, 4, "are no piece of it"),
        (spec(UP, 64, 64), -4, 4, "are no piece of it"),
        (spec(UP, 64, 64), 60, 68, "are no piece of it"),
        (spec(UP, 8, 8), 0, 4, f"of {UP} can't be published alone: it has a single tile"),
        (spec(UP, 5, 0), 0, 4, "can't be published alone"),
        (spec(UP, 0, 5), 0, 0, "are no piece of it: it has 0"),
        (spec(UP), 0, 2, "are no piece of it: it has 1"),
        (spec(EXPERT, 64, 64), 4, 5, "inside a tile"),
    ],
)  # fmt: skip
def test_an_edge_inside_a_tile_is_refused_and_the_tensor_named(
    tensor: TensorSpec, begin: int, end: int, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)) as caught:
        tiles_in(tensor, Piece(begin=begin, end=end))
    assert caught.value.hint


@pytest.mark.parametrize("tensor", [spec(UP, 8, 8), spec(UP), spec(UP, 5, 0), spec(UP, 64, 64), spec(DOWN, 64, 64)])
def test_a_piece_may_be_the_whole_tensor(tensor: TensorSpec) -> None:
    piece = Piece(begin=0, end=num_lines(tensor))
    assert tiles_in(tensor, piece) == tiles_in(tensor, None) == range(tile_count(tensor))
    assert held_elements(tensor, {tensor.name: piece}) == held_elements(tensor, WHOLE) == tensor.num_elements
    for tile in tiles(tensor):
        assert held_tile(tensor, tile, {tensor.name: piece}) == held_tile(tensor, tile, WHOLE) == tile


def test_numbers_of_held_tiles_go_through_all_tensors() -> None:
    outline = Outline([spec(UP, 64, 64), spec(DOWN, 64, 64), spec("norm", 3)])
    first, end = outline.first_tiles[1:3]
    quarter = (end - first) // 4
    assert held_numbers(outline, UP, {UP: Piece(begin=16, end=32)}) == range(first + quarter, first + 2 * quarter)
    assert held_numbers(outline, "norm", WHOLE) == range(end, end + 1)
