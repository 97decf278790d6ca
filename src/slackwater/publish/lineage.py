"""A lineage as it stands in the bucket: its head, and its manifests by number."""

import logging
import re
from typing import Final, Protocol

import msgspec

from slackwater.bucket.base import Get, List
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RunId, Version

_LOG = logging.getLogger(__name__)
_MAX_HINT_BYTES = 4096
_MANIFEST: Final = re.compile(r"([0-9]{8})\.json")


class HeadBucket(Get, List, Protocol):
    """What a bucket must do for its head to be found."""


class HeadHint(msgspec.Struct, frozen=True):
    """What ``head.json`` says: a place to start looking, never a fact."""

    version: Version


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


def find_head(bucket: HeadBucket, run: RunId) -> Version | None:
    """The newest committed version; None in an empty lineage.

    Found by number from the head hint upwards. Where the hint is lost, a listing says where to start: retention may
    have taken the first numbers, and a number that was used is never used again.
    """
    head = _read_hint(bucket, run)
    if head is None or not _is_committed(bucket, run, head):
        head = _newest_listed(bucket, run)
    while _is_committed(bucket, run, following := Version(0 if head is None else head + 1)):
        head = following
    return head


def _read_hint(bucket: Get, run: RunId) -> Version | None:
    try:
        body = bucket.get(head_key(run), max_bytes=_MAX_HINT_BYTES)
        return Version(max(0, msgspec.json.decode(body, type=HeadHint).version))
    except NotFoundError:
        return None
    except (CorruptError, msgspec.MsgspecError, UnicodeError) as error:
        _LOG.warning("%s can't be read, looking for versions without it: %s", head_key(run), error)
        return None


def _newest_listed(bucket: HeadBucket, run: RunId) -> Version | None:
    names = (item.key.rpartition("/")[2] for item in bucket.list(f"{run}/manifests"))
    numbers = [Version(int(found[1])) for found in map(_MANIFEST.fullmatch, names) if found]
    return next((version for version in sorted(numbers, reverse=True) if _is_committed(bucket, run, version)), None)


def _is_committed(bucket: Get, run: RunId, version: Version) -> bool:
    try:
        bucket.get_range(manifest_key(run, version), 0, 1)
    except NotFoundError:
        return False
    return True
