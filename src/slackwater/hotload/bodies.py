"""Bodies of control calls: read within a bound, and refused by their size before they are read."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from slackwater.api.respond import error_reply, read_body
from slackwater.config.in_flight import InFlight
from slackwater.errors import InvalidInputError, SlackwaterError

T = TypeVar("T")

MAX_BODY_BYTES: Final = 64 * 1024
"""No control call has more to say."""
_DIGITS: Final = 18

Endpoint = Callable[[Request], Awaitable[Response]]


def bounded(
    answer: Callable[[Request, bytes], Awaitable[Response]], refuse: Callable[[SlackwaterError], Response] = error_reply
) -> Endpoint:
    """An endpoint that is given the body, of at most `MAX_BODY_BYTES`.

    A longer one is a 413, at once where its length is declared; the connection is closed, as the rest of it is unread.
    """

    async def endpoint(request: Request) -> Response:
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and (len(declared) > _DIGITS or int(declared) > MAX_BODY_BYTES):
            return _too_long(InvalidInputError(f"the body is longer than {MAX_BODY_BYTES} bytes", hint="send less"))
        try:
            body = await read_body(request, MAX_BODY_BYTES)
        except HTTPException as error:
            return _too_long(InvalidInputError(error.detail, hint="send less"))
        return await answer(request, body)

    def _too_long(error: InvalidInputError) -> Response:
        reply = refuse(error)
        reply.status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        reply.headers["Connection"] = "close"
        return reply

    return endpoint


def decode(body: bytes, kind: type[T], hint: str) -> T:
    """Read a JSON body.

    Raises:
        InvalidInputError: It isn't one of that kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidInputError(f"the body can't be read: {error}", hint=hint) from error


def read_in_flight(word: str | None) -> InFlight | None:
    """The mode for requests in flight that ``word`` names; None where there is no word.

    Raises:
        InvalidInputError: There is no such mode.
    """
    if word is None:
        return None
    try:
        return InFlight(word)
    except ValueError:
        raise InvalidInputError(
            f"there is no in_flight {word[:80]!r}", hint=f"it is one of {', '.join(InFlight)}"
        ) from None
