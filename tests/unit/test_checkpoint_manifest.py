"""Manifests that are right: the same after the wire, byte for byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_rig import blob, delta

from slackwater.checkpoint import manifest as module
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.manifest import (
    ENCODINGS,
    Bodies,
    BodyEntry,
    Manifest,
    TileEntry,
    Tiles,
    encode_manifest,
)
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import InvalidInputError


@st.composite
def deltas(draw: st.DrawFn) -> Manifest:
    lengths = draw(st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=4), max_size=3))
    flat = [length for part in lengths for length in part]
    counts = draw(st.lists(st.integers(1, 3), min_size=len(flat), max_size=len(flat)))
    total = sum(counts)
    numbers = draw(st.lists(st.integers(0, 10**6), min_size=total, max_size=total, unique=True))
    pairs = np.arange(2 * total).astype(np.uint64) + np.uint64(draw(st.integers(0, 2**63)))
    return delta(
        objects=tuple(blob(sum(part), index) for index, part in enumerate(lengths)),
        bodies=Bodies(
            object=tuple(index for index, part in enumerate(lengths) for _ in part),
            length=tuple(flat),
            encoding="".join(
                draw(st.lists(st.sampled_from(sorted(ENCODINGS)), min_size=len(flat), max_size=len(flat)))
            ),
            tiles=tuple(counts),
        ),
        tiles=Tiles(
            number=tuple(numbers),
            changed=tuple(draw(st.lists(st.integers(1, 2**32 - 1), min_size=total, max_size=total))),
            digests=to_column(pairs),
            sums=to_column(pairs[:1]),
        ),
    )


@given(deltas())
def test_a_delta_survives_the_wire_byte_for_byte_and_lists_every_tile_once(manifest: Manifest) -> None:
    body = encode_manifest(manifest)
    found = decode_manifest(body)
    assert found == manifest
    assert encode_manifest(found) == body
    assert manifest.tiles is not None
    listed = list(found.listed())
    tiles = [tile for entry in listed for tile in entry.tiles]
    assert [tile.number for tile in tiles] == list(manifest.tiles.number)
    assert sum(tile.changed for tile in tiles) == found.num_changed
    for index, item in enumerate(found.objects):
        spans = [(entry.offset, entry.offset + entry.length) for entry in listed if entry.object == index]
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == item.size


def test_bodies_lie_end_to_end_in_their_objects() -> None:
    pairs = np.array([1, 2, 3, 4, 5, 6, 2**64 - 1, 0], dtype=np.uint64)
    manifest = delta(
        objects=(blob(30), blob(7, 3)),
        bodies=Bodies(object=(0, 0, 1), length=(10, 20, 7), encoding="sdf", tiles=(1, 2, 1)),
        tiles=Tiles(number=(5, 0, 9, 2), changed=(1, 2, 3, 4), digests=to_column(pairs), sums=""),
    )
    assert list(manifest.listed()) == [
        BodyEntry(0, 0, 10, "sparse", (TileEntry(5, 1, 1, 2),)),
        BodyEntry(0, 10, 20, "dense", (TileEntry(0, 2, 3, 4), TileEntry(9, 3, 5, 6))),
        BodyEntry(1, 0, 7, "full", (TileEntry(2, 4, 2**64 - 1, 0),)),
    ]
    assert (manifest.num_changed, manifest.num_bytes) == (10, 37)


def test_a_version_that_changes_nothing_is_a_delta_without_bodies() -> None:
    nothing = delta(
        objects=(),
        bodies=Bodies(object=(), length=(), encoding="", tiles=()),
        tiles=Tiles(number=(), changed=(), digests="", sums=""),
    )
    found = decode_manifest(encode_manifest(nothing))
    assert (list(found.listed()), found.num_changed, found.num_bytes) == ([], 0, 0)


def test_a_fold_spans_several_versions_where_folds_are() -> None:
    nothing = delta(
        objects=(),
        bodies=Bodies(object=(), length=(), encoding="", tiles=()),
        tiles=Tiles(number=(), changed=(), digests="", sums=""),
    )
    assert decode_manifest(encode_manifest(nothing), fold=True) == nothing


def test_a_manifest_that_readers_do_not_hold_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 200)
    with pytest.raises(InvalidInputError, match="readers hold 200"):
        encode_manifest(
            delta(
                objects=(),
                bodies=Bodies(object=(), length=(), encoding="", tiles=()),
                tiles=Tiles(number=(), changed=(), digests="", sums=""),
            )
        )
