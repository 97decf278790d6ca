"""The commit: creating the manifest, which alone makes a version visible."""

import logging
from typing import Final, Protocol

import msgspec

from slackwater.bucket.base import Get, Put, PutIfAbsent
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import head_key, manifest_key, signature_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import LostRaceError, SlackwaterError
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import HeadHint, read_manifest

_LOG: Final = logging.getLogger(__name__)


class CommitBucket(Get, Put, PutIfAbsent, Protocol):
    """What a bucket must do to take a commit."""


class Signs(Protocol):
    """Something that signs manifests: `slackwater.checkpoint.signature.Signer` is one."""

    def sign(self, manifest: bytes) -> bytes:
        """The bytes of the signature object for a manifest's bytes."""
        ...


def encode_checked(manifest: Manifest) -> bytes:
    """A manifest's bytes, read as readers will: one that they refuse is never committed.

    Raises:
        CorruptError: They would refuse it.
        InvalidInputError: It is larger than they hold.
    """
    body = encode_manifest(manifest)
    decode_manifest(body)
    return body


def commit(bucket: CommitBucket, manifest: Manifest, body: bytes, signer: Signs | None = None) -> None:
    """Create a manifest, once all its objects are there, its signature among them.

    Args:
        bucket: Where to.
        manifest: The version.
        body: Its bytes.
        signer: Signs it; None leaves it unsigned.

    Raises:
        LostRaceError: Another publisher committed this version.
        UnavailableError: The bucket doesn't answer: the chain tells whether it happened.
    """
    key = manifest_key(manifest.run, manifest.version)
    if signer is not None:
        bucket.put(signature_key(manifest.run, object_digest(body)), signer.sign(body))
    if bucket.put_if_absent(key, body):
        return
    # An earlier attempt of the same call may have made it, and its answer was lost.
    if bucket.get(key, max_bytes=MAX_MANIFEST_BYTES) == body:
        return
    winner = read_manifest(bucket, manifest.run, manifest.version)
    raise LostRaceError(
        f"another publisher committed version {manifest.version} of {manifest.run}: "
        f"state {winner.state[:12]}, step {winner.step}",
        hint="one trainer publishes a run: stop the other one, or open the publisher again",
    )


def write_hint(bucket: Put, run: RunId, version: Version) -> None:
    """Tell readers where to begin looking, best effort."""
    try:
        bucket.put(head_key(run), msgspec.json.encode(HeadHint(version=version)))
    except SlackwaterError as error:
        _LOG.warning("the head hint of %s wasn't written; readers find version %d: %s", run, version, error)
