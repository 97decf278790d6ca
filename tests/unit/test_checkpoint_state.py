"""Outline and state table: what a version is, by digests alone."""

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from slackwater.checkpoint.columns import from_column, to_column
from slackwater.checkpoint.manifest import FORMAT, AnchorTensor, Bodies, Manifest, ObjectRef, Parent, Tiles
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError, NotFoundError, WrongBaseError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

SHA = ObjectDigest("a" * 64)
BIG = TensorSpec(name="b.up_proj.weight", dtype="BF16", shape=(16, 2**19))
"""Sixteen tiles."""
SPECS = (
    TensorSpec(name="a", dtype="BF16", shape=(4,)),
    BIG,
    TensorSpec(name="c", dtype="F32", shape=()),
    TensorSpec(name="d.empty", dtype="I8", shape=(0, 3)),
    TensorSpec(name="é", dtype="F8_E4M3", shape=(2, 2)),
)
OUTLINE = Outline(SPECS)


def words(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def table(outline: Outline = OUTLINE, **changed: int) -> StateTable:
    """Tile n has digest n + 1; ``t3=9`` gives tile 3 another digest, ``s0=7`` tensor 0 another sum."""
    tiles = np.arange(1, outline.num_tiles + 1).astype(np.uint64)
    sums = np.arange(100, 100 + len(outline.specs)).astype(np.uint64)
    for place, value in changed.items():
        (tiles if place[0] == "t" else sums)[int(place[1:])] = value
    return StateTable(outline=outline, tiles=tiles, sums=sums)


def delta(parent: StateTable, result: StateTable, *numbers: int) -> Manifest:
    """A delta that lists these tiles."""
    pairs = [int(digest) for number in numbers for digest in (parent.tiles[number], result.tiles[number])]
    tensors = sorted({parent.outline.tensor_of(number) for number in numbers})
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(1),
        kind="delta",
        parent=Parent(version=Version(0), state=parent.digest),
        state=result.digest,
        step=1,
        created_at="2026-01-01T00:00:00+00:00",
        objects=(ObjectRef("r/blobs/x", 10 * len(numbers), SHA),) if numbers else (),
        bodies=Bodies(
            object=(0,) * len(numbers),
            length=(10,) * len(numbers),
            encoding="s" * len(numbers),
            tiles=(1,) * len(numbers),
        ),
        tiles=Tiles(
            number=numbers,
            changed=(1,) * len(numbers),
            digests=to_column(words(*pairs)),
            sums=to_column(result.sums[tensors]),
        ),
    )


def anchor(state: StateTable) -> Manifest:
    first, offset, tensors = state.outline.first_tiles, 0, list[AnchorTensor]()
    for index, spec in enumerate(state.outline.specs):
        digests = np.append(state.tiles[first[index] : first[index + 1]], state.sums[index])
        tensors.append(AnchorTensor(spec.name, spec.dtype, spec.shape, 0, offset, to_column(digests)))
        offset += spec.num_bytes
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(0),
        kind="anchor",
        state=state.digest,
        step=0,
        created_at="2026-01-01T00:00:00+00:00",
        objects=(ObjectRef("r/anchors/0/model.safetensors", offset, SHA),),
        tensors=tuple(tensors),
        files={"model.safetensors": 0},
    )


def altered(manifest: Manifest, **changes: Any) -> Manifest:
    """Other columns of its tiles."""
    assert manifest.tiles is not None
    return replace(manifest, tiles=replace(manifest.tiles, **changes))


def test_the_digests_are_those_of_the_page() -> None:
    outline = hashlib.sha256(b"slackwater/2 outline\n")
    for spec in sorted(SPECS, key=lambda spec: spec.name):
        for text in (spec.name, spec.dtype):
            outline.update(struct.pack("<I", len(text.encode())) + text.encode())
        outline.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
    assert OUTLINE.digest == outline.digest()
    state = hashlib.sha256(b"slackwater/2 state\n" + outline.digest())
    state.update(struct.pack("<19Q", *range(1, 20)) + struct.pack("<5Q", *range(100, 105)))
    assert (OUTLINE.num_tiles, table().digest) == (19, state.hexdigest())


def test_the_digest_tells_name_dtype_shape_order_bits_and_sums_apart() -> None:
    outlines = [
        Outline(specs)
        for specs in (
            (),
            (TensorSpec(name="a", dtype="BF16", shape=(4,)),),
            (TensorSpec(name="b", dtype="BF16", shape=(4,)),),
            (TensorSpec(name="a", dtype="F16", shape=(4,)),),
            (TensorSpec(name="a", dtype="BF16", shape=(2, 2)),),
            (TensorSpec(name="a", dtype="BF16", shape=(4, 1)),),
            (TensorSpec(name="aB", dtype="F16", shape=(4,)),),
        )
    ]
    states = [table(outline) for outline in outlines] + [table(outlines[1], t0=9), table(outlines[1], s0=9)]
    assert len({state.digest for state in states}) == len(states)


def test_tiles_are_numbered_through_all_tensors() -> None:
    assert OUTLINE.first_tiles == (0, 1, 17, 18, 18, 19)
    assert [OUTLINE.tensor_of(number) for number in (0, 1, 16, 17, 18)] == [0, 1, 1, 2, 4]
    for number in range(OUTLINE.num_tiles):
        spec, tile = OUTLINE.place(number)
        assert OUTLINE.number(spec.name, tile.index) == number
    assert OUTLINE.num_elements == sum(spec.num_elements for spec in SPECS)
    assert OUTLINE.num_bytes == sum(spec.num_bytes for spec in SPECS)
    for number in (-1, 19):
        with pytest.raises(NotFoundError, match=f"no tile {number} of 19"):
            OUTLINE.place(number)
    for name, index in (("d.empty", 0), ("a", 1), ("a", -1), ("z", 0)):
        with pytest.raises(NotFoundError, match=f"no tile {index} of {name}"):
            OUTLINE.number(name, index)


def test_an_outline_is_its_tensors_in_any_order() -> None:
    again = Outline(reversed(SPECS))
    assert (again, hash(again), again.digest) == (OUTLINE, hash(OUTLINE), OUTLINE.digest)
    assert again != Outline(SPECS[1:])
    assert again != SPECS


def test_a_delta_moves_the_table_and_back_again_gives_the_first_digest() -> None:
    before, after = table(), table(t0=77, t3=78, t18=79, s0=1, s1=2, s4=3)
    moved = before.after(delta(before, after, 18, 3, 0))  # in any order
    assert moved.digest == after.digest
    assert moved.after(delta(after, before, 0, 3, 18)).digest == before.digest
    assert before.digest == table().digest
    assert before.after(delta(before, before)).digest == before.digest


def test_a_table_cannot_be_written() -> None:
    for array in (table().tiles, table().sums):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_anchor_gives_its_table() -> None:
    state = table()
    found = StateTable.of_anchor(anchor(state))
    assert found.digest == state.digest
    assert (found.tiles.tolist(), found.sums.tolist()) == (state.tiles.tolist(), state.sums.tolist())
    assert anchor(state).num_changed == OUTLINE.num_elements
    empty = table(Outline(()))
    assert StateTable.of_anchor(anchor(empty)).digest == empty.digest
    with pytest.raises(CorruptError, match="make state"):
        StateTable.of_anchor(replace(anchor(state), state=StateDigest("f" * 64)))
    with pytest.raises(CorruptError, match="not an anchor"):
        StateTable.of_anchor(delta(state, state))
    with pytest.raises(CorruptError, match="is an anchor, not a delta"):
        state.after(anchor(state))


def test_a1_09_f12_a_delta_on_another_state_is_a_wrong_base() -> None:
    """Version 5 failed here, so version 6, which was made on it, is refused; from version 5 on it goes on."""
    four, five, six = table(), table(t0=50, s0=51), table(t0=60, s0=61)
    with pytest.raises(WrongBaseError, match=f"made on {five.digest[:12]}, and the state held is {four.digest[:12]}"):
        four.after(delta(five, six, 0))
    assert four.after(delta(four, five, 0)).after(delta(five, six, 0)).digest == six.digest


def test_a1_13_a1_16_tensors_that_the_parent_lacks_are_refused() -> None:
    """A delta names no tensors: other names, shapes or dtypes are another outline, so another state."""
    other = Outline([*SPECS, TensorSpec(name="z", dtype="BF16", shape=(4,))])
    wider = Outline([TensorSpec(name="a", dtype="BF16", shape=(8,)), *SPECS[1:]])
    for outline in (other, wider):
        with pytest.raises(WrongBaseError):
            table().after(delta(table(outline), table(outline, t0=9), 0))


def test_a_delta_that_contradicts_its_parent_is_corrupt() -> None:
    before, after = table(), table(t0=77, t3=78, s0=1, s1=2)
    good = delta(before, after, 0, 3)
    assert before.after(good).digest == after.digest
    for manifest, message in (
        (altered(good, number=(0, 19)), "names tile 19, and its parent has 19"),
        (altered(good, number=(0, 2**32 - 2)), "names tile 4294967294"),
        (altered(good, number=(0, 2)), "tile 2: the delta's digest before isn't its parent's"),
        (altered(good, digests=to_column(words(1, 77, 5, 78))), "tile 3: the delta's digest before"),
        (altered(good, digests=to_column(words(1, 77, 4, 79))), "make state"),
        (altered(good, sums=to_column(words(1, 3))), "make state"),
        (altered(good, sums=to_column(words(1))), r"tiles\.sums: 8 bytes instead of 16"),
        (altered(good, sums=to_column(words(1, 2, 3))), r"tiles\.sums: 24 bytes"),
        (altered(good, sums="!"), r"tiles\.sums: it is no base64"),
        (replace(good, state=before.digest), "make state"),
    ):
        with pytest.raises(CorruptError, match=message):
            before.after(manifest)
    assert before.digest == table().digest


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_columns_are_words_little_end_first(count: int) -> None:
    numbers = [(index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 for index in range(count)]
    text = to_column(words(*numbers))
    found = from_column(text, count, "x")
    assert found.tolist() == numbers
    assert not found.flags.writeable
    assert len(text) == -(-8 * count // 3) * 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("AAAAAAAAAAA", "no base64"),
        ("AAAAAAAAAAA=\n", "no base64"),
        (" AAAAAAAAAAA=", "no base64"),
        ("AAAAAAAAAA-=", "no base64"),
        ("AAAAAAAAAAé=", "no base64"),
        ("AAAAAAAAAAA==", ""),
        ("AAAAAAAAAAB=", "the form that has no other"),
        ("", "0 bytes instead of 8"),
        ("AAAA", "3 bytes instead of 8"),
        ("AAAAAAAAAAAAAAAA", "12 bytes instead of 8"),
        ("AAAAAAAAAAAAAAAAAAAAAA==", "16 bytes instead of 8"),
    ],
)
def test_a_column_has_one_form_alone(text: str, why: str) -> None:
    with pytest.raises(CorruptError, match=f"manifest field x: .*{why}"):
        from_column(text, 1, "x")
