"""A replica's own routes, in front of the API's: health for routers, control for operators and the conductor.

``/health`` is open; every other path here needs the control key (`slackwater.api.auth` denies by default).
"""

from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.respond import json_reply, read_body
from slackwater.config.in_flight import InFlight
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.ids import Version
from slackwater.replica.replica import Replica
from slackwater.replica.status import ReplicaStatus, State
from slackwater.replica.swap import Stage


class TargetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /control/v1/target``."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=10**12)] | Literal["head", "stay"]
    in_flight: InFlight | None = None
    """What swaps do with answers in flight; None: the replica's own mode."""


def control_routes(replica: Replica) -> list[Route]:
    """What to give `slackwater.api.app.create_app` as ``extra_routes``. Normative page: docs/hot-load.md."""
    control = _Control(replica)
    return [
        Route("/health", control.health),
        Route("/control/v1/status", control.status),
        Route("/control/v1/target", control.target, methods=["POST"]),
        Route("/control/v1/rollback", control.rollback, methods=["POST"]),
        Route("/control/v1/weights", control.weights),
    ]


class _Control:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        del request
        status = self._replica.status()
        serves = status.state is State.SERVING
        return json_reply({
            "status": status.state.value,
            "replica": status.replica,
            "boot_id": status.boot_id,
            "run": status.run,
            "version": status.version,
            "in_flight": status.in_flight,
            "draining": status.stage is Stage.DRAINING,
            "reason": _waiting_for(status),
            "window": self._replica.window() if serves else None,
            "routing": self._replica.routing(),
        })  # fmt: skip

    async def status(self, request: Request) -> Response:
        """``GET /control/v1/status``."""
        del request
        return json_reply(self._replica.status())

    async def target(self, request: Request) -> Response:
        """``POST /control/v1/target``."""
        body = _read_target(await read_body(request))
        goal = Version(body.version) if isinstance(body.version, int) else body.version
        return json_reply(await self._replica.set_target(goal, body.in_flight))

    async def rollback(self, request: Request) -> Response:
        """``POST /control/v1/rollback``."""
        del request
        return json_reply(await self._replica.roll_back())

    async def weights(self, request: Request) -> Response:
        """``GET /control/v1/weights``."""
        del request
        version, digest = await self._replica.weights_digest()
        return json_reply({"version": version, "state_digest": digest})


def _waiting_for(status: ReplicaStatus) -> str | None:
    """Nobody has shown a key: what else the bucket has is for the status."""
    absent = status.last_error is not None and status.last_error.kind == NotFoundError.kind
    return f"run {status.run} has no version yet" if absent and status.state is State.STARTING else None


def _read_target(body: bytes) -> TargetBody:
    try:
        return msgspec.json.decode(body, type=TargetBody)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidInputError(
            f"the target can't be read: {error}", hint='send {"version": 7}, or "head" or "stay" as the version'
        ) from error
