"""Whole replies: bodies read within a bound, JSON written, and every error in the one envelope."""

import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slackwater.api.faults import STATUS, Envelope, fault, retry_after_s
from slackwater.api.schema import MAX_BODY_BYTES
from slackwater.api.stream import pieces
from slackwater.errors import InternalError, InvalidInputError, NotFoundError, SlackwaterError

_log = logging.getLogger(__name__)

CLIENT_GONE: Final = 499
"""Status of a reply that nobody reads: the client closed the connection."""


def json_reply(value: object, status: int = 200) -> Response:
    """Encode a reply. NaN and infinities, which JSON lacks, come out as null."""
    return _PiecedReply(msgspec.json.encode(value), status, media_type="application/json")


class _PiecedReply(Response):
    """Sends a long body piece by piece, as fast as the client reads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in pieces(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body; at most ``limit`` bytes and one block are held.

    Raises:
        HTTPException: It is longer; `HANDLERS` answer it.
    """
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > limit:
            # The rest of it is unread, so the connection can't be used again.
            closing = {"Connection": "close"}
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {limit} bytes", closing)
    return bytes(body)


def error_reply(error: SlackwaterError) -> Response:
    """An error's envelope under the status of its kind."""
    status = STATUS[error.kind]
    wait = retry_after_s(error)
    if status >= STATUS["internal"] and wait is None:
        _log.error("a request failed: %s", error, exc_info=error)
    reply = json_reply(Envelope(fault(error)), status)
    if wait is not None:
        reply.headers["Retry-After"] = str(wait)
    return reply


async def _known(_: Request, error: Exception) -> Response:
    return error_reply(error if isinstance(error, SlackwaterError) else InternalError(str(error)))


async def _unknown(_: Request, error: Exception) -> Response:
    return error_reply(InternalError(f"unexpected {type(error).__name__}", hint="please report it; the log has more"))


async def _routing(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return await _unknown(request, error)
    reply = error_reply(_refusal(request, error))
    reply.status_code = error.status_code
    reply.headers.update(error.headers or {})
    return reply


def _refusal(request: Request, error: HTTPException) -> SlackwaterError:
    path = request.url.path[:200]
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return NotFoundError(f"there is no route {path}", hint="docs/rl-api.md lists them")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
            return InvalidInputError(f"{path} doesn't answer {request.method}", hint=f"allowed: {allowed}")
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return InvalidInputError(error.detail, hint="send less, or in parts")
        case _:
            return InvalidInputError(error.detail)


async def _gone(_: Request, error: Exception) -> Response:
    del error
    return Response(status_code=CLIENT_GONE)


HANDLERS: Final = MappingProxyType[Any, Callable[[Request, Exception], Coroutine[Any, Any, Response]]](
    {SlackwaterError: _known, HTTPException: _routing, ClientDisconnect: _gone, Exception: _unknown}
)
"""Starlette's exception handlers: no error leaves without its envelope."""
