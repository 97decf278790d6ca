"""A version before its commit: its manifest, and the objects that have to be there first."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.checkpoint.codec import EncodedBody, EncodedTile, Level
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, blob_key
from slackwater.checkpoint.manifest import ENCODINGS, FORMAT, AnchorTensor, Bodies, Manifest, ObjectRef, Parent, Tiles
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError
from slackwater.ids import RunId, Version
from slackwater.publish.plan import pack
from slackwater.weights.diff import diff, hash_source
from slackwater.weights.image import FolderImage
from slackwater.weights.source import Quantizes, TensorSource

Progress = Callable[[str, int, int], None]
"""Told the stage (``encode`` in bytes, ``upload`` in bytes), how much is done, and of how much."""


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
        state=table.digest,
        step=label.step,
        created_at=label.created_at,
        objects=tuple(
            ObjectRef(key=keys[file], size=len(image.files[file]), sha256=digest) for file, digest in digests.items()
        ),
        tensors=tuple(_anchor_tensor(index, image, table, indexes) for index in range(len(table.outline.specs))),
        files=indexes,
    )
    return Draft(manifest=manifest, bodies={keys[file]: image.files[file] for file in digests}, table=table)


def _anchor_tensor(index: int, image: FolderImage, table: StateTable, indexes: Mapping[str, int]) -> AnchorTensor:
    spec, (first, end) = table.outline.specs[index], table.outline.first_tiles[index : index + 2]
    file, offset = image.place(spec.name)
    return AnchorTensor(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        object=indexes[file],
        offset=offset,
        digests=to_column(np.append(table.tiles[first:end], table.sums[index])),
    )


def draft_delta(
    label: Label,
    source: TensorSource,
    held: StateTable,
    baseline: Mapping[str, Bits],
    *,
    level: Level,
    threads: int,
    progress: Progress,
) -> Draft:
    """Draft a delta from ``held``, whose bits are ``baseline``, to ``source``. Tensors that it lacks stay."""
    batches = _encode(source, held, baseline, level, threads, progress)
    packs = pack([[body.body for body in batch] for batch in batches])
    bodies = [body for batch in batches for body in batch]
    numbered = [(held.outline.number(tile.place.spec.name, tile.place.tile.index), tile) for tile in _tiles(bodies)]
    table = _table_after(held, numbered)
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
        bodies=_bodies(bodies, packs.places),
        tiles=_tile_columns(held, table, numbered),
        quantizers=_quantizers(source),
    )
    return Draft(
        manifest=manifest, bodies={ref.key: blob for ref, blob in zip(objects, packs.blobs, strict=True)}, table=table
    )


def _encode(
    source: TensorSource,
    held: StateTable,
    baseline: Mapping[str, Bits],
    level: Level,
    threads: int,
    progress: Progress,
) -> list[list[EncodedBody]]:
    total = sum(spec.num_bytes for spec in source.specs().values())
    batches: list[list[EncodedBody]] = []
    done = 0
    for batch, bodies in diff(source, held.outline, baseline, level=level, threads=threads):
        done += sum(tile.count * spec.bits_dtype.itemsize for b in batch for spec, tile in map(held.outline.place, b))
        progress("encode", done, total)
        if bodies:
            batches.append(bodies)
    return batches


def _tiles(bodies: Iterable[EncodedBody]) -> Iterable[EncodedTile]:
    return (tile for body in bodies for tile in body.tiles)


_Numbered = Sequence[tuple[int, EncodedTile]]


def _table_after(held: StateTable, numbered: _Numbered) -> StateTable:
    tiles, sums = held.tiles.copy(), held.sums.copy()
    for number, tile in numbered:
        if tile.pre != int(tiles[number]):
            raise CorruptError(
                f"{tile.place} of the baseline isn't what was committed: its memory was written",
                hint="open the publisher again; it rebuilds its baseline from the bucket",
            )
        tiles[number] = tile.post
        tensor = held.outline.tensor_of(number)
        sums[tensor] = (int(sums[tensor]) + tile.sum_change) % (1 << 64)
    return StateTable(outline=held.outline, tiles=tiles, sums=sums)


def _bodies(bodies: Sequence[EncodedBody], places: Sequence[int]) -> Bodies:
    letters = {encoding: letter for letter, encoding in ENCODINGS.items()}
    return Bodies(
        object=tuple(places),
        length=tuple(len(body.body) for body in bodies),
        encoding="".join(letters[body.encoding] for body in bodies),
        tiles=tuple(len(body.tiles) for body in bodies),
    )


def _tile_columns(held: StateTable, table: StateTable, numbered: _Numbered) -> Tiles:
    pairs = [digest for _, tile in numbered for digest in (tile.pre, tile.post)]
    tensors = sorted({held.outline.tensor_of(number) for number, _ in numbered})
    return Tiles(
        number=tuple(number for number, _ in numbered),
        changed=tuple(tile.changed for _, tile in numbered),
        digests=to_column(np.array(pairs, dtype=np.uint64)),
        sums=to_column(table.sums[tensors] if tensors else np.empty(0, dtype=np.uint64)),
    )


def _quantizers(source: TensorSource) -> tuple[str, ...]:
    if not isinstance(source, Quantizes):
        return ()
    return tuple(sorted({quantizer.name for quantizer in source.quantizers.values()}))


def _blob_ref(run: RunId, blob: bytes) -> ObjectRef:
    digest = object_digest(blob)
    return ObjectRef(key=blob_key(run, digest), size=len(blob), sha256=digest)
