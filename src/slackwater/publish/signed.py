"""Signatures beside manifests: put by whoever commits, and asked for by readers that were given keys.

A reader's check is a bucket of its own: whatever reads manifests and folds through a `SignedBucket` takes signed ones
alone, be it a fetcher, a publisher or a command. No reader knows of it.
"""

import re
from collections.abc import Iterator
from typing import Final, Protocol

from slackwater.bucket.base import Bucket, ObjectInfo
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import signature_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RunId

MAX_SIGNATURE_BYTES: Final = 4096
"""Readers hold no larger signature object."""

_WAY_OUT: Final = (
    "a committed version can't be signed any more: sign from now on, beginning with an anchor: `slackwater publish "
    "--sign-with KEY --anchor`, and for that one publish leave --trust out"
)
_SIGNED: Final = re.compile(r"([^/]+)/(?:manifests|folds)/.+", re.DOTALL)


class ChecksSignatures(Protocol):
    """Whose versions are taken: `slackwater.checkpoint.signature.TrustedKeys` is one."""

    def check(self, manifest: bytes, signature: bytes) -> object:
        """Raise CorruptError unless the signature object is that of the manifest's bytes, by a key that is trusted."""
        ...


class SignedBucket:
    """A bucket whose manifests and folds can be read where a trusted key signed them. All else passes. Any thread.

    One byte of them is given out unchecked, for whoever asks for one asks whether they are there. Objects need no check
    of their own, as manifests name them by SHA-256; nor do hints and listings, on which nothing rests.

    Args:
        bucket: The bucket.
        trusted: Whose signatures count.
    """

    def __init__(self, bucket: Bucket, trusted: ChecksSignatures) -> None:
        self._bucket: Final = bucket
        self._trusted: Final = trusted

    @property
    def url(self) -> str:
        """See `slackwater.bucket.base.Bucket.url`."""
        return self._bucket.url

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`.

        Raises:
            CorruptError: It is a manifest or a fold, and no trusted key signed these bytes.
        """
        body = self._bucket.get(key, max_bytes=max_bytes)
        signed = _SIGNED.fullmatch(key)
        if signed is not None:
            self._check(RunId(signed[1]), key, body)
        return body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`. More than a byte of what must be signed is cut from all of it.

        Raises:
            CorruptError: See `get`.
        """
        if length <= 1 or _SIGNED.fullmatch(key) is None:
            return self._bucket.get_range(key, start, length)
        body = self.get(key, max_bytes=MAX_MANIFEST_BYTES)
        if len(body) < start + length:
            raise CorruptError(f"{self.url}/{key} has {len(body)} bytes, too few for [{start}, {start + length})")
        return body[start : start + length]

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        self._bucket.put(key, body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        return self._bucket.put_if_absent(key, body)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._bucket.list(prefix)

    def _check(self, run: RunId, key: str, body: bytes) -> None:
        try:
            self._trusted.check(body, self._signature(run, body))
        except CorruptError as error:
            raise CorruptError(f"{key}: {error.message}", hint=error.hint) from error

    def _signature(self, run: RunId, body: bytes) -> bytes:
        try:
            return self._bucket.get(signature_key(run, object_digest(body)), max_bytes=MAX_SIGNATURE_BYTES)
        except NotFoundError as error:
            raise CorruptError("it isn't signed", hint=_WAY_OUT) from error
