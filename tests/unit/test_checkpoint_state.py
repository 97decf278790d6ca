import hashlib
import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slackwater.checkpoint.manifest import (
    FORMAT,
    Manifest,
    ObjectRef,
    Parent,
    TensorEntry,
    TileEntry,
    decode_manifest,
    encode_manifest,
)
from slackwater.checkpoint.state import StateTable, TensorState
from slackwater.checkpoint.tensor import TILE_ELEMENTS, TensorSpec, tile_at, tile_count, tiles
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError, WrongBaseError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32
SHA = ObjectDigest("a" * 64)


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def table(**digests: str) -> StateTable:
    return StateTable.of_digests({name: spec(name, 4) for name in digests}, {n: [d] for n, d in digests.items()})


def delta(parent: StateTable, result: StateTable, *entries: TensorEntry) -> Manifest:
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(1),
        kind="delta",
        parent=Parent(version=Version(0), state=parent.digest),
        state=result.digest,
        step=1,
        created_at="2026-01-01T00:00:00+00:00",
        objects=(ObjectRef("r/blobs/x", 100, SHA),),
        tensors=entries,
    )


def entry(name: str, pre: str, post: str, **changes: Any) -> TensorEntry:
    tile = TileEntry(0, "sparse", 0, 0, 10, 1, pre, post)
    return replace(TensorEntry(name, "BF16", (4,), (tile,)), **changes)


def anchor(state: StateTable) -> Manifest:
    entries = [
        TensorEntry(n, "BF16", (4,), (TileEntry(0, "raw", 0, 8 * i, 8, 4, None, t.digests[0]),))
        for i, (n, t) in enumerate(state.tensors.items())
    ]
    return replace(
        delta(state, state, *entries),
        kind="anchor",
        parent=None,
        objects=(ObjectRef("r/anchors/0/model.safetensors", 100, SHA),),
        files={"model.safetensors": 0},
    )


def test_the_state_digest_is_what_the_format_page_says() -> None:
    hasher = hashlib.sha256(b"slackwater/1 state\n")
    for name, digest in (("a", ONE), ("b", TWO)):
        hasher.update(struct.pack("<I", 1) + name.encode() + struct.pack("<I", 4) + b"BF16")
        hasher.update(struct.pack("<IQ", 1, 4) + struct.pack("<I", 1) + bytes.fromhex(digest))
    assert table(b=TWO, a=ONE).digest == hasher.hexdigest()


def test_the_digest_tells_name_dtype_shape_and_bits_apart() -> None:
    states = [
        {"a": TensorState(spec=spec("a", 4), digests=(ONE,))},
        {"b": TensorState(spec=spec("b", 4), digests=(ONE,))},
        {"a": TensorState(spec=spec("a", 4, dtype="F16"), digests=(ONE,))},
        {"a": TensorState(spec=spec("a", 2, 2), digests=(ONE,))},
        {"a": TensorState(spec=spec("a", 4), digests=(TWO,))},
        {},
    ]
    assert len({StateTable(tensors=state).digest for state in states}) == len(states)


def test_a_delta_moves_the_table_and_back_again_gives_the_first_digest() -> None:
    before, after = table(a=ONE, b=TWO), table(a=ONE, b=THREE)
    moved = before.after(delta(before, after, entry("b", TWO, THREE)))
    assert moved == after
    assert moved.after(delta(after, before, entry("b", THREE, TWO))).digest == before.digest


def test_an_anchor_gives_its_table() -> None:
    state = table(a=ONE, b=TWO)
    assert StateTable.of_anchor(anchor(state)) == state
    assert (state.num_elements, state.num_bytes) == (8, 16)
    with pytest.raises(CorruptError, match="make state"):
        StateTable.of_anchor(replace(anchor(state), state=StateDigest("f" * 64)))
    with pytest.raises(CorruptError, match="not an anchor"):
        StateTable.of_anchor(delta(state, state))
    with pytest.raises(CorruptError, match="not a delta"):
        state.after(anchor(state))


def test_f12_a_delta_on_another_state_is_a_wrong_base() -> None:
    held, other = table(a=ONE), table(a=TWO)
    with pytest.raises(WrongBaseError, match="version 1 of r was made on"):
        held.after(delta(other, held, entry("a", TWO, ONE)))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (entry("zz", ONE, TWO), "names zz"),
        (entry("a", ONE, TWO, shape=(2, 2)), r"a is BF16 \[2, 2\]"),
        (entry("a", ONE, TWO, dtype="F16"), "a is F16"),
        (entry("a", THREE, TWO), "a tile 0: the delta's digest before"),
        (entry("a", ONE, THREE), "make state"),
    ],
)
def test_a1_13_a1_16_a_delta_that_contradicts_its_parent_is_corrupt(listed: TensorEntry, message: str) -> None:
    before, after = table(a=ONE), table(a=TWO)
    with pytest.raises(CorruptError, match=message):
        before.after(delta(before, after, listed))


def test_a_tile_that_is_not_there_is_told() -> None:
    with pytest.raises(NotFoundError, match="tile 1 of a"):
        table(a=ONE).tile("a", 1)
    with pytest.raises(NotFoundError, match="tile 0 of b"):
        table(a=ONE).tile("b", 0)


@given(st.lists(st.integers(0, 3000), max_size=3))
def test_tiles_cover_a_tensor_once(shape: list[int]) -> None:
    tensor = spec("t", *shape)
    if tile_count(tensor) > 64:
        return
    cut = list(tiles(tensor))
    assert [tile.index for tile in cut] == list(range(tile_count(tensor)))
    assert sum(tile.count for tile in cut) == tensor.num_elements
    assert all(before.start + before.count == after.start for before, after in itertools.pairwise(cut))
    row = tensor.num_elements // max(tensor.shape[0], 1) if tensor.shape else 1
    assert all(tile.count <= max(TILE_ELEMENTS, row) and tile.count % row == 0 for tile in cut)


def test_a_shape_of_any_size_is_cut_without_counting() -> None:
    vast = spec("v", 2**40, 2**20)
    assert tile_at(vast, tile_count(vast) - 1).count == TILE_ELEMENTS
    with pytest.raises(InvalidInputError, match="tiles, not a tile"):
        tile_at(vast, tile_count(vast))


def test_a_manifest_survives_the_wire_byte_for_byte() -> None:
    before, after = table(a=ONE), table(a=TWO)
    for manifest in (anchor(before), delta(before, after, entry("a", ONE, TWO)), delta(before, before)):
        body = encode_manifest(manifest)
        assert decode_manifest(body) == manifest
        assert encode_manifest(decode_manifest(body)) == body
