"""Patching in place: exact bits, all or nothing, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.engine.torch.weights import StagedWrites, WeightBits
from slackwater.errors import InvalidInputError, NotFoundError, SwapError

WHOLE = Tile(index=0, start=0, cols=12)
COLUMNS = Tile(index=0, start=2, rows=4, cols=3, stride=8)
"""Columns 2 to 4 of a tensor of 4 rows of 8."""


def held() -> tuple[torch.Tensor, WeightBits]:
    tensor = torch.arange(12, dtype=torch.float32).bfloat16().reshape(3, 4)
    return tensor, WeightBits({"w": tensor}, {"w": TensorSpec(name="w", dtype="BF16", shape=(3, 4))})


def sparse(positions: list[int], values: list[int], tile: Tile = WHOLE) -> TileWrite:
    return TileWrite(
        name="w",
        tile=tile,
        positions=np.array(positions, dtype=np.uint32),
        values=np.array(values, dtype=np.uint16),
    )


def bits(weights: WeightBits) -> Bits:
    return weights.read("w", WHOLE).copy()


def test_a_commit_writes_the_memory_that_torch_reads() -> None:
    tensor, weights = held()
    assert weights.commit(weights.stage([sparse([0, 3], [0x3F80, 0x4000], Tile(index=1, start=4, cols=4))])) == 4
    assert tensor.tolist() == [[0, 1, 2, 3], [1, 5, 6, 2], [8, 9, 10, 11]]


def test_every_bit_pattern_survives() -> None:
    _, weights = held()
    patterns = np.array([0x8000, 0x7FC1, 0xFFFF, 0x0001, 0x7F80, 0xFF80] * 2, dtype=np.uint16)
    weights.commit(weights.stage([TileWrite(name="w", tile=WHOLE, positions=None, values=patterns)]))
    assert np.array_equal(bits(weights), patterns)


def test_what_is_read_cannot_be_written() -> None:
    _, weights = held()
    with pytest.raises(ValueError, match="read-only"):
        weights.read("w", WHOLE)[0] = 1


@given(st.lists(st.dictionaries(st.integers(0, 11), st.integers(0, 0xFFFF), min_size=1), min_size=1, max_size=4))
def test_undo_unwinds_overlapping_writes(changes: list[dict[int, int]]) -> None:
    _, weights = held()
    before = bits(weights)
    after = before.copy()
    for change in changes:
        after[list(change)] = list(change.values())
    staged = weights.stage([sparse(sorted(change), [change[at] for at in sorted(change)]) for change in changes])
    for _ in range(2):  # the bits that it was staged on are back
        weights.commit(staged)
        assert np.array_equal(bits(weights), after)
        weights.undo(staged)
        assert np.array_equal(bits(weights), before)


def test_a_commit_on_memory_that_somebody_else_wrote_changes_nothing() -> None:
    tensor, weights = held()
    staged = weights.stage([sparse([0], [1]), sparse([1], [2]), sparse([2], [3], Tile(index=7, start=2, cols=4))])
    spoilt = tensor.view(torch.int16).view(-1)
    spoilt[4] ^= 1
    before = bits(weights)
    with pytest.raises(SwapError, match=r"^w, tile 0, was changed by somebody else"):
        weights.commit(staged)
    assert np.array_equal(bits(weights), before)
    spoilt[4] ^= 1
    assert weights.commit(staged) > 0


def test_the_write_whose_memory_differs_is_named() -> None:
    tensor, weights = held()
    tiles = [Tile(index=index, start=4 * index, cols=4) for index in range(3)]
    staged = weights.stage([sparse([1, 3], [7, 7], tile) for tile in tiles])
    tensor.view(torch.int16)[2, 3] ^= 0x4000
    before = bits(weights)
    with pytest.raises(SwapError, match="w, tile 2, was changed"):
        weights.commit(staged)
    assert np.array_equal(bits(weights), before)


def test_a_commit_that_was_spoilt_afterwards_is_undone_all_the_same() -> None:
    tensor, weights = held()
    before = bits(weights)
    staged = weights.stage([sparse([0, 5], [1, 2])])
    weights.commit(staged)
    tensor.view(torch.int16)[1, 1] ^= 1
    weights.undo(staged)
    assert np.array_equal(bits(weights), before)


def test_writes_staged_while_memory_moves_are_refused() -> None:
    _, weights = held()
    with weights._moving():
        staged = weights.stage([sparse([0], [1])])
    with pytest.raises(SwapError, match="stage them again"):
        weights.commit(staged)


def test_writes_staged_before_another_commit_are_refused() -> None:
    _, weights = held()
    first, second = weights.stage([sparse([0], [1])]), weights.stage([sparse([0], [2])])
    weights.commit(first)
    with pytest.raises(SwapError, match="stage them again"):
        weights.commit(second)
    assert bits(weights)[0] == 1


def test_writes_staged_on_an_undone_commit_are_refused_even_after_the_next() -> None:
    _, weights = held()
    first = weights.stage([sparse([0], [1])])
    weights.commit(first)
    on_first = weights.stage([sparse([1], [2])])
    weights.undo(first)
    weights.commit(weights.stage([sparse([0], [3])]))
    with pytest.raises(SwapError):
        weights.commit(on_first)


def test_memory_held_is_that_of_the_change() -> None:
    _, weights = held()
    table = 48 + 8
    assert weights.stage([sparse([1, 2], [3, 4])]).num_bytes == 2 * (2 + 2 + 2) + table
    whole = TileWrite(name="w", tile=WHOLE, positions=None, values=bits(weights) ^ np.uint16(1))
    assert weights.stage([whole]).num_bytes == 12 * (2 + 2) + table


def test_a_whole_tile_of_which_little_changes_is_held_by_its_changes() -> None:
    _, weights = held()
    values = bits(weights)
    values[7] ^= 1
    staged = weights.stage([TileWrite(name="w", tile=WHOLE, positions=None, values=values)])
    assert staged.num_bytes == 2 + 2 + 2 + 48 + 8
    assert weights.commit(staged) == 2
    assert np.array_equal(bits(weights), values)


def stage_bad(write: TileWrite) -> StagedWrites:
    return held()[1].stage([write])


@pytest.mark.parametrize("positions", [[2, 1], [1, 1], [12], [0xFFFFFFFF]])
def test_hostile_positions_are_refused(positions: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="positions"):
        stage_bad(sparse(positions, [0] * len(positions)))


def test_hostile_tiles_names_and_values_are_refused() -> None:
    for tile in (
        Tile(index=0, start=-1, cols=2),
        Tile(index=0, start=11, cols=2),
        Tile(index=0, start=4, cols=-2),
        Tile(index=0, start=0, rows=0, cols=2, stride=4),
        Tile(index=0, start=0, rows=4, cols=2, stride=4),
        Tile(index=0, start=0, rows=2, cols=2, stride=4),
        Tile(index=0, start=3, rows=3, cols=2, stride=4),
        Tile(index=0, start=-1, rows=3, cols=2, stride=4),
        Tile(index=0, start=0, rows=3, cols=-2, stride=4),
        Tile(index=0, start=0, rows=-3, cols=2, stride=-4),
    ):
        with pytest.raises(InvalidInputError, match="ends outside"):
            stage_bad(sparse([], [], tile))
    with pytest.raises(InvalidInputError, match="for 1 positions"):
        stage_bad(sparse([1], [1, 2]))
    with pytest.raises(InvalidInputError, match="carries float32"):
        stage_bad(TileWrite(name="w", tile=WHOLE, positions=None, values=np.zeros(12, np.float32)))  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="nobody"):
        stage_bad(TileWrite(name="nobody", tile=WHOLE, positions=None, values=np.zeros(12, np.uint16)))


def table() -> tuple[torch.Tensor, WeightBits]:
    """4 rows of 8; each element's bits are its row and its column."""
    patterns = torch.arange(4, dtype=torch.int16)[:, None] * 16 + torch.arange(8, dtype=torch.int16)
    tensor = patterns.view(torch.bfloat16)
    return tensor, WeightBits({"w": tensor}, {"w": TensorSpec(name="w", dtype="BF16", shape=(4, 8))})


def shown(tensor: torch.Tensor) -> list[list[int]]:
    """The bits that torch holds, by row."""
    return tensor.view(torch.int16).tolist()


def test_a_tile_of_columns_is_read_row_by_row() -> None:
    _, weights = table()
    columns = weights.read("w", COLUMNS)
    assert columns.tolist() == [0x02, 0x03, 0x04, 0x12, 0x13, 0x14, 0x22, 0x23, 0x24, 0x32, 0x33, 0x34]
    with pytest.raises(ValueError, match="read-only"):
        columns[0] = 1


def test_a_tile_of_columns_is_written_and_put_back_beside_untouched_ones() -> None:
    tensor, weights = table()
    before = shown(tensor)
    values = np.arange(0x100, 0x10C, dtype=np.uint16)
    staged = weights.stage([TileWrite(name="w", tile=COLUMNS, positions=None, values=values)])
    assert shown(tensor) == before
    assert weights.commit(staged) == 24
    rows = values.reshape(4, 3).tolist()
    assert shown(tensor) == [[*old[:2], *new, *old[5:]] for old, new in zip(before, rows, strict=True)]
    assert weights.read("w", COLUMNS).tolist() == values.tolist()
    assert weights.undo(staged) == 24
    assert shown(tensor) == before


@given(st.dictionaries(st.integers(0, 11), st.integers(0, 0x7FFF)))
def test_positions_in_a_tile_of_columns_count_along_its_own_rows(change: dict[int, int]) -> None:
    tensor, weights = table()
    before = shown(tensor)
    wanted = shown(tensor)
    for position, value in change.items():
        wanted[position // 3][2 + position % 3] = value
    staged = weights.stage([sparse(sorted(change), [change[at] for at in sorted(change)], COLUMNS)])
    weights.commit(staged)
    assert shown(tensor) == wanted
    weights.undo(staged)
    assert shown(tensor) == before


@pytest.mark.parametrize("tile", [COLUMNS, Tile(index=0, start=0, rows=4, cols=8, stride=8)])
def test_columns_and_rows_that_overlap_are_unwound(tile: Tile) -> None:
    tensor, weights = table()
    before = shown(tensor)
    whole = np.full(tile.count, 7, dtype=np.uint16)
    writes = [
        TileWrite(name="w", tile=tile, positions=None, values=whole),
        sparse([2, 4], [9, 9], Tile(index=0, start=0, cols=32)),
        TileWrite(name="w", tile=tile, positions=None, values=whole + np.uint16(1)),
    ]
    staged = weights.stage(writes)
    weights.commit(staged)
    assert (weights.read("w", tile) == 8).all()
    weights.undo(staged)
    assert shown(tensor) == before


def test_a_commit_of_columns_that_differ_leaves_the_old_bits() -> None:
    tensor, weights = table()
    values = np.zeros(12, dtype=np.uint16)
    staged = weights.stage([TileWrite(name="w", tile=COLUMNS, positions=None, values=values)])
    tensor.view(torch.int16)[3, 4] ^= 1
    before = shown(tensor)
    with pytest.raises(SwapError, match="by somebody else"):
        weights.commit(staged)
    assert shown(tensor) == before
    tensor.view(torch.int16)[3, 4] ^= 1
    assert weights.commit(staged) == 24


@pytest.mark.parametrize("positions", [[3, 2], [5, 5], [12], [31]])
def test_positions_outside_a_tile_of_columns_are_refused_though_the_tensor_has_them(positions: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="positions"):
        table()[1].stage([sparse(positions, [0] * len(positions), COLUMNS)])


def test_a_write_of_another_length_than_its_columns_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="for 12 positions"):
        table()[1].stage([TileWrite(name="w", tile=COLUMNS, positions=None, values=np.zeros(4, np.uint16))])
