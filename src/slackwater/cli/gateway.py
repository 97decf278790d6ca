"""`slackwater gateway`: the API over a router over replicas, with the hot-load routes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import ClientSession
from starlette.applications import Starlette

from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.bucket.open import probe
from slackwater.cli.ending import Ending
from slackwater.cli.serve import Server, bind
from slackwater.cli.trust import open_trusted
from slackwater.clock import SystemClock
from slackwater.config.process import GatewaySettings
from slackwater.hotload.app import hotload_routes
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.remote import HttpTarget
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.router.app import create_gateway
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router


async def run_gateway(settings: GatewaySettings, keys: Keys, ending: Ending) -> None:
    """Serve until told to stop.

    Raises:
        UnavailableError: The port is in use.
        InvalidInputError: No replica is named, or one twice; or a key file is wrong.
        NotFoundError: No such bucket or tokenizer.
    """
    taken = bind(settings.host, settings.port)
    bucket = open_trusted(settings.bucket, settings.trust)
    await asyncio.to_thread(probe, bucket)
    tokenizer = await asyncio.to_thread(ChatTokenizer, settings.tokenizer)
    async with ClientSession() as session:
        targets = [HttpTarget(name, url, keys.control, session) for name, url in settings.replicas.items()]
        conductor = Conductor(targets, BucketSnapshots(bucket, settings.run), SystemClock())
        router = Router(
            {name: RemoteReplica(url, keys.inference) for name, url in settings.replicas.items()},
            probe_interval_s=settings.probe_s,
        )

        @asynccontextmanager
        async def conducting(app: Starlette) -> AsyncGenerator[None]:
            del app
            yield
            await conductor.close()

        app = create_gateway(
            router,
            tokenizer,
            keys,
            model_name=settings.model,
            extra_routes=hotload_routes(conductor),
            lifespan=conducting,
        )
        await Server(app, taken).run_until(ending)
