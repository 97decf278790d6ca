"""A version before its commit: its manifest, and the objects that have to be there first."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key
from slackwater.checkpoint.manifest import FORMAT, MAX_NANS, AnchorTensor, Manifest, ObjectRef, Parent
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.ids import ObjectDigest, RunId, Version
from slackwater.publish.delta import DeltaEncoder, Effort, Progress, PutObject
from slackwater.weights.diff import find_nans, hash_source
from slackwater.weights.image import FolderImage
from slackwater.weights.source import Quantizes, TensorSource

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a manifest says of its version beside the weights."""

    run: RunId
    version: Version
    step: int
    created_at: str
    canary: Canary | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """All of a version, in memory."""

    manifest: Manifest
    bodies: Mapping[str, bytes | bytearray]
    """By key, the objects of the manifest that are to be uploaded."""
    table: StateTable
    """The state after this version."""


def draft_anchor(
    label: Label, image: FolderImage, *, threads: int, known: Mapping[ObjectDigest, ObjectRef] | None = None
) -> Draft:
    """Draft an anchor of everything in ``image``.

    Args:
        label: The version.
        image: The folder.
        threads: Tiles hashed at once.
        known: Objects of an earlier anchor, by digest: files that are equal are linked, and not among the bodies.
    """
    links = known or {}
    nans = find_nans(image, threads=threads)[:MAX_NANS]
    warn_of_nans(nans)
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
            links.get(digest) or ObjectRef(key=keys[file], size=len(image.files[file]), sha256=digest)
            for file, digest in digests.items()
        ),
        tensors=tuple(_anchor_tensor(index, image, table, indexes) for index in range(len(table.outline.specs))),
        files=indexes,
        nans=tuple(nans),
        canary=label.canary,
    )
    return Draft(
        manifest=manifest,
        bodies={keys[file]: image.files[file] for file, digest in digests.items() if digest not in links},
        table=table,
    )


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


class DeltaDraft:
    """A delta from ``held``, whose bits are ``baseline``, to ``source``. Tensors that it lacks stay.

    Args:
        label: The version.
        source: The state after.
        held: The state before.
        baseline: Its bits.
        effort: How it is encoded.
        put: Takes objects as soon as they are made.
        progress: Told the stage ``encode`` in bytes that were read.
    """

    def __init__(
        self,
        label: Label,
        source: TensorSource,
        held: StateTable,
        baseline: Mapping[str, Bits],
        *,
        effort: Effort,
        put: PutObject,
        progress: Progress,
    ) -> None:
        self._label: Final = label
        self._held: Final = held
        self._quantizers: Final = _quantizers(source)
        self._bodies: Final[dict[str, bytes]] = {}
        self._put: Final = put
        self._encoder: Final = DeltaEncoder(
            label.run, source, held, baseline, effort=effort, put=self._take, progress=progress
        )

    def read(self) -> Self:
        """Read the source, which may be written once this returns: see `DeltaEncoder.read`."""
        self._encoder.read()
        return self

    def finish(self) -> Draft:
        """Encode what is left: see `DeltaEncoder.finish`."""
        encoded, label = self._encoder.finish(), self._label
        warn_of_nans(encoded.nans)
        manifest = Manifest(
            format=FORMAT,
            run=label.run,
            version=label.version,
            kind="delta",
            parent=Parent(version=Version(label.version - 1), state=self._held.digest),
            state=encoded.table.digest,
            step=label.step,
            created_at=label.created_at,
            objects=encoded.objects,
            bodies=encoded.bodies,
            tiles=encoded.tiles,
            quantizers=self._quantizers,
            nans=encoded.nans,
            canary=label.canary,
        )
        return Draft(manifest=manifest, bodies=self._bodies, table=encoded.table)

    def _take(self, ref: ObjectRef, body: bytes) -> None:
        self._bodies[ref.key] = body
        self._put(ref, body)


def warn_of_nans(names: Sequence[str]) -> None:
    """Tell the log which tensors hold NaN: they are published all the same."""
    if names:
        _LOG.warning("NaN in %s: published as it is", ", ".join(names))


def _quantizers(source: TensorSource) -> tuple[str, ...]:
    if not isinstance(source, Quantizes):
        return ()
    return tuple(sorted({quantizer.name for quantizer in source.quantizers.values()}))
