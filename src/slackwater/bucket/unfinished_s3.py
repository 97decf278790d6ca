"""Unfinished uploads on S3, through botocore, with the settings that obstore takes from the environment.

ListMultipartUploads and AbortMultipartUpload: docs.aws.amazon.com/AmazonS3/latest/API.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from botocore.session import Session

from slackwater.bucket.base import Unfinished
from slackwater.bucket.cloud_attempts import Attempts, PassingError
from slackwater.bucket.cloud_errors import retold, translate
from slackwater.bucket.patience import Patience
from slackwater.errors import AuthError, CorruptError, InvalidInputError

T = TypeVar("T")

_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_BUSY: Final = frozenset({429, 500, 502, 503, 504})
_NO_CREDENTIALS: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    MetadataRetrievalError,
)
_GONE: Final = "NoSuchUpload"


class S3Uploads:
    """The unfinished uploads below a URL. Safe for any number of threads.

    Args:
        url: ``s3://bucket/prefix``, already checked.
        patience: Time-outs and retries.

    Raises:
        InvalidInputError: The environment's settings for the store don't fit together.
        AuthError: Credentials are set in part, or a role doesn't give them.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        parts = urlsplit(url)
        self._url = url.rstrip("/")
        self._name = parts.netloc
        self._root = parts.path.strip("/")
        self._client = _client(self._url, self._name, patience)
        self._attempts = Attempts(patience)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See `slackwater.bucket.base.Abort.unfinished`.

        Raises:
            CorruptError: The store's pages lead in a circle.
        """
        root = f"{self._root}/" if self._root else ""
        below = root + (f"{prefix}/" if prefix else "")
        after: dict[str, str] = {}
        while True:
            page = self._page(below, after)
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(below):  # a store may pass the prefix over
                    yield _unfinished(item, root)
            if not page["IsTruncated"]:
                return
            reached, after = after, _markers(page)
            if after in ({}, reached):
                raise CorruptError(f"the store lists the unfinished uploads of {self._url} in a circle")

    def abort(self, upload: Unfinished) -> None:
        """See `slackwater.bucket.base.Abort.abort`."""
        key = "/".join(filter(None, (self._root, upload.key)))

        def attempt() -> None:
            try:
                self._client.abort_multipart_upload(Bucket=self._name, Key=key, UploadId=upload.upload)
            except ClientError as error:
                if _code(error) != _GONE:
                    raise

        self._settle(upload.key, attempt)

    def _page(self, below: str, after: dict[str, str]) -> Any:
        def attempt() -> Any:
            page = self._client.list_multipart_uploads(Bucket=self._name, Prefix=below, **after)
            named = all({"Key", "UploadId"} <= item.keys() for item in page.get("Uploads", ()))
            if "IsTruncated" not in page or not named:
                raise retold(200)
            return page

        return self._settle(below.removeprefix(self._root).strip("/"), attempt)

    def _settle(self, key: str, attempt: Callable[[], T]) -> T:
        where = f"{self._url}/{key}"
        return self._attempts.settle(where, lambda: _once(where, attempt))


def _once(where: str, attempt: Callable[[], T]) -> T:
    """The one place where botocore's errors become those that other calls to a store end with."""
    try:
        return attempt()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        told = retold(status, _code(error))
        if status in _BUSY:
            raise PassingError(translate(told, where)) from None
        raise told from None
    except (ResponseParserError, ValueError, RuntimeError):  # dates that are none come through as they are
        raise retold(200) from None
    except _NO_CREDENTIALS:
        raise _unknown(where) from None
    except BotoCoreError:
        raise retold(None) from None


def _unknown(where: str) -> AuthError:
    return AuthError(
        f"no credentials were found: {where}", hint="set the store's environment variables, see docs/buckets.md"
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _unfinished(item: Any, root: str) -> Unfinished:
    """A date before all stores is a server's zero, and says nothing."""
    started = item.get("Initiated")
    started_s = 0.0 if started is None else started.timestamp()
    return Unfinished(
        key=item["Key"].removeprefix(root), upload=item["UploadId"], started_s=started_s if started_s > 0 else None
    )


def _markers(page: Any) -> dict[str, str]:
    """Where the next page goes on. Buckets of one zone tell a key alone."""
    named = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
    return {name: value for name, value in named.items() if value}


def _client(url: str, bucket: str, patience: Patience) -> Any:
    virtual = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in _TRUE
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    if endpoint and virtual:
        endpoint = endpoint.replace(f"//{bucket}.", "//", 1)  # obstore wants the bucket in it, botocore puts it there
    config = Config(
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        connect_timeout=patience.connect_s,
        read_timeout=patience.idle_s,
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "virtual" if virtual else "path"},
    )
    try:
        return _session().create_client("s3", config=config, endpoint_url=endpoint)
    except _NO_CREDENTIALS:
        raise _unknown(url) from None
    except (BotoCoreError, ValueError) as error:
        raise InvalidInputError(
            f"{url} can't be opened with the settings in the environment", hint=str(error).partition("\n")[0][:200]
        ) from None


def _session() -> Session:
    """Without the files and profiles in ``~/.aws``, which obstore doesn't read either."""
    session = Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    session.set_config_variable("ignore_configured_endpoint_urls", True)  # the role's own service isn't the store's
    metadata = os.environ.get("AWS_METADATA_ENDPOINT")
    if metadata:
        session.set_config_variable("ec2_metadata_service_endpoint", metadata)
    return session
