"""The gateway: the API over a router, and the list of its replicas."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from slackwater.api.admission import Capacity
from slackwater.api.app import Lifespan, create_app
from slackwater.api.auth import Keys
from slackwater.api.respond import json_reply
from slackwater.clock import Clock
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.router.policy import Health
from slackwater.router.pool import SERVING, Member
from slackwater.router.router import Router

if TYPE_CHECKING:
    from slackwater.api.tokens import ChatTokenizer


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in ``GET /v1/replicas``."""

    replica: ReplicaId
    health: Health
    status: str | None
    """What it says of itself; None before its first answer."""
    run: RunId | None
    version: Version | None
    boot_id: BootId | None
    in_flight: int
    """Requests that this gateway has given it."""


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/replicas``."""

    replicas: tuple[ReplicaRow, ...]


def create_gateway(
    router: Router,
    tokenizer: "ChatTokenizer",
    keys: Keys,
    *,
    model_name: str,
    extra_routes: Sequence[BaseRoute] = (),
    lifespan: Lifespan | None = None,
    clock: Clock | None = None,
    capacity: Capacity | None = None,
) -> Starlette:
    """Make the gateway's API: `slackwater.api.app.create_app` and the routes of a fleet.

    It adds ``GET /v1/replicas`` and a ``/health`` that says how many replicas serve. The app's lifespan opens and
    closes the router.

    Args:
        router: Not opened yet.
        tokenizer: The model's.
        keys: Of this gateway's callers.
        model_name: The model that the replicas serve.
        extra_routes: Come first; control-key routes of other packages.
        lifespan: Of what those need; runs inside the router's.
        clock: The machine's own by default.
        capacity: How much it takes on at once.
    """

    async def replicas(request: Request) -> Response:
        del request
        rows = tuple(_row(member, router.in_flight(name)) for name, member in router.members().items())
        return json_reply(ReplicaList(replicas=rows))

    async def health(request: Request) -> Response:
        del request
        serving = sum(_serves(member) for member in router.members().values())
        return json_reply({"status": SERVING if serving else "no_replica", "replicas": serving})

    @asynccontextmanager
    async def opened(app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(router)
            if lifespan is not None:
                await stack.enter_async_context(lifespan(app))
            yield

    return create_app(
        router,
        tokenizer,
        keys,
        model_name=model_name,
        extra_routes=[*extra_routes, Route("/v1/replicas", replicas), Route("/health", health)],
        lifespan=opened,
        clock=clock,
        capacity=capacity,
    )


def _serves(member: Member) -> bool:
    reachable = member.health in (Health.GOOD, Health.SUSPECT)
    return reachable and member.report is not None and member.report.status == SERVING


def _row(member: Member, in_flight: int) -> ReplicaRow:
    report = member.report
    return ReplicaRow(
        replica=member.replica,
        health=member.health,
        status=report.status if report else None,
        run=report.run if report else None,
        version=report.version if report else None,
        boot_id=report.boot if report else None,
        in_flight=in_flight,
    )
