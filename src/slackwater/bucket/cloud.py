"""S3, GCS and Azure as a bucket, through obstore. Credentials and endpoints come from the environment."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore import exceptions

from slackwater.bucket.base import Abort, ObjectInfo, Tag, Unfinished
from slackwater.bucket.cloud_attempts import Attempts, PassingError
from slackwater.bucket.cloud_errors import is_missing_bucket, status
from slackwater.bucket.cloud_store import open_store
from slackwater.bucket.key import check_key, check_prefix, check_range
from slackwater.bucket.patience import PATIENT, Patience
from slackwater.bucket.unfinished import open_uploads
from slackwater.errors import CorruptError, UnavailableError

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion

T = TypeVar("T")

_PART_BYTES: Final = 8 * 1024 * 1024
_ABANDONED_BYTES: Final = 1024
"""Of a part whose upload is aborted: stores hold parts to their least size only when an upload is completed."""
_CONFLICT: Final = 409
_PAGE: Final = 1000


class CloudBucket:
    """A bucket in an object store. Safe for any number of threads.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``, checked by
            `slackwater.bucket.open.open_bucket`.
        patience: Time-outs and retries.

    Raises:
        InvalidInputError: The environment's settings for the store don't fit together.
    """

    def __init__(self, url: str, *, patience: Patience = PATIENT) -> None:
        self._url = url.rstrip("/")
        self._patience = patience
        self._store = open_store(url, patience)
        self._attempts = Attempts(patience)

    @property
    def url(self) -> str:
        """What the user wrote; `open_bucket` refuses URLs with secrets in them."""
        return self._url

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        return self._call(key, lambda: self._whole(key, max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        check_range(start, length)
        if length == 0:
            check_key(key)
            return b""
        return self._call(key, lambda: self._range(key, start, length))

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        flat = memoryview(body).cast("B")
        self._call(key, lambda: self._replace(key, flat))

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        return self._call(key, lambda: self._create(key, body))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._listed(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """See `slackwater.bucket.base.Delete.delete`."""
        self._call(key, lambda: self._delete(key))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See `slackwater.bucket.base.Abort.unfinished`. On S3 alone, and with botocore."""
        return self._uploads.unfinished(check_prefix(prefix))

    def abort(self, upload: Unfinished) -> None:
        """See `slackwater.bucket.base.Abort.abort`."""
        check_key(upload.key)
        self._uploads.abort(upload)

    def tag(self, key: str) -> Tag:
        """See `slackwater.bucket.base.Swap.tag`."""
        meta = self._call(key, lambda: obstore.head(self._store, key))
        return Tag(e_tag=meta["e_tag"], version=meta["version"])

    def swap(self, key: str, body: bytes, expected: Tag) -> bool:
        """See `slackwater.bucket.base.Swap.swap`."""
        return self._call(key, lambda: self._update(key, body, _known(expected)))

    @property
    def part_bytes(self) -> int:
        """See `slackwater.bucket.base.Upload.part_bytes`."""
        return _PART_BYTES

    def abandon(self, key: str) -> None:
        """See `slackwater.bucket.base.Upload.abandon`."""
        self._call(key, lambda: self._abandon(key))

    @cached_property
    def _uploads(self) -> Abort:
        return open_uploads(self._url, self._patience)

    def _whole(self, key: str, max_bytes: int) -> bytes:
        answer = obstore.get(self._store, key)
        size = answer.meta["size"]
        if size > max_bytes:
            raise CorruptError(f"{self._url}/{key} has {size} bytes, at most {max_bytes} are expected")
        return self._exactly(answer.bytes().to_bytes(), size, key)

    def _range(self, key: str, start: int, length: int) -> bytes:
        body = obstore.get_range(self._store, key, start=start, length=length).to_bytes()
        return self._exactly(body, length, key)

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """Page by page; where one breaks, on from the last key that arrived: stores list in order."""
        after: str | None = None
        pages = self._pages(prefix, after)

        def page() -> "Sequence[ObjectMeta] | None":
            nonlocal pages
            try:
                return next(pages, None)
            except exceptions.BaseError:
                pages = self._pages(prefix, after)
                raise

        while items := self._attempts.settle(f"{self._url}/{prefix}", page):
            for item in items:
                yield _info(item)
            after = items[-1]["path"]

    def _pages(self, prefix: str, after: str | None) -> "Iterator[Sequence[ObjectMeta]]":
        return iter(obstore.list(self._store, prefix or None, offset=after, chunk_size=_PAGE))

    def _call(self, key: str, attempt: Callable[[], T]) -> T:
        return self._attempts.settle(f"{self._url}/{check_key(key)}", attempt)

    def _replace(self, key: str, body: memoryview) -> None:
        try:
            obstore.put(self._store, key, body, mode="overwrite", chunk_size=_PART_BYTES)
        except exceptions.AlreadyExistsError:
            raise self._contended(key) from None

    def _create(self, key: str, body: bytes) -> bool:
        """Create once.

        412 says that the object exists. So does 409 on Azure; elsewhere it says: another writer is under way,
        come again. Both reach us as one error, so the object itself is asked.
        """
        try:
            obstore.put(self._store, key, body, mode="create")
        except exceptions.AlreadyExistsError as error:
            if status(error) == _CONFLICT and not self._exists(key):
                raise self._contended(key) from None
            return False
        return True

    def _update(self, key: str, body: bytes, expected: "UpdateVersion") -> bool:
        try:
            obstore.put(self._store, key, body, mode=expected)
        except exceptions.PreconditionError:
            return False
        except exceptions.AlreadyExistsError:  # a 409
            raise self._contended(key) from None
        return True

    def _delete(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError as error:
            if is_missing_bucket(error):
                raise

    def _abandon(self, key: str) -> None:
        with contextlib.suppress(_AbandonedError):
            obstore.put(self._store, key, _broken_off(), chunk_size=_ABANDONED_BYTES)

    def _exists(self, key: str) -> bool:
        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def _exactly(self, body: bytes, size: int, key: str) -> bytes:
        if len(body) != size:
            raise CorruptError(f"{self._url}/{key} ended after {len(body)} of {size} bytes")
        return body

    def _contended(self, key: str) -> PassingError:
        return PassingError(UnavailableError(f"other writers kept the store from writing {self._url}/{key}"))


class _AbandonedError(Exception):
    """An upload that was never meant to end."""


def _broken_off() -> Iterator[bytes]:
    for _ in range(2):
        yield bytes(_ABANDONED_BYTES)
    raise _AbandonedError


def _known(tag: Tag) -> "UpdateVersion":
    """The tag for obstore, which wants absent parts left out."""
    known: UpdateVersion = {}
    if tag.e_tag is not None:
        known["e_tag"] = tag.e_tag
    if tag.version is not None:
        known["version"] = tag.version
    return known


def _info(item: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(key=item["path"], size=item["size"], modified_s=item["last_modified"].timestamp())
