"""A version's weights, rebuilt from the bucket and proved: what a publisher diffs against after a start."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.manifest import AnchorTensor, Manifest, ObjectRef, is_side_file
from slackwater.checkpoint.pieces import Piece, Pieces
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError, NotFoundError, SlackwaterError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version
from slackwater.publish.in_memory import apply, first_wrong
from slackwater.publish.lineage import Tip, list_versions, read_manifest
from slackwater.publish.objects import fetch_object
from slackwater.publish.path import Reads, along, read_path
from slackwater.publish.plan import Since

_LOG: Final = logging.getLogger(__name__)
_NEAR: Final = 1000
"""Numbers that are asked for without a listing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A version in memory."""

    version: Version
    anchor: Version
    """The anchor that its chain begins with."""
    files: Mapping[str, ObjectRef]
    """The anchor's."""
    delta_bytes: int = 0
    """Of the objects that lead from the anchor here."""
    table: StateTable
    bits: Mapping[str, Bits]
    """Every tensor, or those of a rank, flat and writable; of some a piece alone."""
    pieces: Pieces = field(default_factory=dict[str, Piece])
    """What ``bits`` has of them."""
    broken: Tip | None = None
    """What is left of it where nothing leads to it any more: ``table`` is an older anchor's then and tells tensors
    alone, so that an anchor can follow, and no delta."""

    @property
    def since(self) -> Since:
        """What was committed since the anchor."""
        full = self.table.outline.num_bytes
        return Since(versions=self.version - self.anchor, share=self.delta_bytes / full if full else 0.0)

    @property
    def side_files(self) -> Mapping[str, ObjectDigest]:
        """Digests of the anchor's config, tokenizer and template."""
        return {name: ref.sha256 for name, ref in self.files.items() if is_side_file(name)}

    @property
    def tip(self) -> Tip:
        """What the next version goes on from."""
        return self.broken or Tip(version=self.version, state=self.table.digest)


def tip_before(held: Restored | None, *, is_forced: bool) -> Tip | None:
    """What the next version goes on from; None where it is the first.

    Args:
        held: The version before.
        is_forced: Whether it is an anchor that was asked for, which goes on from any that is there, damaged or not.
    """
    if held is None:
        return None
    return replace(held.tip, state=None) if is_forced else held.tip


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
            apply(manifest, restored.table.outline, partial(fetch_object, bucket), bits)
        return replace(restored, bits=bits)

    return along(bucket, run, version, load)


def outline(bucket: Get, run: RunId, version: Version) -> Restored:
    """A version without its bits, from the manifests alone: enough to publish an anchor on, whatever became of objects.

    Raises:
        NotFoundError: The version isn't committed, or no anchor leads to it.
        CorruptError: A manifest contradicts itself or its parent.
    """
    return _restored(read_path(bucket, run, version), {})


def outline_broken(bucket: Reads, run: RunId, head: Version) -> Restored:
    """What an anchor needs to know that follows a version which nothing leads to: tensors and side files.

    All anchors of a run have the same, so the newest one at or below it will do whose manifest can be read. It is
    looked for among the numbers just below and, where a listing shows more, among those.

    Raises:
        NotFoundError: No anchor's manifest can be read.
    """
    near = map(Version, range(max(0, head - _NEAR), head + 1))
    wanted = {*near, *(version for version in _listed(bucket, run) if version <= head)}
    for version in sorted(wanted, reverse=True):
        with suppress(NotFoundError, CorruptError):
            found = read_manifest(bucket, run, version)
            if found.kind == "anchor":
                held = _restored([found], {})
                return replace(held, version=head, broken=Tip(version=head, state=_state(bucket, run, head)))
    raise NotFoundError(
        f"no anchor of {run} can be read at or below version {head}, so its tensors aren't known",
        hint="start a new run",
    )


def _listed(bucket: Reads, run: RunId) -> list[Version]:
    try:
        return list_versions(bucket, run)
    except SlackwaterError as error:
        _LOG.info("the manifests of %s can't be listed: %s", run, error)
        return []


def _state(bucket: Get, run: RunId, version: Version) -> StateDigest | None:
    try:
        return read_manifest(bucket, run, version).state
    except (NotFoundError, CorruptError):
        return None


def _restored(chain: Sequence[Manifest], bits: Mapping[str, Bits]) -> Restored:
    table = StateTable.of_anchor(chain[0])
    for manifest in chain[1:]:
        table = table.after(manifest)
    return Restored(
        version=chain[-1].version,
        anchor=chain[0].version,
        files=chain[0].folder,
        delta_bytes=sum(manifest.num_bytes for manifest in chain[1:]),
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
    wrong = first_wrong(table, bits)
    if wrong is not None:
        raise CorruptError(f"{wrong} isn't that of anchor {manifest.version}")
    return bits
