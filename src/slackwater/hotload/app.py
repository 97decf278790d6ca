"""The native front of hot-loads. Normative page: docs/hot-load.md. Every path needs the control key."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.respond import json_reply, read_body
from slackwater.errors import InvalidInputError
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.operation import Operation
from slackwater.ids import snapshot_name

ACCEPTED = 202
"""Status of an operation that hasn't ended."""
OK = 200
_MAX_BODY_BYTES = 64 * 1024
_MAX_KEY = 200


class HotLoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/hot-loads``."""

    snapshot: Annotated[str, msgspec.Meta(max_length=300)]
    """``<run>/<version>``."""


def hotload_routes(conductor: Conductor) -> list[Route]:
    """What to give `slackwater.api.app.create_app` as ``extra_routes``."""
    front = _Front(conductor)
    return [
        Route("/v1/hot-loads", front.submit, methods=["POST"]),
        Route("/v1/hot-loads", front.list),
        Route("/v1/hot-loads/{id}", front.get),
        Route("/v1/hot-loads/{id}/cancel", front.cancel, methods=["POST"]),
        Route("/v1/snapshots", front.snapshots),
        Route("/v1/fleet", front.fleet),
        Route("/v1/follow", front.follow, methods=["POST"]),
    ]


class _Front:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    async def submit(self, request: Request) -> Response:
        """``POST /v1/hot-loads``."""
        body = _read(await read_body(request, _MAX_BODY_BYTES))
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise InvalidInputError(f"Idempotency-Key must have 1 to {_MAX_KEY} characters")
        return _reply(await self._conductor.submit(body.snapshot, key))

    async def list(self, request: Request) -> Response:
        """``GET /v1/hot-loads``."""
        del request
        return json_reply({"hot_loads": [_shown(operation) for operation in self._conductor.list()]})

    async def get(self, request: Request) -> Response:
        """``GET /v1/hot-loads/{id}``."""
        return json_reply(_shown(self._conductor.get(request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/hot-loads/{id}/cancel``."""
        return _reply(await self._conductor.cancel(request.path_params["id"]))

    async def snapshots(self, request: Request) -> Response:
        """``GET /v1/snapshots``."""
        del request
        return json_reply({"snapshots": await self._conductor.snapshots()})

    async def fleet(self, request: Request) -> Response:
        """``GET /v1/fleet``."""
        del request
        return json_reply({"replicas": await self._conductor.fleet()})

    async def follow(self, request: Request) -> Response:
        """``POST /v1/follow``."""
        del request
        return json_reply({"mode": "follow", "replicas": await self._conductor.follow()})


def _reply(operation: Operation) -> Response:
    return json_reply(_shown(operation), OK if operation.ended else ACCEPTED)


def _shown(operation: Operation) -> dict[str, object]:
    return {
        "id": operation.id,
        "idempotency_key": operation.idempotency_key,
        "snapshot": snapshot_name(operation.run, operation.version),
        "state": operation.state.value,
        "created_at": operation.created_at,
        "replicas": operation.replicas,
    }


def _read(body: bytes) -> HotLoadBody:
    try:
        return msgspec.json.decode(body, type=HotLoadBody)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidInputError(
            f"the hot-load can't be read: {error}", hint='send {"snapshot": "<run>/<version>"}'
        ) from error
