"""A lineage as it stands in the bucket: its head, and its manifests by number."""

import logging

import msgspec

from slackwater.bucket.base import Get
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RunId, Version

_LOG = logging.getLogger(__name__)
_MAX_HINT_BYTES = 4096


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


def find_head(bucket: Get, run: RunId) -> Version | None:
    """The newest committed version, found by number from the head hint upwards; None in an empty lineage."""
    hinted = _read_hint(bucket, run)
    start = hinted if _is_committed(bucket, run, hinted) else Version(0)
    if start == 0 and not _is_committed(bucket, run, start):
        return None
    while _is_committed(bucket, run, Version(start + 1)):
        start = Version(start + 1)
    return start


def _read_hint(bucket: Get, run: RunId) -> Version:
    try:
        body = bucket.get(head_key(run), max_bytes=_MAX_HINT_BYTES)
        return Version(max(0, msgspec.json.decode(body, type=HeadHint).version))
    except NotFoundError:
        return Version(0)
    except (CorruptError, msgspec.MsgspecError, UnicodeError) as error:
        _LOG.warning("%s can't be read, looking from version 0 on: %s", head_key(run), error)
        return Version(0)


def _is_committed(bucket: Get, run: RunId, version: Version) -> bool:
    try:
        bucket.get_range(manifest_key(run, version), 0, 1)
    except NotFoundError:
        return False
    return True
