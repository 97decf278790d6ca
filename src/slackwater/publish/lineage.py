"""A lineage as it stands in the bucket: its head, and its manifests by number."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from slackwater.bucket.base import Get, List
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import ConflictError, CorruptError, LostRaceError, NotFoundError, SlackwaterError
from slackwater.ids import RunId, StateDigest, Version

_LOG = logging.getLogger(__name__)
_MAX_HINT_BYTES = 4096
ONE_TRAINER: Final = "one trainer publishes a run: stop the other one, or open the publisher again"
"""What to do about a race that was lost."""

_MENDED: Final = "start a new run, or put the lost versions back and open the publisher again"
_MANIFEST: Final = re.compile(r"([0-9]{8})\.json")


class HeadBucket(Get, List, Protocol):
    """What a bucket must do for its head to be found."""


class HeadHint(msgspec.Struct, frozen=True):
    """What ``head.json`` says: a place to start looking, never a fact."""

    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Tip:
    """The version that a publisher goes on from, as it committed or read it."""

    version: Version
    state: StateDigest | None
    """None: its manifest can't be read, and all that is known is that one is there."""


def read_manifest(bucket: Get, run: RunId, version: Version) -> Manifest:
    """Read a committed version.

    Raises:
        NotFoundError: It isn't committed.
        CorruptError: It breaks the format, or is the manifest of another run or version.
    """
    key = manifest_key(run, version)
    manifest = decode_manifest(bucket.get(key, max_bytes=MAX_MANIFEST_BYTES))
    if (manifest.run, manifest.version) != (run, version):
        raise CorruptError(f"{key} is the manifest of version {manifest.version} of {manifest.run}")
    return manifest


def find_head(
    bucket: HeadBucket, run: RunId, *, listed: Iterable[Version] | None = None, at_least: Version | None = None
) -> Version | None:
    """The newest committed version; None in an empty lineage.

    Found by number from the head hint upwards. A listing may raise it, for a number that was used is never used again:
    a hint that is old can lie below a gap, and retention may have taken the first numbers. Only manifests that are
    there count. A listing that lags or is refused changes nothing where the hint, or what is known, leads to one.

    Args:
        bucket: Where the run lies.
        run: The run.
        listed: Numbers of a listing at hand; None makes one, of manifests alone.
        at_least: A version that is known to be there.

    Raises:
        AuthError: There is no hint, and the credentials may not list: nothing tells an empty run from a collected one.
    """
    hint = read_hint(bucket, run)
    start = at_least
    if hint is not None and (start is None or hint > start) and is_there(bucket, run, hint):
        start = hint
    numbers = _list_numbers(bucket, run, may_fail=start is not None) if listed is None else listed
    above = sorted((number for number in numbers if start is None or number > start), reverse=True)
    head = next((number for number in above if is_there(bucket, run, number)), start)
    while is_there(bucket, run, following := Version(0 if head is None else head + 1)):
        head = following
    return head


def check_tip(bucket: HeadBucket, run: RunId, tip: Tip) -> None:
    """Check that a version is still what its publisher knows. Reads its whole manifest.

    Raises:
        LostRaceError: It was collected, for others have gone on.
        ConflictError: It is gone, or another one: the history isn't what it was.
        CorruptError: Its manifest can't be read any more.
    """
    if tip.state is None and is_there(bucket, run, tip.version):
        return
    try:
        found = read_manifest(bucket, run, tip.version).state
    except NotFoundError as error:
        raise _gone(bucket, run, tip) from error
    if tip.state is not None and found != tip.state:
        raise ConflictError(
            f"version {tip.version} of {run} has state {found[:12]}, and this publisher went on from {tip.state[:12]}: "
            "the bucket was set back, and written anew",
            hint=_MENDED,
        )


def _gone(bucket: HeadBucket, run: RunId, tip: Tip) -> ConflictError:
    head = find_head(bucket, run)
    if head is not None and head > tip.version:
        return LostRaceError(
            f"version {tip.version} of {run}, which this publisher went on from, was collected: others have gone on to "
            f"version {head}",
            hint=ONE_TRAINER,
        )
    newest = "no version is there" if head is None else f"version {head} is the newest"
    return ConflictError(
        f"version {tip.version} of {run}, which this publisher went on from, is gone, and {newest}: the bucket was set "
        "back",
        hint=_MENDED,
    )


def is_there(bucket: Get, run: RunId, number: int) -> bool:
    """Whether a manifest is there, readable or not."""
    try:
        bucket.get_range(manifest_key(run, Version(number)), 0, 1)
    except NotFoundError:
        return False
    except CorruptError:  # empty: reading it will say so
        return True
    return True


def listed_version(run: RunId, key: str) -> Version | None:
    """The version whose manifest lies under a key; None for any other key."""
    name = _MANIFEST.fullmatch(key.rpartition("/")[2])
    if name is None or key != manifest_key(run, version := Version(int(name[1]))):
        return None
    return version


def list_versions(bucket: List, run: RunId) -> list[Version]:
    """The numbers that a listing shows, rising. It may lag."""
    found = (listed_version(run, item.key) for item in bucket.list(f"{run}/manifests"))
    return sorted(version for version in found if version is not None)


def _list_numbers(bucket: List, run: RunId, *, may_fail: bool) -> list[Version]:
    try:
        return list_versions(bucket, run)
    except SlackwaterError as error:
        if not may_fail:
            raise
        _LOG.warning("the manifests of %s can't be listed, so the head is looked for by number alone: %s", run, error)
        return []


def read_hint(bucket: Get, run: RunId) -> Version | None:
    """The version that the head hint names; None where there is none, or none that can be read."""
    try:
        body = bucket.get(head_key(run), max_bytes=_MAX_HINT_BYTES)
        return Version(max(0, msgspec.json.decode(body, type=HeadHint).version))
    except NotFoundError:
        return None
    except (CorruptError, msgspec.MsgspecError, UnicodeError) as error:
        _LOG.warning("%s can't be read, looking for versions without it: %s", head_key(run), error)
        return None
