"""Who finds the uploads that broken writers left in an object store. obstore can't: it lists objects alone."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from slackwater.bucket.base import Abort
from slackwater.bucket.patience import Patience
from slackwater.errors import UnsupportedError

_RULE: Final = "let a lifecycle rule of the bucket remove them: AbortIncompleteMultipartUpload"
_ELSEWHERE: Final[Mapping[str, str]] = {
    "gs": _RULE,
    "az": "the store itself drops blocks that no blob took up, after a week",
}


def open_uploads(url: str, patience: Patience) -> Abort:
    """Open what lists and aborts a store's unfinished uploads; the store isn't asked yet.

    Args:
        url: ``s3://…``, ``gs://…`` or ``az://…``, already checked.
        patience: Time-outs and retries.

    Raises:
        UnsupportedError: It can't be done for this store, or botocore isn't installed.
        InvalidInputError: The environment's settings for the store don't fit together.
        AuthError: No credentials were found.
    """
    elsewhere = _ELSEWHERE.get(url.partition(":")[0])
    if elsewhere is not None:
        raise UnsupportedError(f"unfinished uploads to {url} can't be listed", hint=elsewhere)
    if find_spec("botocore") is None:
        raise UnsupportedError(
            f"unfinished uploads to {url} can't be listed without botocore",
            hint=f"pip install 'slackwater[gc]', or {_RULE}",
        )
    from slackwater.bucket.unfinished_s3 import S3Uploads  # noqa: PLC0415 (botocore is an extra)

    return S3Uploads(url, patience)
