"""``--trust`` and ``--sign-with``: whose versions a command takes, and what it signs its own with."""

from collections.abc import Sequence
from pathlib import Path

from slackwater.bucket.base import Bucket
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.signature import Signer
from slackwater.publish.key_files import read_signer, read_trusted
from slackwater.publish.signed import SignedBucket


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


def signer_of(sign_with: Path | None) -> Signer | None:
    """What signs with the private key in a file; None where there is none.

    Raises:
        InvalidInputError: The file isn't there or holds no such key.
        AuthError: It may not be read.
    """
    return None if sign_with is None else read_signer(sign_with)
