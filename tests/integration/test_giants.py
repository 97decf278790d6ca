"""A model of 500,000 tensors: manifests are small, and all is done in seconds."""

import gc
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from manifest_rig import SHA, blob, delta

from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    AnchorTensor,
    Bodies,
    Manifest,
    ObjectRef,
    Tiles,
    encode_manifest,
)
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.ids import RunId, Version

K3_LAYERS, K3_EXPERTS = 93, 896
SECONDS: Final = 30
"""Loosely: it takes two where nothing else runs."""


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


def test_a_giants_names_are_grouped_in_a_breath() -> None:
    names = [
        f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w{matrix}.weight_{part}"
        for layer in range(92)
        for expert in range(896)
        for matrix in (1, 2, 3)
        for part in ("packed", "scale")
    ]
    begin = time.process_time()
    found = groups(names)
    assert time.process_time() - begin < 5
    assert (len(names), len(found)) == (494_592, 92 * 896)
