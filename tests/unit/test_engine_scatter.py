"""The staged scatter against numpy: each width, each form, the edges of its blocks, and all or nothing."""

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.tensor import Bits, Tile, TileWrite
from slackwater.engine import scatter
from slackwater.engine.scatter import BLOCK, DENSE_SHARE, RUN, STRETCH, Aim, StagedScatter
from slackwater.errors import InvalidInputError

WIDTHS = [1, 2, 4, 8]
ROW_OF_TABLE = 48


def dtype_of(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{width}")


def noise(seed: int, size: int, width: int) -> Bits:
    """Any patterns at all: NaN payloads, -0 and what else fits."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size * width), dtype=dtype_of(width)).copy()


def sparse(tile: Tile, positions: npt.ArrayLike, values: Bits) -> TileWrite:
    return TileWrite(name="w", tile=tile, positions=np.asarray(positions, dtype=np.uint32), values=values)


def line_of(bits: Bits) -> Tile:
    return Tile(index=0, start=0, cols=bits.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A tensor, and a write that replaces all bits that it covers by others."""

    bits: Bits
    write: TileWrite

    @property
    def covered(self) -> npt.NDArray[np.int64]:
        """Flat indexes in the tensor."""
        inside = self.write.positions
        tile = self.write.tile
        return tile.in_tensor(np.arange(tile.count, dtype=np.uint32) if inside is None else inside)

    def after(self) -> Bits:
        expected = self.bits.copy()
        self.write.put(expected)
        return expected


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(st.sampled_from(WIDTHS))
    rows, cols = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    begin = draw(st.integers(0, cols))
    if draw(st.booleans()):
        tile = Tile(index=3, start=begin, rows=rows, cols=draw(st.integers(0, cols - begin)), stride=cols)
    else:
        first = draw(st.integers(0, rows * cols))
        tile = Tile(index=3, start=first, cols=draw(st.integers(0, rows * cols - first)))
    seed = draw(st.integers(0, 1000))
    bits, other = noise(seed, rows * cols, width), noise(seed + 1, tile.count, width) | dtype_of(width).type(1)
    every = draw(st.sampled_from([None, 1, 2, 7, 100]))
    positions = None if every is None else np.arange(tile.count, dtype=np.uint32)[::every]
    values = tile.take(bits)[:: every or 1] ^ other[:: every or 1]
    return Case(bits=bits, write=TileWrite(name="w", tile=tile, positions=positions, values=values))


@given(cases())
def test_a_commit_writes_what_numpy_writes_and_an_undo_takes_it_back(case: Case) -> None:
    before, after = case.bits.copy(), case.after()
    staged = StagedScatter.of([Aim(case.bits, case.write)])
    assert np.array_equal(case.bits, before)
    for _ in range(2):
        assert staged.commit() is None
        assert np.array_equal(case.bits, after)
        staged.undo()
        assert np.array_equal(case.bits, before)


@given(cases(), st.integers(0, 1 << 30), st.integers(0, 7))
def test_one_bit_that_differs_anywhere_leaves_everything_as_it_was(case: Case, which: int, bit: int) -> None:
    staged = StagedScatter.of([Aim(case.bits, case.write)])
    if not case.covered.size:
        assert staged.commit() is None
        return
    case.bits[case.covered[which % case.covered.size]] ^= case.bits.dtype.type(1 << bit)
    spoilt = case.bits.copy()
    assert staged.commit() == 0
    assert np.array_equal(case.bits, spoilt)


@given(cases())
def test_bits_that_it_does_not_replace_may_be_anything(case: Case) -> None:
    staged = StagedScatter.of([Aim(case.bits, case.write)])
    others = np.ones(case.bits.size, dtype=bool)
    others[case.covered] = False
    case.bits[others] ^= case.bits.dtype.type(1)
    after = case.after()
    assert staged.commit() is None
    assert np.array_equal(case.bits, after)


def many(sizes: dict[int, int]) -> tuple[list[Aim], list[Bits]]:
    """Tensors of several widths, every third element of each replaced; and what they hold then."""
    aims: list[Aim] = []
    for width, size in sizes.items():
        bits = noise(width, size, width)
        positions = np.arange(0, size, 3)
        aims.append(Aim(bits, sparse(line_of(bits), positions, ~bits[positions])))
    after = [aim.bits.copy() for aim in aims]
    for aim, bits in zip(aims, after, strict=True):
        aim.write.put(bits)
    return aims, after


def test_tensors_of_all_widths_are_one_commit() -> None:
    aims, after = many({1: 5000, 2: 70_000, 4: 1, 8: 3000})
    staged = StagedScatter.of(aims)
    assert staged.commit() is None
    assert all(np.array_equal(aim.bits, bits) for aim, bits in zip(aims, after, strict=True))
    assert staged.bytes_written == sum(aim.write.values.nbytes for aim in aims)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", [0, 3 * BLOCK, -1])
def test_the_write_that_differs_is_named_and_those_before_it_are_put_back(number: int, place: int) -> None:
    aims, _ = many({1: 5000, 2: 70_000, 4: 6001, 8: 3001})
    staged = StagedScatter.of(aims)
    aim = aims[number]
    positions = aim.write.positions
    assert positions is not None
    aim.bits[positions[min(place, positions.size - 1)]] ^= aim.bits.dtype.type(1)
    before = [item.bits.copy() for item in aims]
    assert staged.commit() == number
    assert all(np.array_equal(item.bits, bits) for item, bits in zip(aims, before, strict=True))


def test_a_write_of_nothing_is_not_the_one_that_differs() -> None:
    bits = noise(0, 10, 2)
    nothing = sparse(line_of(bits), [], bits[:0])
    staged = StagedScatter.of([Aim(bits, item) for item in (nothing, sparse(line_of(bits), [4], ~bits[4:5]), nothing)])
    bits[4] ^= 1
    assert staged.commit() == 1


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("begin", [0, STRETCH - 1, STRETCH - 5, STRETCH - BLOCK, STRETCH])
def test_blocks_end_where_they_should(count: int, begin: int) -> None:
    bits = noise(1, 3 * STRETCH, 2)
    positions = begin + np.arange(count)
    case = Case(bits=bits, write=sparse(line_of(bits), positions, ~bits[positions]))
    after = case.after()
    staged = StagedScatter.of([Aim(bits, case.write)])
    assert (staged.table[:, 4] <= BLOCK).all()
    assert staged.commit() is None
    assert np.array_equal(bits, after)


@pytest.mark.parametrize("count", [1, RUN - 1, RUN, RUN + 1, 3 * RUN])
@pytest.mark.parametrize("width", WIDTHS)
def test_runs_end_where_they_should(count: int, width: int) -> None:
    bits = noise(2, 4 * RUN, width)
    tile = Tile(index=0, start=7, cols=count)
    case = Case(bits=bits, write=TileWrite(name="w", tile=tile, positions=None, values=~tile.take(bits)))
    after = case.after()
    staged = StagedScatter.of([Aim(bits, case.write)])
    assert len(staged.table) == -(-count // RUN)
    assert staged.commit() is None
    assert np.array_equal(bits, after)


def test_changes_far_apart_take_a_line_each_and_those_near_each_other_share_one() -> None:
    bits = noise(3, 4 * STRETCH, 2)
    for positions, lines in (([0, 1, 2], 1), ([0, STRETCH, 3 * STRETCH], 3), ([], 0)):
        staged = StagedScatter.of([Aim(bits, sparse(line_of(bits), positions, bits[positions]))])
        assert len(staged.table) == lines
        assert staged.num_bytes == 6 * len(positions) + ROW_OF_TABLE * lines + 8


@pytest.mark.parametrize("rows", [1, 64])
def test_a_whole_tile_is_held_by_its_changes_where_they_are_few(rows: int) -> None:
    bits = noise(4, 64 * 64, 2)
    tile = Tile(index=0, start=0, cols=4096) if rows == 1 else Tile(index=0, start=8, rows=64, cols=32, stride=64)
    few = tile.count // DENSE_SHARE
    for changed, held in ((0, 0), (1, 6), (few, 6 * few), (few + 1, 4 * tile.count)):
        values = tile.take(bits).copy()
        values[:changed] ^= 1
        case = Case(bits=bits.copy(), write=TileWrite(name="w", tile=tile, positions=None, values=values))
        after = case.after()
        staged = StagedScatter.of([Aim(case.bits, case.write)])
        assert staged.num_bytes - ROW_OF_TABLE * len(staged.table) - 8 == held
        assert staged.commit() is None
        assert np.array_equal(case.bits, after)


def test_values_that_lie_apart_or_askew_are_taken_as_they_are() -> None:
    bits = noise(5, 100, 4)
    tile = line_of(bits)
    apart = noise(6, 200, 4)[::2]
    raw = np.zeros(401, dtype=np.uint8)
    raw[1:] = np.frombuffer(noise(7, 100, 4).tobytes(), dtype=np.uint8)
    askew = raw[1:].view(dtype_of(4))
    assert not askew.flags.aligned
    for values in (apart, askew):
        assert (
            StagedScatter.of([Aim(bits, TileWrite(name="w", tile=tile, positions=None, values=values))]).commit()
            is None
        )
        assert np.array_equal(bits, values)


def test_nothing_that_the_table_leads_to_is_freed_before_it() -> None:
    def stage() -> tuple[StagedScatter, Bits, Bits]:
        bits = noise(8, 1 << 20, 2)
        before = bits.copy()
        return (
            StagedScatter.of([Aim(bits, sparse(line_of(bits), np.arange(0, 1 << 20, 16), ~bits[::16]))]),
            bits,
            before,
        )

    staged, bits, before = stage()
    gc.collect()
    rubbish = [np.full(1 << 16, 0xAAAA, dtype=np.uint16) for _ in range(32)]
    assert staged.commit() is None
    assert np.array_equal(bits[::16], ~before[::16])
    staged.undo()
    assert np.array_equal(bits, before)
    assert len(rubbish) == 32


@pytest.mark.parametrize("width", WIDTHS)
def test_warming_up_writes_nothing_of_ours(width: int) -> None:
    scatter.warm([dtype_of(width)])
    assert StagedScatter.of([]).commit() is None


HELD = np.arange(12, dtype=np.uint16)
GOOD = sparse(Tile(index=0, start=0, cols=12), [0, 5], HELD[:2])
FROZEN = HELD.copy()
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    "write",
    [
        sparse(Tile(index=0, start=0, cols=12), [5, 0], HELD[:2]),
        sparse(Tile(index=0, start=0, cols=12), [5, 5], HELD[:2]),
        sparse(Tile(index=0, start=0, cols=12), [5, 12], HELD[:2]),
        sparse(Tile(index=0, start=0, cols=12), [0xFFFFFFFE, 0xFFFFFFFF], HELD[:2]),
        sparse(Tile(index=0, start=4, cols=4), [0, 4], HELD[:2]),
        sparse(Tile(index=0, start=0, cols=13), [0, 5], HELD[:2]),
        sparse(Tile(index=0, start=-1, cols=12), [0, 5], HELD[:2]),
        sparse(Tile(index=0, start=1, rows=3, cols=4, stride=4), [0, 5], HELD[:2]),
        sparse(Tile(index=0, start=0, rows=4, cols=2, stride=4), [0, 5], HELD[:2]),
        sparse(Tile(index=0, start=0, cols=12), [0, 5], HELD[:3]),
        sparse(Tile(index=0, start=0, cols=12), [0, 5], HELD[:2].astype(np.uint32)),
        replace(GOOD, positions=np.array([-1, 5])),  # type: ignore[arg-type]
        replace(GOOD, positions=np.array([0, 1 << 40])),  # type: ignore[arg-type]
        TileWrite(name="w", tile=Tile(index=0, start=0, cols=12), positions=None, values=HELD[:11]),
        TileWrite(name="w", tile=Tile(index=0, start=0, cols=12), positions=None, values=HELD.reshape(3, 4)),
    ],
)
def test_writes_that_do_not_fit_are_refused_before_anything_is_laid_out(write: TileWrite) -> None:
    with pytest.raises(InvalidInputError, match="w: the write to tile 0"):
        StagedScatter.of([Aim(HELD.copy(), GOOD), Aim(HELD.copy(), write)])


@pytest.mark.parametrize(
    "bits",
    [FROZEN, np.arange(24, dtype=np.uint16)[::2], HELD.reshape(3, 4), np.zeros(25, np.uint8)[1:].view(np.uint16)],
)
def test_memory_that_cannot_be_written_by_address_is_refused(bits: Bits) -> None:
    with pytest.raises(InvalidInputError, match="flat, aligned and writable"):
        StagedScatter.of([Aim(bits, GOOD)])
