"""A version's weights, rebuilt from the bucket and proved: what a publisher diffs against after a start."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.codec import decode_dense, decode_tile
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.manifest import Manifest, ObjectRef, TensorEntry, TileEntry
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, Tile, TileWrite, tile_at
from slackwater.errors import CorruptError, InternalError, NotFoundError
from slackwater.ids import ObjectDigest, RunId, Version
from slackwater.publish.lineage import read_manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A version in memory."""

    version: Version
    anchor: Version
    """The anchor that its chain begins with."""
    side_files: Mapping[str, ObjectDigest]
    """Digests of the anchor's config, tokenizer and template."""
    table: StateTable
    bits: Mapping[str, Bits]
    """Every tensor, flat and writable."""


def restore(bucket: Get, run: RunId, version: Version) -> Restored:
    """Rebuild a version from its anchor and deltas; every object and tile is checked on the way.

    Raises:
        NotFoundError: The version isn't committed, or no anchor leads to it.
        CorruptError: A manifest, an object or a tile isn't what its digest says.
    """
    chain = _chain(bucket, run, version)
    bits = _load_anchor(bucket, chain[0])
    for manifest in chain[1:]:
        _apply_delta(bucket, manifest, bits)
    return _restored(chain, bits)


def outline(bucket: Get, run: RunId, version: Version) -> Restored:
    """A version without its bits, from the manifests alone: enough to publish an anchor on, whatever became of objects.

    Raises:
        NotFoundError: The version isn't committed, or no anchor leads to it.
        CorruptError: A manifest contradicts itself or its parent.
    """
    chain = _chain(bucket, run, version)
    return _restored(chain, {})


def _chain(bucket: Get, run: RunId, version: Version) -> list[Manifest]:
    """The manifests that make ``version``: an anchor, then deltas."""
    manifests: dict[Version, Manifest] = {}

    def kind_of(wanted: Version) -> Literal["anchor", "delta"] | None:
        try:
            manifests[wanted] = read_manifest(bucket, run, wanted)
        except NotFoundError:
            return None
        return manifests[wanted].kind

    path = plan_path(None, version, kind_of)
    if path.anchor is None:
        raise InternalError(f"the path to version {version} of {run} begins nowhere")
    return [manifests[number] for number in (path.anchor, *path.deltas)]


def _restored(chain: Sequence[Manifest], bits: Mapping[str, Bits]) -> Restored:
    table = StateTable.of_anchor(chain[0])
    for manifest in chain[1:]:
        table = table.after(manifest)
    return Restored(
        version=chain[-1].version,
        anchor=chain[0].version,
        side_files=chain[0].side_files,
        table=table,
        bits=bits,
    )


def put_write(write: TileWrite, bits: Bits) -> None:
    """Write a tile into its tensor's flat, writable bits."""
    tile = bits[write.tile.start : write.tile.start + write.tile.count]
    if write.positions is None:
        tile[:] = write.values
    else:
        tile[write.positions] = write.values


def _load_anchor(bucket: Get, manifest: Manifest) -> dict[str, Bits]:
    bits: dict[str, Bits] = {
        entry.name: np.empty(entry.spec.num_elements, dtype=entry.spec.bits_dtype) for entry in manifest.tensors
    }
    for entry, tile, listed, body in _bodies(bucket, manifest):
        bits[entry.name][tile.start : tile.start + tile.count] = decode_dense(entry, tile, listed, body)
    return bits


def _apply_delta(bucket: Get, manifest: Manifest, bits: Mapping[str, Bits]) -> None:
    for entry, tile, listed, body in _bodies(bucket, manifest):
        old = bits[entry.name][tile.start : tile.start + tile.count]
        write = decode_tile(entry, tile, listed, body, old)
        if write is not None:
            put_write(write, bits[entry.name])


def _bodies(bucket: Get, manifest: Manifest) -> Iterator[tuple[TensorEntry, Tile, TileEntry, memoryview]]:
    """Every listed tile with its body, object by object, so that one object is held at a time."""
    listed: defaultdict[int, list[tuple[TensorEntry, TileEntry]]] = defaultdict(list)
    for entry in manifest.tensors:
        for tile in entry.tiles:
            listed[tile.object].append((entry, tile))
    for index, group in sorted(listed.items()):
        body = memoryview(_fetch(bucket, manifest.objects[index]))
        for entry, tile in group:
            yield entry, tile_at(entry.spec, tile.index), tile, body[tile.offset : tile.offset + tile.length]


def _fetch(bucket: Get, ref: ObjectRef) -> bytes:
    body = bucket.get(ref.key, max_bytes=ref.size)
    if len(body) != ref.size:
        raise CorruptError(f"{ref.key} has {len(body)} bytes, and its manifest says {ref.size}")
    if object_digest(body) != ref.sha256:
        raise CorruptError(f"{ref.key} hasn't the SHA-256 that its manifest says")
    return body
