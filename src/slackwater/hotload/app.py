"""The native front of hot-loads. Normative page: docs/hot-load.md. Every path needs the control key."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.respond import json_reply
from slackwater.errors import InvalidInputError
from slackwater.hotload.bodies import bounded, decode, read_in_flight
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.groups import Group, Mode
from slackwater.hotload.operation import Operation
from slackwater.hotload.rollout import Canary
from slackwater.ids import RunId, Version, snapshot_name

ACCEPTED = 202
"""Status of an operation that hasn't ended."""
OK = 200
_MAX_KEY = 200
_MAX_EVENTS = 1000

Name = Annotated[str, msgspec.Meta(max_length=300)]


class HotLoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/hot-loads``."""

    snapshot: Name
    """``<run>/<version>``."""
    group: Name | None = None
    replicas: tuple[Name, ...] | None = None
    canary: Canary | None = None
    in_flight: Name | None = None
    """An `InFlight`; without it, each replica's default."""


class GroupBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/groups/{name}``."""

    mode: Mode
    snapshot: Name | None = None
    """Where ``mode`` is ``pinned``."""
    in_flight: Name | None = None
    """As in `HotLoadBody`; not where ``mode`` is ``manual``."""


def hotload_routes(conductor: Conductor) -> list[Route]:
    """What to give `slackwater.api.app.create_app` as ``extra_routes``."""
    front = _Front(conductor)
    return [
        Route("/v1/hot-loads", bounded(front.submit), methods=["POST"]),
        Route("/v1/hot-loads", front.list),
        Route("/v1/hot-loads/{id}", front.get),
        Route("/v1/hot-loads/{id}/cancel", bounded(front.cancel), methods=["POST"]),
        Route("/v1/groups", front.groups),
        Route("/v1/groups/{name}", bounded(front.set_mode), methods=["POST"]),
        Route("/v1/snapshots", front.snapshots),
        Route("/v1/fleet", front.fleet),
        Route("/v1/fleet/events", front.events),
        Route("/v1/follow", bounded(front.follow), methods=["POST"]),
    ]


class _Front:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    async def submit(self, request: Request, body: bytes) -> Response:
        """``POST /v1/hot-loads``."""
        order = decode(body, HotLoadBody, 'send {"snapshot": "<run>/<version>"}')
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise InvalidInputError(f"Idempotency-Key must have 1 to {_MAX_KEY} characters")
        return _reply(
            await self._conductor.submit(
                order.snapshot,
                key,
                group=order.group,
                replicas=order.replicas,
                canary=order.canary,
                in_flight=read_in_flight(order.in_flight),
            )
        )

    async def list(self, request: Request) -> Response:
        """``GET /v1/hot-loads``."""
        del request
        return json_reply({"hot_loads": [_shown(operation) for operation in self._conductor.list()]})

    async def get(self, request: Request) -> Response:
        """``GET /v1/hot-loads/{id}``."""
        return json_reply(_shown(self._conductor.get(request.path_params["id"])))

    async def cancel(self, request: Request, body: bytes) -> Response:
        """``POST /v1/hot-loads/{id}/cancel``."""
        del body
        return _reply(await self._conductor.cancel(request.path_params["id"]))

    async def groups(self, request: Request) -> Response:
        """``GET /v1/groups``."""
        del request
        return json_reply({"groups": [self._group(group) for group in self._conductor.groups()]})

    async def set_mode(self, request: Request, body: bytes) -> Response:
        """``POST /v1/groups/{name}``."""
        wanted = decode(body, GroupBody, 'send {"mode": "manual"}, or follow, or pinned with a snapshot')
        name = request.path_params["name"]
        in_flight = read_in_flight(wanted.in_flight)
        return json_reply(self._group(await self._conductor.set_mode(name, wanted.mode, wanted.snapshot, in_flight)))

    async def snapshots(self, request: Request) -> Response:
        """``GET /v1/snapshots``."""
        del request
        return json_reply({"snapshots": await self._conductor.snapshots()})

    async def fleet(self, request: Request) -> Response:
        """``GET /v1/fleet``."""
        del request
        return json_reply({"replicas": await self._conductor.fleet()})

    async def events(self, request: Request) -> Response:
        """``GET /v1/fleet/events``."""
        limit = request.query_params.get("limit", "100")
        if not limit.isascii() or not limit.isdigit() or not 0 < int(limit[:9]) <= _MAX_EVENTS:
            raise InvalidInputError(f"limit must be 1 to {_MAX_EVENTS}")
        return json_reply({"events": await self._conductor.events(int(limit))})

    async def follow(self, request: Request, body: bytes) -> Response:
        """``POST /v1/follow``."""
        del request, body
        return json_reply({"mode": "follow", "replicas": await self._conductor.follow()})

    def _group(self, group: Group) -> dict[str, object]:
        standing = self._conductor.standing(group.name)
        return {
            "name": group.name,
            "mode": group.mode,
            "snapshot": None if group.version is None else snapshot_name(self._conductor.run, group.version),
            "in_flight": group.in_flight,
            "replicas": group.replicas,
            "hot_load": None if standing is None else standing.id,
        }


def _reply(operation: Operation) -> Response:
    return json_reply(_shown(operation), OK if operation.ended else ACCEPTED)


def _shown(operation: Operation) -> dict[str, object]:
    order = operation.order
    return {
        "id": operation.id,
        "idempotency_key": operation.idempotency_key,
        "snapshot": _goal(order.run, order.version),
        "group": order.group,
        "canary": order.canary,
        "in_flight": order.in_flight,
        "standing": order.standing,
        "state": operation.state,
        "phase": operation.phase,
        "created_at": operation.created_at,
        "replicas": operation.replicas,
    }


def _goal(run: RunId, version: Version | None) -> str:
    return f"{run}/head" if version is None else snapshot_name(run, version)
