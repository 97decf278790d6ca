"""From a URL to a bucket."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slackwater.bucket.base import Bucket, List
from slackwater.bucket.key import check_prefix
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.patience import PATIENT, Patience
from slackwater.errors import InvalidInputError

_CLOUDS: Final = ("s3", "gs", "az")
_BUCKET_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")
_SLIPPED: Final = re.compile(r"(s3|gs|az|file):(?!//)")
_LONGEST_URL: Final = 1024


def open_bucket(url: str, *, create: bool = False, patience: Patience = PATIENT) -> Bucket:
    """Open a bucket. Nothing is sent yet: `probe` asks whether it is there.

    Args:
        url: A path, ``file:///path``, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
            Credentials and endpoints come from the environment, never from the URL.
        create: Make a missing directory. Object stores' buckets are never made.
        patience: Time-outs and retries of an object store.

    Raises:
        InvalidInputError: The URL is none of these.
        AuthError: The directory may not be made.
    """
    if not url or len(url) > _LONGEST_URL or not url.isprintable():
        raise InvalidInputError(f"{url[:80]!r} is no bucket URL", hint="write a path or s3://bucket/prefix")
    slipped = _SLIPPED.match(url)
    if slipped is not None:
        raise InvalidInputError(f"{url[:80]!r} is no bucket URL", hint=f"write {slipped[1]}:// with two slashes")
    if "://" not in url:
        return _local(Path(url).expanduser(), create=create)
    if url.startswith("file://"):
        return _local(_file_path(url), create=create)
    return _cloud(url, patience)


def probe(bucket: List) -> None:
    """Ask the bucket once, so that a wrong name or key is told at the start.

    Raises:
        NotFoundError: No such bucket.
        AuthError: The store refused the credentials, or they may not list.
        UnavailableError: The store doesn't answer.
    """
    next(iter(bucket.list("")), None)


def _local(path: Path, *, create: bool) -> Bucket:
    if path.absolute() == Path(path.absolute().anchor):
        raise InvalidInputError("the root directory can't be a bucket", hint="name a directory of its own")
    return LocalBucket(path, create=create)


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or parts.query or parts.fragment or not path.isprintable():
        raise InvalidInputError(f"{url[:80]!r} names no local directory", hint="write file:///absolute/path")
    return Path(path)


def _cloud(url: str, patience: Patience) -> Bucket:
    parts = urlsplit(url)
    if parts.scheme not in _CLOUDS:
        raise InvalidInputError(
            f"no bucket is known behind {parts.scheme[:20]!r}",
            hint="use a path, file://, s3://, gs:// or az://",
        )
    if not _BUCKET_NAME.fullmatch(parts.netloc) or parts.query or parts.fragment:
        # The URL itself is not repeated: it may hold a secret where the name should be.
        raise InvalidInputError(
            f"the {parts.scheme}:// URL is no bucket and prefix",
            hint=f"write {parts.scheme}://bucket/prefix; credentials belong in the environment",
        )
    check_prefix(parts.path.removeprefix("/"))
    from slackwater.bucket.cloud import CloudBucket  # noqa: PLC0415 (obstore loads only where a cloud is used)

    return CloudBucket(url, patience=patience)
