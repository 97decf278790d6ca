"""Garbage collection: survey a run, plan by `slackwater.publish.retention`, and delete in the plan's order."""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import Final, Protocol

import msgspec

from slackwater.bucket.base import Abort, Delete, Get, List, ObjectInfo, Put, Unfinished
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import fold_key, head_key, manifest_key, parse_fold_key, signature_key
from slackwater.checkpoint.manifest import Manifest
from slackwater.errors import AuthError, ConflictError, CorruptError, NotFoundError, UnsupportedError
from slackwater.ids import ObjectDigest, RunId, Version
from slackwater.publish.delta import Progress
from slackwater.publish.history import read_numbers
from slackwater.publish.lineage import HeadHint, is_there, read_manifest
from slackwater.publish.path import Reads, read_fold
from slackwater.publish.retention import Contents, Doomed, Fold, GcPlan, listed_manifests

_BATCH: Final = 256
"""Objects deleted between two looks for versions that name one of them."""


class GcBucket(Get, Put, List, Delete, Protocol):
    """What a bucket must do to be collected. Unfinished writes are aborted where it has `Abort` too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a collection did."""

    num_deleted: int
    num_bytes: int
    spared: tuple[str, ...]
    """Objects of the plan that a version committed meanwhile names, or its signature."""
    num_aborted: int
    """Unfinished writes; they may have ended since the plan."""


class _Digesting:
    """A bucket to read from that notes the SHA-256 of whatever is read whole."""

    def __init__(self, bucket: Get) -> None:
        self.digests: Final[dict[str, ObjectDigest]] = {}
        self._bucket: Final = bucket

    def get(self, key: str, *, max_bytes: int) -> bytes:
        body = self._bucket.get(key, max_bytes=max_bytes)
        self.digests[key] = object_digest(body)
        return body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._bucket.get_range(key, start, length)


def survey(
    bucket: Reads, run: RunId, *, now_s: float | None, progress: Progress, manifests_from: Get | None = None
) -> Contents:
    """Read what a collection is planned from: the run's listing, all its manifests, all its folds.

    Its unfinished writes too; that they can't be listed here, or may not, is told and is no reason not to collect.

    Args:
        bucket: Where the run lies.
        run: The run.
        now_s: Seconds since the epoch, for the ages of objects; None takes the time at which the head hint was written,
            by the store's clock: see `point_at_head`. Where that isn't told, nothing is old.
        progress: Told the stage ``manifests``.
        manifests_from: The same bucket, or a `slackwater.publish.signed.SignedBucket` of it, so that nothing is planned
            by what no trusted key signed. None takes everything.

    Raises:
        NotFoundError: The run has no versions.
        ConflictError: The listing lacks a manifest that is there.
        CorruptError: A manifest or a fold can't be read, or isn't signed, so that what it needs isn't known.
    """
    objects = tuple(bucket.list(run))
    numbers = list(read_numbers(bucket, run, objects).written_s)
    listed = listed_manifests(run, (item.key for item in objects))
    for number in sorted(version for version in listed if version and Version(version - 1) not in listed):
        if is_there(bucket, run, number - 1):
            raise ConflictError(
                f"the listing of {run} lacks version {number - 1}, which is there",
                hint="the store's listing lags: try again later",
            )
    found = [fold for fold in (parse_fold_key(run, item.key) for item in objects) if fold is not None]
    total = len(numbers) + len(found)
    source = _Digesting(bucket if manifests_from is None else manifests_from)
    manifests: dict[Version, Manifest] = {}
    for version in numbers:
        manifests[version] = _read(manifest_key(run, version), partial(read_manifest, source, run, version))
        progress("manifests", len(manifests), total)
    folds: dict[Fold, Manifest] = {}
    for fold in found:
        folds[fold] = _read(fold_key(run, *fold), partial(read_fold, source, run, *fold))
        progress("manifests", len(manifests) + len(folds), total)
    hinted_s = next((item.modified_s for item in objects if item.key == head_key(run)), None)
    told_s = (hinted_s or 0.0) if now_s is None else now_s
    begun, blind = _begun(bucket, run)
    return Contents(
        run=run,
        objects=(*objects, *_late(bucket, manifests.values(), {item.key for item in objects})),
        manifests=manifests,
        folds=folds,
        digests=source.digests,
        now_s=told_s,
        unfinished=begun,
        blind=blind,
    )


def _begun(bucket: List, run: RunId) -> tuple[tuple[Unfinished, ...], str | None]:
    if not isinstance(bucket, Abort):
        return (), f"unfinished uploads to {run} can't be listed in this bucket"
    try:
        return tuple(bucket.unfinished(run)), None
    except (UnsupportedError, AuthError) as error:
        return (), str(error)


def _late(bucket: Get, manifests: Iterable[Manifest], listed: Collection[str]) -> Iterator[ObjectInfo]:
    """Objects that a listing passed before they were written: their versions were committed while it was made."""
    missing = {ref.key: ref for manifest in manifests for ref in manifest.objects if ref.size and ref.key not in listed}
    for ref in missing.values():
        with suppress(NotFoundError, CorruptError):
            bucket.get_range(ref.key, ref.size - 1, 1)
            yield ObjectInfo(key=ref.key, size=ref.size)


def _read(key: str, read: Callable[[], Manifest]) -> Manifest:
    """A manifest without its columns, which would fill the memory where versions are many and large."""
    try:
        return msgspec.structs.replace(read(), tensors=(), bodies=None, tiles=None)
    except CorruptError as error:
        raise CorruptError(
            f"{key} can't be read, so what it needs isn't known: {error.message}",
            hint="find out what wrote it; a fold may be deleted, for nothing needs it",
        ) from error


def point_at_head(bucket: GcBucket, run: RunId) -> None:
    """Write the head hint anew: nobody starts to look for the head below a gap, and the next survey has a date.

    Raises:
        NotFoundError: The run has no versions.
    """
    bucket.put(head_key(run), msgspec.json.encode(HeadHint(version=read_numbers(bucket, run).head)))


def collect(bucket: GcBucket, run: RunId, plan: GcPlan, *, threads: int, progress: Progress) -> Collected:
    """Delete what a plan says, in its order, then abort. Ended anywhere, it leaves no manifest without its objects.

    Objects that versions name which have been committed since the plan are spared: a publisher may have found one there
    and not uploaded it again. So are their signatures.

    Args:
        bucket: Where the run lies.
        run: The run.
        plan: From a survey made after `point_at_head`.
        threads: Objects deleted at once.
        progress: Told the stage ``delete`` in objects.

    Raises:
        AuthError: The credentials may not delete, or, when all else is done, not abort.
        CorruptError: At the end: one was committed in the very moment, and an object of it is gone.
    """
    manifests = [item for item in plan.delete if item.why in {"fold", "manifest"}]
    objects = [item for item in plan.delete if item.why not in {"fold", "manifest"}]
    spared: list[str] = []
    done = num_bytes = 0
    for item in manifests:
        bucket.delete(item.key)
        done, num_bytes = done + 1, num_bytes + item.size
        progress("delete", done, len(plan.delete))
    with ThreadPoolExecutor(threads, thread_name_prefix="delete") as pool:
        for start in range(0, len(objects), _BATCH):
            batch = objects[start : start + _BATCH]
            named = _named_since(bucket, run, max(plan.versions))
            going = [item for item in batch if item.key not in named]
            spared += [item.key for item in batch if item.key in named]
            for item in pool.map(partial(_delete, bucket), going):
                done, num_bytes = done + 1, num_bytes + item.size
                progress("delete", done, len(plan.delete))
    lost = (_named_since(bucket, run, max(plan.versions)) & {item.key for item in objects}) - {*spared}
    if lost:
        raise CorruptError(
            f"{min(lost)} was deleted in the moment in which a version of {run} was committed that names it",
            hint="publish an anchor now, and take a longer minimum age",
        )
    num_aborted = _abort(bucket, plan.abort)
    return Collected(num_deleted=done, num_bytes=num_bytes, spared=tuple(spared), num_aborted=num_aborted)


def _abort(bucket: GcBucket, uploads: tuple[Unfinished, ...]) -> int:
    if not isinstance(bucket, Abort):
        return 0
    for upload in uploads:
        bucket.abort(upload)
    return len(uploads)


def _delete(bucket: Delete, item: Doomed) -> Doomed:
    bucket.delete(item.key)
    return item


def _named_since(bucket: Get, run: RunId, version: Version) -> frozenset[str]:
    source = _Digesting(bucket)
    newer = takewhile(lambda number: is_there(bucket, run, number), count(version + 1))
    named = {ref.key for number in newer for ref in read_manifest(source, run, Version(number)).objects}
    return frozenset(named.union(signature_key(run, digest) for digest in source.digests.values()))
