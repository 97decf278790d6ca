"""S3, GCS and Azure as a bucket, through obstore. Credentials and endpoints come from the environment."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
import stamina
from obstore import exceptions
from obstore.store import S3Store, from_url

from slackwater.bucket.base import ObjectInfo
from slackwater.bucket.cloud_errors import status, translate
from slackwater.bucket.key import check_key, check_prefix, check_range
from slackwater.errors import CorruptError, InvalidInputError, UnavailableError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

T = TypeVar("T")

_ENVIRONMENT: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_PART_BYTES: Final = 8 * 1024 * 1024
_CONFLICT: Final = 409


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a call waits before it gives up."""

    deadline_s: float = 120.0
    """Seconds from the first attempt after which none follows."""
    attempts: int = 10
    idle_s: float = 60.0
    """Seconds without a byte after which a connection counts as dead."""
    connect_s: float = 5.0
    request_s: float = 600.0
    """Seconds that one request may take, its body included."""
    first_wait_s: float = 0.1
    """Back-off doubles from here, with jitter."""
    longest_wait_s: float = 10.0


PATIENT: Final = Patience()
"""The default."""


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
        self._store = _open_store(url, patience)
        self._until_settled = stamina.RetryingCaller(
            attempts=patience.attempts,
            timeout=patience.deadline_s,
            wait_initial=patience.first_wait_s,
            wait_max=patience.longest_wait_s,
            wait_jitter=patience.first_wait_s,
        ).on(_ContendedError)

    @property
    def url(self) -> str:
        """What the user wrote; `open_bucket` refuses URLs with secrets in them."""
        return self._url

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        check_key(key)
        with self._mapped(key):
            answer = obstore.get(self._store, key)
            size = answer.meta["size"]
            if size > max_bytes:
                raise CorruptError(f"{self._url}/{key} has {size} bytes, at most {max_bytes} are expected")
            return self._exactly(answer.bytes().to_bytes(), size, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        check_key(key)
        check_range(start, length)
        if length == 0:
            return b""
        with self._mapped(key):
            body = obstore.get_range(self._store, key, start=start, length=length).to_bytes()
            return self._exactly(body, length, key)

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        flat = memoryview(body).cast("B")
        self._settle(key, lambda: self._replace(key, flat))

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        return self._settle(key, lambda: self._create(key, body))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._listed(check_prefix(prefix))

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._mapped(prefix):
            for page in obstore.list(self._store, prefix or None, chunk_size=1000):
                for item in page:
                    yield ObjectInfo(key=item["path"], size=item["size"])

    def _settle(self, key: str, attempt: Callable[[], T]) -> T:
        check_key(key)
        with self._mapped(key):
            return self._until_settled(attempt)

    def _replace(self, key: str, body: memoryview) -> None:
        try:
            obstore.put(self._store, key, body, mode="overwrite", chunk_size=_PART_BYTES)
        except exceptions.AlreadyExistsError as error:
            raise _ContendedError from error

    def _create(self, key: str, body: bytes) -> bool:
        """Create once.

        412 says that the object exists. So does 409 on Azure; elsewhere it says: another writer is under way,
        come again. Both reach us as one error, so the object itself is asked.
        """
        try:
            obstore.put(self._store, key, body, mode="create")
        except exceptions.AlreadyExistsError as error:
            if status(error) == _CONFLICT and not self._exists(key):
                raise _ContendedError from error
            return False
        return True

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

    @contextmanager
    def _mapped(self, key: str) -> Generator[None]:
        """The one place where obstore's errors become ours. Their text may hold a signed URL: no chaining."""
        where = f"{self._url}/{key}"
        try:
            yield
        except _ContendedError:
            raise UnavailableError(f"other writers kept the store from writing {where}") from None
        except (exceptions.BaseError, OSError) as error:
            raise translate(error, where) from None


class _ContendedError(Exception):
    """The store asked to come again: another conditional write on this key is under way."""


def _allows_http(url: str) -> bool:
    """Whether the environment allows plain HTTP. Given any client option, obstore does not look itself."""
    prefix = _ENVIRONMENT[url.partition(":")[0]]
    return os.environ.get(f"{prefix}_ALLOW_HTTP", "").lower() in {"true", "1", "yes", "on"}


def _open_store(url: str, patience: Patience) -> "ObjectStore":
    client: ClientConfig = {
        "allow_http": _allows_http(url),
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.idle_s),
        "timeout": timedelta(seconds=patience.request_s),
    }
    retry: RetryConfig = {
        "max_retries": patience.attempts - 1,
        "retry_timeout": timedelta(seconds=patience.deadline_s),
        "backoff": {
            "init_backoff": timedelta(seconds=patience.first_wait_s),
            "max_backoff": timedelta(seconds=patience.longest_wait_s),
            "base": 2,
        },
    }
    try:
        if url.startswith("s3://"):
            # An environment that switches conditional writes off would switch off the commit.
            sure: S3Config = {"conditional_put": "etag"}
            return S3Store.from_url(url, config=sure, client_options=client, retry_config=retry)
        return from_url(url, client_options=client, retry_config=retry)
    except (exceptions.BaseError, ValueError) as error:
        raise InvalidInputError(
            f"{url} can't be opened with the settings in the environment",
            hint=str(error).partition("\n")[0][:200],
        ) from None
