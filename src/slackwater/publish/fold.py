"""Folds: a delta over several versions, beside the run's own, so that whoever is far behind reads less."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slackwater.bucket.base import Get, List, Put, PutIfAbsent
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.keys import fold_key
from slackwater.checkpoint.manifest import FORMAT, Manifest, Parent, encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version
from slackwater.publish.commit import Signs, put_signature
from slackwater.publish.delta import Encoded, Progress, bits_of, encode_delta
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import read_fold
from slackwater.publish.rebuild import rebuild
from slackwater.weights.source import FolderSource


class FoldBucket(Get, Put, PutIfAbsent, List, Protocol):
    """What a bucket must do to take folds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """A fold in the bucket."""

    manifest: Manifest
    is_new: bool
    """Whether this call made it; False: it was there."""


def fold(
    bucket: FoldBucket,
    run: RunId,
    start: Version,
    end: Version,
    *,
    scratch: Path,
    level: Level,
    threads: int,
    progress: Progress,
    signer: Signs | None = None,
) -> Folded:
    """Make the fold from one version to another and commit it: its objects first, then its manifest, if absent.

    Both versions are rebuilt on the disk and compared: steps can't be added up without the bits that they are made on.

    Args:
        bucket: Where the run lies.
        run: The run.
        start: The version that it is made on.
        end: The version that it leads to.
        scratch: An empty folder; it takes two models.
        level: How much time to spend for how many bytes.
        threads: Bodies encoded at once.
        progress: Told how far it is; whatever it raises ends the call, and nothing is visible.
        signer: Signs the fold, for readers that trust its key alone. One that is there already isn't signed again.

    Raises:
        InvalidInputError: ``end`` isn't above ``start``.
        NotFoundError: A version isn't committed, or an object is missing.
        CorruptError: Something of the run is damaged, or another fold lies under this one's key.
    """
    if not start < end:
        raise InvalidInputError(f"a fold leads to a later version, not from {start} to {end}")
    last = read_manifest(bucket, run, end)
    try:
        return Folded(manifest=_checked(read_fold(bucket, run, start, end), last), is_new=False)
    except NotFoundError:
        manifest = _build(bucket, last, start, scratch, level, threads, progress)
    body = encode_manifest(manifest)
    decode_manifest(body, fold=True)  # what readers will do
    if signer is not None:
        put_signature(bucket, run, body, signer)
    is_new = bucket.put_if_absent(fold_key(run, start, end), body)
    return Folded(manifest=_checked(read_fold(bucket, run, start, end), last), is_new=is_new)


def _build(
    bucket: FoldBucket, last: Manifest, start: Version, scratch: Path, level: Level, threads: int, progress: Progress
) -> Manifest:
    folders = scratch / "from", scratch / "to"
    for folder in folders:
        folder.mkdir()
    run = last.run
    old = rebuild(bucket, run, start, folders[0], threads=threads, progress=progress)
    new = rebuild(bucket, run, last.version, folders[1], threads=threads, progress=progress, start=old)
    encoded = encode_delta(
        run,
        FolderSource(new.folder),
        old.table,
        bits_of(FolderSource(old.folder)),
        level=level,
        threads=threads,
        put=lambda ref, body: bucket.put(ref.key, body),
        progress=progress,
    )
    return fold_manifest(last, encoded, Parent(version=start, state=old.table.digest))


def fold_manifest(last: Manifest, encoded: Encoded, parent: Parent) -> Manifest:
    """The manifest of what leads from ``parent`` to the state of another manifest.

    Args:
        last: The manifest whose state the fold makes; its step, time and canary are taken over, so that a fold made
            again is equal.
        encoded: What differs.
        parent: The state before.

    Raises:
        CorruptError: ``encoded`` doesn't make that state.
    """
    if encoded.table.digest != last.state:
        raise CorruptError(f"the fold makes state {encoded.table.digest[:12]}, not {last.state[:12]}")
    return Manifest(
        format=FORMAT,
        run=last.run,
        version=last.version,
        kind="delta",
        parent=parent,
        state=last.state,
        step=last.step,
        created_at=last.created_at,
        objects=encoded.objects,
        bodies=encoded.bodies,
        tiles=encoded.tiles,
        quantizers=last.quantizers,
        nans=encoded.nans,
        canary=last.canary,
    )


def _checked(fold: Manifest, last: Manifest) -> Manifest:
    if fold.state != last.state:
        raise CorruptError(
            f"the fold to version {last.version} of {last.run} makes state {fold.state[:12]}, not {last.state[:12]}",
            hint="delete the fold; nothing needs it",
        )
    return fold
