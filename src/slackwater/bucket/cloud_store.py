"""A client of obstore for a URL: credentials and endpoints come from the environment."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore import exceptions
from obstore.store import S3Store, from_url

from slackwater.bucket.patience import Patience
from slackwater.errors import InvalidInputError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

_ENVIRONMENT: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


def open_store(url: str, patience: Patience) -> "ObjectStore":
    """Open a store; nothing is sent.

    Args:
        url: ``s3://…``, ``gs://…`` or ``az://…``, already checked.
        patience: Time-outs, and how obstore repeats single requests.

    Raises:
        InvalidInputError: The environment's settings for the store don't fit together.
    """
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


def _allows_http(url: str) -> bool:
    """Whether the environment allows plain HTTP. Given any client option, obstore does not look itself."""
    prefix = _ENVIRONMENT[url.partition(":")[0]]
    return os.environ.get(f"{prefix}_ALLOW_HTTP", "").lower() in {"true", "1", "yes", "on"}
