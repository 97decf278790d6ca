"""Manifests that are right: the same after the wire, byte for byte, and small for a model of 500,000 tensors."""

import gc
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint import manifest as module
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.manifest import (
    ENCODINGS,
    FORMAT,
    MAX_MANIFEST_BYTES,
    AnchorTensor,
    Bodies,
    BodyEntry,
    Manifest,
    ObjectRef,
    Parent,
    TileEntry,
    Tiles,
    encode_manifest,
)
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

SHA: Final = ObjectDigest("a" * 64)
STATE: Final = StateDigest("b" * 64)
K3_LAYERS, K3_EXPERTS = 93, 896
SECONDS: Final = 30
"""Loosely: it takes two where nothing else runs."""


def delta(
    *,
    objects: tuple[ObjectRef, ...],
    bodies: Bodies,
    tiles: Tiles,
    parent: StateDigest = STATE,
    state: StateDigest = STATE,
) -> Manifest:
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(8),
        kind="delta",
        parent=Parent(version=Version(7), state=parent),
        state=state,
        step=8,
        created_at="2026-01-01T00:00:00+00:00",
        objects=objects,
        bodies=bodies,
        tiles=tiles,
    )


def blob(size: int, number: int = 0) -> ObjectRef:
    digest = ObjectDigest(f"{number:064x}")
    return ObjectRef(f"r/blobs/{digest}", size, digest)


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


def k3_specs(layers: int) -> list[TensorSpec]:
    """The routed experts of Kimi K3, as they are released: codes and scales of three matrices each."""
    return [
        TensorSpec(name=f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w{matrix}.{part}",
                   dtype="U8", shape=shape)
        for layer in range(layers) for expert in range(K3_EXPERTS) for matrix in (1, 2, 3)
        for part, shape in (("weight_packed", (3072, 1792)), ("weight_scale", (3072, 112)))
    ]  # fmt: skip


def k3_table(outline: Outline, offset: int) -> StateTable:
    """Digests as random as real ones are."""
    numbers = np.arange(outline.num_tiles + len(outline.specs)).astype(np.uint64) + np.uint64(offset)
    mixed = (numbers * np.uint64(0x9E3779B97F4A7C15)) ^ (numbers << np.uint64(40))
    return StateTable(outline=outline, tiles=mixed[: outline.num_tiles].copy(), sums=mixed[outline.num_tiles :].copy())


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Half a million tensors hold no cycles: Python's collector would walk them again and again for nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_delta_of_500_000_tensors_takes_64_bytes_a_tensor_and_seconds() -> None:
    began = time.perf_counter()
    outline = Outline(k3_specs(K3_LAYERS))
    before, after = k3_table(outline, 1), k3_table(outline, 10**9)
    count = outline.num_tiles
    assert count == len(outline.specs) == 499_968
    # An expert's codes and scales make three bodies; at 1.4 % these have some 100 kB, 640 of them in a pack.
    bodies, per_pack = count // 2, 640
    lengths = (90_000 + np.arange(bodies) * 7919 % 20_000).tolist()
    packs = [lengths[begin : begin + per_pack] for begin in range(0, bodies, per_pack)]
    manifest = delta(
        objects=tuple(blob(sum(pack), index) for index, pack in enumerate(packs)),
        bodies=Bodies(
            object=tuple(index for index, pack in enumerate(packs) for _ in pack),
            length=tuple(lengths),
            encoding="s" * bodies,
            tiles=(2,) * bodies,
        ),
        tiles=Tiles(
            number=tuple(range(count)),
            changed=tuple((70_000 + np.arange(count) * 7919 % 20_000).tolist()),
            digests=to_column(np.stack((before.tiles, after.tiles), axis=1).reshape(-1)),
            sums=to_column(after.sums),
        ),
        parent=before.digest,
        state=after.digest,
    )
    body = encode_manifest(manifest)
    assert len(body) <= 64 * count + 4096
    assert before.after(decode_manifest(body)).digest == after.digest
    assert time.perf_counter() - began < SECONDS


def test_an_anchor_of_500_000_tensors_is_one_that_readers_hold() -> None:
    """Shown on some layers: each tensor takes its share of what readers hold."""
    began = time.perf_counter()
    outline = Outline(k3_specs(4))
    state, offset, tensors = k3_table(outline, 1), 0, list[AnchorTensor]()
    for index, spec in enumerate(outline.specs):
        digests = np.append(state.tiles[index : index + 1], state.sums[index])
        tensors.append(AnchorTensor(spec.name, spec.dtype, spec.shape, 0, 10**12 + offset, to_column(digests)))
        offset += spec.num_bytes
    manifest = Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(0),
        kind="anchor",
        state=state.digest,
        step=0,
        created_at="2026-01-01T00:00:00+00:00",
        objects=(ObjectRef("r/anchors/0/model.safetensors", 10**12 + offset, SHA),),
        tensors=tuple(tensors),
        files={"model.safetensors": 0},
    )
    body = encode_manifest(manifest)
    assert len(body) * 500_000 < MAX_MANIFEST_BYTES * len(tensors)
    assert StateTable.of_anchor(decode_manifest(body)).digest == state.digest
    assert time.perf_counter() - began < SECONDS
