"""`slackwater gateway`: the API over a router over replicas, with the hot-load routes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import ClientSession
from starlette.applications import Starlette

from slackwater.api.admission import Capacity
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.bucket.open import probe
from slackwater.cli.ending import Ending
from slackwater.cli.serve import Server, bind
from slackwater.cli.trust import open_trusted
from slackwater.clock import SystemClock
from slackwater.config.process import GatewaySettings
from slackwater.hotload.app import hotload_routes
from slackwater.hotload.conductor import Conductor, ConductorLimits
from slackwater.hotload.coreweave import coreweave_routes
from slackwater.hotload.fireworks import AccountKey, fireworks_routes
from slackwater.hotload.groups import Group, Mode
from slackwater.hotload.ledger import open_ledger
from slackwater.hotload.remote import HttpTarget
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.router.app import create_gateway
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router


async def run_gateway(settings: GatewaySettings, keys: Keys, ending: Ending) -> None:
    """Serve until told to stop.

    Raises:
        UnavailableError: The port is in use.
        InvalidInputError: No replica is named, or one twice; groups don't fit; a key file is wrong; or the ledger
            is another run's.
        ConflictError: Another process has the ledger open.
        AuthError: The ledger can't be written.
        NotFoundError: No such bucket or tokenizer.
    """
    taken = bind(settings.host, settings.port)
    bucket = open_trusted(settings.bucket, settings.trust)
    await asyncio.to_thread(probe, bucket)
    tokenizer = await asyncio.to_thread(
        ChatTokenizer,
        settings.tokenizer,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    async with ClientSession() as session:
        targets = [
            HttpTarget(name, url, keys.control, session, deadline_s=settings.call_s)
            for name, url in settings.replicas.items()
        ]
        ledger = await asyncio.to_thread(open_ledger, settings.ledger, settings.run)
        conductor = Conductor(
            targets,
            BucketSnapshots(bucket, settings.run),
            SystemClock(),
            _limits(settings),
            ledger=ledger,
            groups=_groups(settings),
        )
        router = Router(
            {name: RemoteReplica(url, keys.inference) for name, url in settings.replicas.items()},
            probe_interval_s=settings.probe_s,
            head=conductor.newest,
        )
        app = _app(router, conductor, tokenizer, settings, keys)
        await Server(app, taken).run_until(ending)


def _app(
    router: Router, conductor: Conductor, tokenizer: ChatTokenizer, settings: GatewaySettings, keys: Keys
) -> Starlette:
    """The API and the fronts of the hot-load; the conductor runs as long as it does."""

    @asynccontextmanager
    async def conducting(app: Starlette) -> AsyncGenerator[None]:
        del app
        await conductor.start()
        yield
        await conductor.close()

    most = settings.max_requests
    app = create_gateway(
        router,
        tokenizer,
        keys,
        model_name=settings.model,
        extra_routes=[*hotload_routes(conductor), *fireworks_routes(conductor), *coreweave_routes(conductor)],
        lifespan=conducting,
        capacity=Capacity(places=most, at_once=most, prompt_tokens=settings.max_prompt_tokens),
    )
    app.add_middleware(AccountKey)
    return app


def _limits(settings: GatewaySettings) -> ConductorLimits:
    return ConductorLimits(
        deadline_s=settings.deadline_s,
        poll_s=settings.poll_s,
        standing_poll_s=settings.watch_s,
        lag_limit_s=settings.lag_limit_s,
    )


def _groups(settings: GatewaySettings) -> list[Group]:
    return [
        Group(name=each.name, mode=Mode(each.mode), version=each.version, replicas=tuple(each.replicas))
        for each in settings.groups
    ]
