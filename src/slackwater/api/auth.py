"""Two keys, two rights, and a gate before every route: what is not listed needs the control key."""

import hmac
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.api.faults import Envelope, fault
from slackwater.errors import AuthError, InvalidInputError

OPEN_PATHS: Final = frozenset({"/health"})
"""Answered without a key."""
INFERENCE_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/generate",
        "/v1/score",
        "/v1/abort",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/models",
        "/v1/capabilities",
        "/v1/replicas",
        "/inference/v1/generate",
        "/generate",
        "/openapi.json",
    }
)
"""What the inference key opens. Every other path, existing or not, needs the control key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The two keys of a deployment. Neither has the other's right."""

    inference: str = field(repr=False)
    control: str = field(repr=False)

    def __post_init__(self) -> None:
        if not self.inference or not self.control or self.inference == self.control:
            raise InvalidInputError("the two keys must be set and must differ", hint="make two random strings")


class KeyGate:
    """ASGI middleware: a request passes only with the key for its path, compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._inference = _expected(keys.inference)
        self._control = _expected(keys.control)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Lifespan passes; websockets have no route here and are refused as paths are."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if path in OPEN_PATHS and scope["type"] == "http":
            return None
        shown = Headers(scope=scope).get("authorization", "").encode()
        is_inference = hmac.compare_digest(shown, self._inference)
        is_control = hmac.compare_digest(shown, self._control)
        if is_inference if path in INFERENCE_PATHS else is_control:
            return None
        if is_inference or is_control:
            error = AuthError("this key has no right to this path", hint="there are an inference key and a control key")
            return _refuse(error, HTTPStatus.FORBIDDEN)
        error = AuthError("no valid key", hint="send the header Authorization: Bearer KEY")
        return _refuse(error, HTTPStatus.UNAUTHORIZED)


def _expected(key: str) -> bytes:
    return f"Bearer {key}".encode()


def _refuse(error: AuthError, status: HTTPStatus) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    body = msgspec.json.encode(Envelope(fault(error)))
    return Response(body, status, headers, media_type="application/json")
