from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_rig import SPECS, Rig, weights_at

from slackwater.checkpoint.codec import DENSE_SHARE, Level
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.ids import Version
from slackwater.replica.extent import fitting
from slackwater.replica.overlay import Overlay, merged
from slackwater.replica.prepare import Check, Prepared, prepare_delta
from slackwater.replica.race import Stop
from slackwater.testing.engine import TableEngine

TABLES = {
    spec.name: spec
    for spec in (
        TensorSpec(name="columns", dtype="BF16", shape=(8, 12)),
        TensorSpec(name="halves", dtype="F16", shape=(40,)),
        TensorSpec(name="longs", dtype="U64", shape=(17,)),
        TensorSpec(name="one", dtype="F32", shape=()),
        TensorSpec(name="small", dtype="F8_E4M3", shape=(3, 30)),
    )
}
PLACES = [
    ("columns", Tile(index=0, start=0, rows=8, cols=7, stride=12)),
    ("columns", Tile(index=1, start=7, rows=8, cols=5, stride=12)),
    ("halves", Tile(index=0, start=0, cols=30)),
    ("halves", Tile(index=1, start=30, cols=10)),
    *((name, Tile(index=0, start=0, cols=TABLES[name].num_elements)) for name in ("longs", "one", "small")),
]
State = dict[str, Bits]


def first_state() -> State:
    """Zeroes, minus zeroes and NaNs with payloads: all are only bits."""
    return {name: some_bits(spec, np.random.default_rng(1)) for name, spec in TABLES.items()}


def some_bits(spec: TensorSpec, random: np.random.Generator) -> Bits:
    """Few different ones, so that bits often come back."""
    top = 1 << (8 * spec.bits_dtype.itemsize - 1)
    return np.array([0, top, top - 1, 2 * top - 1], dtype=spec.bits_dtype)[random.integers(0, 4, spec.num_elements)]


def stepped(held: State, share: float, random: np.random.Generator) -> State:
    made = {name: bits.copy() for name, bits in held.items()}
    for name, bits in made.items():
        where = random.random(bits.size) < share
        bits[where] = some_bits(TABLES[name], random)[where]
    return made


def prepared(old: State, new: State, random: np.random.Generator) -> Prepared:
    """Writes as a decoder makes them: of some elements, or of all of a tile."""
    writes, after, before = list[TileWrite](), list[Check](), list[Check]()
    for name, tile in PLACES:
        was, becomes = tile.take(old[name]), tile.take(new[name])
        positions = np.flatnonzero(was != becomes).astype(np.uint32)
        if not positions.size:
            continue
        whole = positions.size * DENSE_SHARE > tile.count or random.random() < 0.3
        values = becomes.copy() if whole else becomes[positions]
        writes.append(TileWrite(name=name, tile=tile, positions=None if whole else positions, values=values))
        before.append(Check(name=name, tile=tile, digest=tile_digest(was)))
        after.append(Check(name=name, tile=tile, digest=tile_digest(becomes)))
    return Prepared(writes=tuple(writes), after=tuple(after), before=tuple(before))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[State], np.random.Generator]:
    """States one after the other, some of which are earlier ones again."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    states = [first_state()]
    for _ in range(draw(st.integers(1, 5))):
        share = draw(st.sampled_from([0.0, 0.01, 0.05, 0.1, 1.0, -1.0]))
        earlier = states[draw(st.integers(0, len(states) - 1))]
        states.append(earlier if share < 0 else stepped(states[-1], share, random))
    return states, random


@given(histories(), st.integers(1, 3))
def test_deltas_put_together_are_what_they_are_one_after_the_other(
    history: tuple[list[State], np.random.Generator], threads: int
) -> None:
    states, random = history
    engine = TableEngine(states[0], TABLES)
    overlay = Overlay(engine, threads)
    for number in range(1, len(states)):
        overlay.add(prepared(states[number - 1], states[number], random), last=number == len(states) - 1)
        for name, tile in PLACES:
            assert np.array_equal(overlay.read(name, tile), tile.take(states[number][name]))
    made, first, last = overlay.prepared(), states[0], states[-1]
    held = {name: bits.copy() for name, bits in first.items()}
    for write in made.writes:
        write.put(held[write.name])
    for name in TABLES:
        assert np.array_equal(held[name], last[name])
        assert np.array_equal(engine.weights[name], first[name])
    differing = {(name, tile) for name, tile in PLACES if (tile.take(first[name]) != tile.take(last[name])).any()}
    assert {(write.name, write.tile) for write in made.writes} == differing
    for write, after, before in zip(made.writes, made.after, made.before, strict=True):
        assert (after.name, after.tile) == (before.name, before.tile) == (write.name, write.tile)
        assert before.digest == tile_digest(write.tile.take(first[write.name]))
        assert after.digest == tile_digest(write.tile.take(last[write.name]))
        if write.positions is not None:
            changed = write.tile.take(first[write.name]) != write.tile.take(last[write.name])
            assert write.positions.tolist() == np.flatnonzero(changed).tolist()
            assert write.positions.dtype == np.uint32


TILE = Tile(index=0, start=0, cols=40)


def write_of(values: dict[int, int]) -> TileWrite:
    positions = np.array(sorted(values), dtype=np.uint32)
    bits = np.array([values[position] for position in sorted(values)], dtype=np.uint16)
    return TileWrite(name="halves", tile=TILE, positions=positions, values=bits)


@given(
    st.dictionaries(st.integers(0, 39), st.integers(0, 9), max_size=40),
    st.dictionaries(st.integers(0, 39), st.integers(0, 9), max_size=40),
)
def test_two_writes_to_a_tile_are_one_whose_later_values_win(old: dict[int, int], new: dict[int, int]) -> None:
    engine = TableEngine(first_state(), TABLES)
    both = merged(engine, write_of(old), write_of(new))
    expected = engine.weights["halves"].copy()
    for position, value in {**old, **new}.items():
        expected[position] = value
    held = engine.weights["halves"].copy()
    both.put(held)
    assert np.array_equal(held, expected)
    assert (both.positions is None) == (len(old | new) * DENSE_SHARE > TILE.count)
    assert both.num_bytes <= max(write_of(old).num_bytes + write_of(new).num_bytes, 2 * TILE.count)


def test_a_whole_tile_replaces_and_takes_later_elements_without_changing_what_it_was_given() -> None:
    engine = TableEngine(first_state(), TABLES)
    values = np.frombuffer(np.arange(40, dtype=np.uint16).tobytes(), dtype=np.uint16)  # of a pack: not to be written
    whole = TileWrite(name="halves", tile=TILE, positions=None, values=values)
    assert merged(engine, write_of({3: 9}), whole) is whole
    later = merged(engine, whole, write_of({3: 9}))
    assert later.positions is None
    assert later.values.tolist() == [0, 1, 2, 9, *range(4, 40)]
    assert values.tolist() == list(range(40))


@pytest.mark.parametrize("last", [False, True])
def test_values_in_a_pack_are_copied_out_of_it_where_more_deltas_come(*, last: bool) -> None:
    pack = bytes(range(80))
    write = TileWrite(name="halves", tile=TILE, positions=None, values=np.frombuffer(pack, dtype=np.uint16))
    check = Check(name="halves", tile=TILE, digest=0)
    overlay = Overlay(TableEngine(first_state(), TABLES), 1)
    overlay.add(Prepared(writes=(write,), after=(check,), before=(check,)), last=last)
    assert overlay.read("halves", TILE).flags.owndata is not last
    assert overlay.num_bytes == len(pack)


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize("share", [0.01, 0.2, 1.0], ids=["sparse", "dense", "full"])
def test_encoded_deltas_are_decoded_on_top_of_each_other_and_hold_what_was_foretold(
    tmp_path: Path, level: Level, share: float
) -> None:
    rig = Rig(tmp_path, level=level)
    random, states = np.random.default_rng(4), [weights_at(0)]
    for _ in range(4):
        made = {name: bits.copy() for name, bits in states[-1].items()}
        for bits in made.values():
            where = np.flatnonzero(random.random(bits.size) < share)
            bits[where] = random.integers(0, 1 << 16, where.size)
        states.append(made)
    for number, state in enumerate(states):
        rig.publish(weights=state, anchor=not number)
    chain = [rig.fetcher.manifest(Version(number)) for number in range(len(states))]
    outline, deltas = chain[0].outline, tuple(chain[1:])
    overlay = Overlay(TableEngine(states[0], SPECS), 1)
    for number, delta in enumerate(deltas, 1):
        decoded = prepare_delta(overlay, outline, delta, rig.fetcher.bodies(delta), 1, Stop())
        assert decoded is not None
        overlay.add(decoded, last=delta is deltas[-1])
        held = overlay.num_bytes
        assert len(fitting(deltas, outline, held - 1)) <= max(number - 1, 1)
        assert held <= outline.num_bytes
    assert fitting(deltas, outline, outline.num_bytes) == deltas
    for write in overlay.prepared().writes:
        write.put(states[0][write.name])
    assert all(np.array_equal(states[0][name], bits) for name, bits in states[-1].items())
    rig.fetcher.close()


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Outline, tuple[Manifest, ...]]:
    rig = Rig(tmp_path)
    rig.publish(5)
    anchor, *deltas = [rig.fetcher.manifest(Version(number)) for number in range(5)]
    rig.fetcher.close()
    return anchor.outline, tuple(deltas)


def test_one_delta_is_taken_whatever_its_size(chain: tuple[Outline, tuple[Manifest, ...]]) -> None:
    outline, deltas = chain
    assert fitting(deltas, outline, 0) == deltas[:1]
    assert fitting(deltas[:1], outline, 0) == deltas[:1]
    assert fitting(deltas, outline, 1 << 40) == deltas


def test_a_manifest_of_another_outline_ends_what_fits(chain: tuple[Outline, tuple[Manifest, ...]]) -> None:
    outline, (first, second, third, *_) = chain
    assert second.tiles is not None
    others = second.tiles.number[1:]
    odd = msgspec.structs.replace(second, tiles=msgspec.structs.replace(second.tiles, number=(1 << 30, *others)))
    assert fitting((first, odd, third), outline, 1 << 40) == (first,)
    assert fitting((odd, third), outline, 1 << 40) == (odd,)


def test_a_manifest_that_counts_absurdly_much_counts_as_whole_tiles(
    chain: tuple[Outline, tuple[Manifest, ...]],
) -> None:
    outline, (first, second, *_) = chain
    assert second.tiles is not None
    most = (2**63 - 1,) * len(second.tiles.number)
    odd = msgspec.structs.replace(second, tiles=msgspec.structs.replace(second.tiles, changed=most))
    assert fitting((first, odd), outline, outline.num_bytes) == (first, odd)
    assert fitting((first, odd), outline, outline.num_bytes - 1) == (first,)
