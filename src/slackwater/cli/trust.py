"""``--trust`` and ``--sign-with``: whose versions a command takes, and what it signs its own with."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slackwater.bucket.base import Bucket
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import manifest_key, signature_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES
from slackwater.checkpoint.signature import Signer
from slackwater.errors import InvalidInputError, NotFoundError, SlackwaterError
from slackwater.ids import RunId, Version, snapshot_name
from slackwater.publish.key_files import read_signer, read_trusted
from slackwater.publish.lineage import find_head
from slackwater.publish.signed import SignedBucket

_LOG: Final = logging.getLogger(__name__)


def open_trusted(url: str, trust: Sequence[Path], *, create: bool = False) -> Bucket:
    """Open a bucket, and with keys read it by `SignedBucket`.

    Args:
        url: As `open_bucket` takes it.
        trust: Files of public keys; none takes everything.
        create: Make a missing directory, once the keys can be read.

    Raises:
        InvalidInputError: The URL is wrong, or a file isn't there or holds no such key.
        AuthError: A file may not be read, or the directory not be made.
    """
    trusted = read_trusted(trust) if trust else None
    bucket = open_bucket(url, create=create)
    return bucket if trusted is None else SignedBucket(bucket, trusted)


def trusting(bucket: Bucket, trust: Sequence[Path]) -> Bucket:
    """Read an open bucket by `SignedBucket`, where there are keys: it passes on no deletions.

    Args:
        bucket: The bucket.
        trust: Files of public keys; none takes everything.

    Raises:
        InvalidInputError: A file isn't there or holds no such key.
        AuthError: It may not be read.
    """
    return SignedBucket(bucket, read_trusted(trust)) if trust else bucket


def signer_of(sign_with: Path | None, trust: Sequence[Path]) -> Signer | None:
    """What signs that which a command commits. With keys that are trusted it must be one of them.

    Else whoever commits would refuse their own version afterwards.

    Args:
        sign_with: File of a private key; None signs nothing.
        trust: Files of public keys; none takes everything.

    Raises:
        InvalidInputError: A file isn't there or holds no such key; or there are trusted keys, and none of them signs.
        AuthError: A file may not be read.
    """
    signer = None if sign_with is None else read_signer(sign_with)
    if not trust:
        return signer
    trusted = read_trusted(trust)
    if signer is None:
        raise InvalidInputError(
            "with --trust alone this command would commit what it refuses afterwards: nothing would sign it",
            hint="add --sign-with KEY, the private key of one that is trusted",
        )
    if signer.public_key not in trusted:
        raise InvalidInputError(
            f"{sign_with} is key {signer.public_key[:16]}, which --trust doesn't name: this command would commit what "
            "it refuses afterwards",
            hint="name its public key with --trust too; for a new key, trust both",
        )
    return signer


def warn_of_unsigned(bucket: Bucket, run: RunId) -> None:
    """Log a warning where a run's newest version is signed, before one is committed that isn't.

    It costs a listing where the run has no signatures. Where the bucket can't be asked, committing tells.
    """
    try:
        head = _signed_head(bucket, run)
    except SlackwaterError:
        return
    if head is not None:
        _LOG.warning(
            "%s is signed, and what follows won't be: readers with --trust will refuse it (add --sign-with KEY)",
            snapshot_name(run, head),
        )


def _signed_head(bucket: Bucket, run: RunId) -> Version | None:
    """The newest version, where its signature is there."""
    if next(iter(bucket.list(f"{run}/signatures")), None) is None:
        return None
    head = find_head(bucket, run)
    if head is None:
        return None
    body = bucket.get(manifest_key(run, head), max_bytes=MAX_MANIFEST_BYTES)
    try:
        bucket.get_range(signature_key(run, object_digest(body)), 0, 1)
    except NotFoundError:
        return None
    return head
