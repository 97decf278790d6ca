"""Errors of the object stores in our words. obstore tells kinds apart only in part; its text has the rest."""

import re
from typing import Final, NamedTuple

from obstore import exceptions

from slackwater.errors import (
    AuthError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)


class _Sign(NamedTuple):
    """A pattern in a store's answer and what it means."""

    pattern: re.Pattern[str]
    error: type[SlackwaterError]
    says: str
    hint: str


def _sign(pattern: str, error: type[SlackwaterError], says: str, hint: str = "") -> _Sign:
    return _Sign(re.compile(pattern), error, says, hint)


_NO_BUCKET: Final = r"NoSuchBucket|ContainerNotFound|ContainerBeingDeleted|specified bucket does not exist"
_NOT_THE_STORE: Final = r"invalid list response|invalid multipart response|ETag Header missing"

_SIGNS: Final = (
    _sign(
        _NO_BUCKET,
        NotFoundError,
        "no such bucket",
        "create the bucket, or check its name, the region and the endpoint",
    ),
    _sign(
        r"RequestTimeTooSkewed|RequestExpired|AuthenticationFailed.*not yet valid",
        AuthError,
        "the store refused the request's time: this machine's clock is wrong",
        "set the clock, for example with NTP",
    ),
    _sign(
        r"169\.254\.169\.254|metadata\.google\.internal|InstanceMetadata|AccessTokenProvider",
        AuthError,
        "no credentials were found",
        "set the store's environment variables, see docs/buckets.md",
    ),
    _sign(
        r"ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|status code: 40[13]\b",
        AuthError,
        "the store refused the credentials",
        "check the key, its expiry and its rights: list, get, put and abort of uploads",
    ),
    _sign(
        _NOT_THE_STORE,
        UnavailableError,
        "something else answered in the store's place",
        "check the endpoint, and for a proxy or a sign-in page on the way",
    ),
    _sign(
        r"NoSuchUpload|RequestTimeout\b",
        UnavailableError,
        "the store broke the upload off",
        "check the endpoint and the network, then try again",
    ),
    _sign(
        r"status code: 416\b|NotPartial|UnexpectedRange|InvalidRangeRequest|Content-Length Header missing",
        CorruptError,
        "the answer is not the range that was asked for",
    ),
    _sign(
        r"AuthorizationHeaderMalformed|PermanentRedirect|status code: 30[1278]\b",
        InvalidInputError,
        "the bucket lies in another region or behind another endpoint",
        "set AWS_REGION or AWS_ENDPOINT_URL",
    ),
    _sign(r"status code: (405|501)\b", UnsupportedError, "the store can't do this"),
    _sign(r"status code: 404\b", NotFoundError, "no such object"),
    _sign(r"status code: (400|411|413)\b", InvalidInputError, "the store refused the request"),
)

_MAY_PASS: Final = re.compile(rf"NoSuchUpload|RequestTimeout\b|response body error|{_NOT_THE_STORE}")
_UNANSWERED: Final = re.compile(r"error sending request|timed out")
_REPEATED: Final = re.compile(r"after \d+ retries")
_OUTDATED: Final = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestTimeTooSkewed|RequestExpired|AuthenticationFailed|status code: 401\b"
)
_OK: Final = 200
_STATUS: Final = re.compile(r"status code: (\d{3})")
_DETAIL: Final = re.compile(
    r"<Code>([^<]{1,60})</Code>|status code: (\d{3} [A-Za-z ]{1,40})|(HTTP error: [a-z ]{1,60})"
)


def translate(error: Exception, where: str) -> SlackwaterError:
    """Say what an error of obstore means.

    Only the status and the store's code are taken over: the text of an error may carry a signed URL.

    Args:
        error: What obstore raised.
        where: The object's URL, without secrets.
    """
    text = str(error)
    for sign in _SIGNS:
        if sign.pattern.search(text):
            return sign.error(f"{sign.says}: {where}{_detail(text)}", hint=sign.hint)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"no such object: {where}")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return AuthError(f"the store refused the credentials: {where}{_detail(text)}")
    if isinstance(error, exceptions.NotSupportedError):
        return UnsupportedError(f"the store can't do this: {where}")
    return UnavailableError(
        f"the store did not answer in time: {where}{_detail(text)}",
        hint="check the endpoint and the network, then try again",
    )


def retold(status: int | None, code: str = "") -> exceptions.BaseError:
    """What another client than obstore was told, in obstore's words: so that every answer is judged alike.

    Args:
        status: The HTTP status; None where no answer came, 200 where it was none of a store's.
        code: The store's code.
    """
    if status is None:
        return exceptions.GenericError("error sending request")
    if status == _OK:
        return exceptions.GenericError("invalid list response")
    return exceptions.GenericError(f"status code: {status} <Code>{code[:60]}</Code>")


def may_pass(error: Exception) -> bool:
    """Whether a call that ended so may well succeed if it is made anew, and obstore itself didn't repeat it.

    It repeats 429, 5xx and broken connections. It does not repeat a conditional write without an answer (here that
    is safe: `slackwater.bucket.base.PutIfAbsent` tells apart nothing that a lost answer could blur), an upload whose
    parts the store forgot, a page of a listing that was cut or is none, nor a body that was cut and whose object was
    replaced before it could go on.
    """
    text = str(error)
    if _MAY_PASS.search(text):
        return True
    return bool(_UNANSWERED.search(text)) and not _REPEATED.search(text)


def is_outdated(error: Exception) -> bool:
    """Whether the store found a signature or token out of date: a new one may do.

    Repeats within obstore keep their signature; credentials of a role are read again for a new one.
    """
    return bool(_OUTDATED.search(str(error)))


def is_missing_bucket(error: Exception) -> bool:
    """Whether it is the bucket that isn't there, and not an object."""
    return bool(re.search(_NO_BUCKET, str(error)))


def status(error: Exception) -> int | None:
    """The HTTP status that ended a call; None where none came."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _detail(text: str) -> str:
    found = _DETAIL.findall(text)
    words = [word for groups in found for word in groups if word]
    return f" [{', '.join(dict.fromkeys(words))}]" if words else ""
