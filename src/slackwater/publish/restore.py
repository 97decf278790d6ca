"""A version's weights, rebuilt from the bucket and proved: what a publisher diffs against after a start."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.application import apply_taken, places_of, take
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import AnchorTensor, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError
from slackwater.ids import ObjectDigest, RunId, Version
from slackwater.publish.objects import fetch_object
from slackwater.publish.path import Reads, along, read_path


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


def restore(bucket: Reads, run: RunId, version: Version) -> Restored:
    """Rebuild a version from its anchor, deltas and folds; every object and tile is checked on the way.

    Raises:
        NotFoundError: The version isn't committed, or no anchor leads to it.
        CorruptError: A manifest, an object or a tile isn't what its digest says.
    """

    def load(path: list[Manifest]) -> Restored:
        restored = _restored(path, {})
        bits = _load_anchor(bucket, path[0], StateTable.of_anchor(path[0]))
        for manifest in path[1:]:
            _apply_delta(bucket, manifest, restored.table.outline, bits)
        return replace(restored, bits=bits)

    return along(bucket, run, version, load)


def outline(bucket: Get, run: RunId, version: Version) -> Restored:
    """A version without its bits, from the manifests alone: enough to publish an anchor on, whatever became of objects.

    Raises:
        NotFoundError: The version isn't committed, or no anchor leads to it.
        CorruptError: A manifest contradicts itself or its parent.
    """
    return _restored(read_path(bucket, run, version), {})


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


def _load_anchor(bucket: Get, manifest: Manifest, table: StateTable) -> dict[str, Bits]:
    bits: dict[str, Bits] = {}
    by_object: defaultdict[int, list[AnchorTensor]] = defaultdict(list)
    for tensor in manifest.tensors:
        by_object[tensor.object].append(tensor)
    for index, tensors in sorted(by_object.items()):
        body = memoryview(fetch_object(bucket, manifest.objects[index]))
        for tensor in tensors:
            spec = tensor.spec
            held = body[tensor.offset : tensor.offset + spec.num_bytes]
            bits[spec.name] = np.frombuffer(held, spec.bits_dtype).copy()
    for number in range(table.outline.num_tiles):
        spec, tile = table.outline.place(number)
        if tile_digest(tile.take(bits[spec.name])) != int(table.tiles[number]):
            raise CorruptError(f"{spec.name} tile {tile.index} isn't that of anchor {manifest.version}")
    return bits


def _apply_delta(bucket: Get, manifest: Manifest, outline: Outline, bits: Mapping[str, Bits]) -> None:
    """Apply a delta in place, object by object, so that one object is held at a time."""
    for index, entries in groupby(manifest.listed(), lambda entry: entry.object):
        pack = memoryview(fetch_object(bucket, manifest.objects[index]))
        for entry in entries:
            places = places_of(outline, entry)
            body = pack[entry.offset : entry.offset + entry.length]
            apply_taken(places, entry, body, take(places, bits.__getitem__), bits.__getitem__)
