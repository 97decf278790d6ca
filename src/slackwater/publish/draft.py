"""A version before its commit: its manifest, and the objects that have to be there first."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slackwater.checkpoint.codec import EncodedTile
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, blob_key
from slackwater.checkpoint.manifest import FORMAT, Manifest, ObjectRef, Parent, TensorEntry, TileEntry
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, TensorSpec, tile_count, tiles
from slackwater.ids import RunId, Version
from slackwater.publish.plan import pack
from slackwater.weights.diff import TileDiff, diff, hash_source
from slackwater.weights.image import FolderImage
from slackwater.weights.source import TensorSource

Progress = Callable[[str, int, int], None]
"""Told the stage (``encode`` in tiles, ``upload`` in bytes), how much is done, and of how much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a manifest says of its version beside the weights."""

    run: RunId
    version: Version
    step: int
    created_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """All of a version, in memory."""

    manifest: Manifest
    bodies: Mapping[str, bytes | bytearray]
    """Every object of the manifest, by key."""
    table: StateTable
    """The state after this version."""

    @property
    def changed(self) -> int:
        """Elements that the manifest lists as changed."""
        return sum(tile.changed for entry in self.manifest.tensors for tile in entry.tiles)


def draft_anchor(label: Label, image: FolderImage, *, threads: int) -> Draft:
    """Draft an anchor of everything in ``image``."""
    table = hash_source(image, threads=threads)
    digests = {file: object_digest(body) for file, body in sorted(image.files.items())}
    content = hashlib.sha256("".join(f"{file} {digests[file]}\n" for file in digests).encode()).hexdigest()[:16]
    keys = {file: anchor_key(label.run, label.version, content, file) for file in digests}
    indexes = {file: index for index, file in enumerate(digests)}
    manifest = Manifest(
        format=FORMAT,
        run=label.run,
        version=label.version,
        kind="anchor",
        parent=None,
        state=table.digest,
        step=label.step,
        created_at=label.created_at,
        objects=tuple(
            ObjectRef(key=keys[file], size=len(image.files[file]), sha256=digest) for file, digest in digests.items()
        ),
        tensors=tuple(_anchor_entry(spec, image, table, indexes) for spec in image.specs().values()),
        files=indexes,
    )
    return Draft(manifest=manifest, bodies={keys[file]: image.files[file] for file in digests}, table=table)


def _anchor_entry(spec: TensorSpec, image: FolderImage, table: StateTable, indexes: Mapping[str, int]) -> TensorEntry:
    file, offset = image.place(spec.name)
    width = spec.bits_dtype.itemsize
    listed = tuple(
        TileEntry(
            index=tile.index,
            encoding="raw",
            object=indexes[file],
            offset=offset + tile.start * width,
            length=tile.count * width,
            changed=tile.count,
            pre=None,
            post=table.tile(spec.name, tile.index),
        )
        for tile in tiles(spec)
    )
    return TensorEntry(name=spec.name, dtype=spec.dtype, shape=spec.shape, tiles=listed)


def draft_delta(
    label: Label,
    source: TensorSource,
    held: StateTable,
    baseline: Mapping[str, Bits],
    *,
    threads: int,
    progress: Progress,
) -> Draft:
    """Draft a delta from ``held``, whose bits are ``baseline``, to ``source``. Tensors that it lacks stay."""
    changes = _find_changes(source, baseline, threads, progress)
    packs = pack([encoded.body for _, encoded in changes])
    entries: defaultdict[str, list[TileEntry]] = defaultdict(list)
    for (change, encoded), place in zip(changes, packs.places, strict=True):
        pre = held.tile(change.name, change.tile.index)
        entries[change.name].append(_delta_entry(change, encoded, pre, place))
    table = held.with_tiles({name: {t.index: t.post for t in listed} for name, listed in entries.items()})
    objects = [_blob_ref(label.run, blob) for blob in packs.blobs]
    manifest = Manifest(
        format=FORMAT,
        run=label.run,
        version=label.version,
        kind="delta",
        parent=Parent(version=Version(label.version - 1), state=held.digest),
        state=table.digest,
        step=label.step,
        created_at=label.created_at,
        objects=tuple(objects),
        tensors=tuple(_tensor_entry(held, name, listed) for name, listed in entries.items()),
    )
    bodies = {ref.key: blob for ref, blob in zip(objects, packs.blobs, strict=True)}
    return Draft(manifest=manifest, bodies=bodies, table=table)


def _find_changes(
    source: TensorSource, baseline: Mapping[str, Bits], threads: int, progress: Progress
) -> list[tuple[TileDiff, EncodedTile]]:
    total = sum(tile_count(spec) for spec in source.specs().values())
    changes: list[tuple[TileDiff, EncodedTile]] = []
    for done, found in enumerate(diff(source, baseline, threads=threads), start=1):
        progress("encode", done, total)
        if found.encoded is not None:
            changes.append((found, found.encoded))
    return changes


def _delta_entry(change: TileDiff, encoded: EncodedTile, pre: str, place: tuple[int, int]) -> TileEntry:
    return TileEntry(
        index=change.tile.index,
        encoding=encoded.encoding,
        object=place[0],
        offset=place[1],
        length=len(encoded.body),
        changed=encoded.changed,
        pre=pre,
        post=change.post,
    )


def _tensor_entry(held: StateTable, name: str, listed: Sequence[TileEntry]) -> TensorEntry:
    spec = held.tensors[name].spec
    return TensorEntry(name=name, dtype=spec.dtype, shape=spec.shape, tiles=tuple(listed))


def _blob_ref(run: RunId, blob: bytes) -> ObjectRef:
    digest = object_digest(blob)
    return ObjectRef(key=blob_key(run, digest), size=len(blob), sha256=digest)
