"""A version before its commit: its manifest, and the objects that have to be there first."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key
from slackwater.checkpoint.manifest import FORMAT, AnchorTensor, Manifest, ObjectRef, Parent
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.ids import RunId, Version
from slackwater.publish.delta import Progress, PutObject, encode_delta
from slackwater.weights.diff import hash_source
from slackwater.weights.image import FolderImage
from slackwater.weights.source import Quantizes, TensorSource


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
    put: PutObject,
    progress: Progress,
) -> Draft:
    """Draft a delta from ``held``, whose bits are ``baseline``, to ``source``. Tensors that it lacks stay.

    Objects are put as soon as they are made.
    """
    bodies: dict[str, bytes] = {}

    def take(ref: ObjectRef, body: bytes) -> None:
        bodies[ref.key] = body
        put(ref, body)

    encoded = encode_delta(
        label.run,
        source,
        held,
        baseline,
        level=level,
        threads=threads,
        put=take,
        progress=progress,
    )
    manifest = Manifest(
        format=FORMAT,
        run=label.run,
        version=label.version,
        kind="delta",
        parent=Parent(version=Version(label.version - 1), state=held.digest),
        state=encoded.table.digest,
        step=label.step,
        created_at=label.created_at,
        objects=encoded.objects,
        bodies=encoded.bodies,
        tiles=encoded.tiles,
        quantizers=_quantizers(source),
    )
    return Draft(manifest=manifest, bodies=bodies, table=encoded.table)


def _quantizers(source: TensorSource) -> tuple[str, ...]:
    if not isinstance(source, Quantizes):
        return ()
    return tuple(sorted({quantizer.name for quantizer in source.quantizers.values()}))
