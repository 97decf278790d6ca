"""`slackwater replica`: the embedded engine, following one run, behind its own API."""

import asyncio
import secrets
from functools import partial
from pathlib import Path

from platformdirs import user_cache_path
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.api.admission import replica_capacity
from slackwater.api.app import create_app
from slackwater.api.auth import KeyGate, Keys
from slackwater.api.respond import HANDLERS
from slackwater.api.tokens import ChatTokenizer
from slackwater.bucket.base import Bucket
from slackwater.bucket.open import probe
from slackwater.cli.absent import absent_run
from slackwater.cli.ending import Ending
from slackwater.cli.serve import Server, bind
from slackwater.cli.trust import open_trusted
from slackwater.clock import SystemClock
from slackwater.config.process import ReplicaSettings
from slackwater.delivery.fetcher import Fetcher
from slackwater.delivery.watcher import Watcher
from slackwater.engine.torch.engine import TorchEngine
from slackwater.errors import AuthError, NotFoundError, UnavailableError
from slackwater.ids import BootId, RunId, Version
from slackwater.replica.app import control_routes
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.replica import Replica, ReplicaOptions


async def run_replica(settings: ReplicaSettings, keys: Keys, ending: Ending) -> None:
    """Serve until told to stop. The port answers at once; completions are refused until the run's head is served.

    Raises:
        UnavailableError: The port is in use.
        SlackwaterError: What can't heal: no such bucket, wrong credentials, a model that isn't supported.
    """
    taken = bind(settings.host, settings.port)
    bucket = open_trusted(settings.bucket, settings.trust)
    await asyncio.to_thread(probe, bucket)
    cache = settings.cache or user_cache_path("slackwater") / "replicas" / settings.replica
    fetcher = Fetcher(bucket, settings.run, cache / settings.run)
    loader = _Loader(settings)
    replica = Replica(
        _options(settings, loader.boot),
        fetcher,
        Watcher(fetcher, SystemClock(), settings.poll_s),
        loader.open_engine,
        SystemClock(),
        partial(_absent, bucket, settings.run),
    )
    routes = control_routes(replica)
    front = _Front(_starting(routes, keys))
    server = Server(front, taken)
    serving = asyncio.create_task(server.run_until(ending))
    starting = asyncio.create_task(replica.start())
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            front.app = create_app(
                replica,
                loader.tokenizer,
                keys,
                model_name=settings.model,
                extra_routes=routes,
                capacity=replica_capacity(
                    settings.slots, settings.max_waiting, settings.max_requests, settings.max_prompt_tokens
                ),
            )
        await serving
    finally:
        starting.cancel()
        server.stop()
        await asyncio.gather(starting, serving, return_exceptions=True)
        await replica.close()
        fetcher.close()


def _options(settings: ReplicaSettings, boot: BootId) -> ReplicaOptions:
    swaps = settings.swaps
    limits = ExchangeLimits(
        lease_s=swaps.lease_s,
        drain_s=swaps.drain_s,
        canary_s=swaps.canary_s,
        strict=swaps.strict,
        max_deltas=swaps.max_deltas,
    )
    return ReplicaOptions(
        replica=settings.replica,
        boot=boot,
        run=settings.run,
        exchange=limits,
        in_flight=swaps.in_flight,
        scrub_s=swaps.scrub_s,
        poll_s=settings.poll_s,
        reports=256,
    )


def _absent(bucket: Bucket, run: RunId) -> NotFoundError:
    """What there is in place of a run; where the bucket may not be listed, only that it isn't there."""
    try:
        return absent_run(bucket, run)
    except (AuthError, UnavailableError) as error:
        return NotFoundError(
            f"there is no run {run} in {bucket.url}", hint=f"its runs can't be listed: {error.message}"
        )


class _Loader:
    """Opens engines for the replica, and keeps the tokenizer that came with the anchor."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.boot = BootId(secrets.token_hex(8))
        self._settings = settings
        self._tokenizer: ChatTokenizer | None = None

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The anchor's; there once an engine is open."""
        if self._tokenizer is None:
            raise UnavailableError("the replica holds no anchor yet")
        return self._tokenizer

    async def open_engine(self, folder: Path, version: Version) -> TorchEngine:
        """See `slackwater.replica.boot.OpenEngine`."""
        settings = self._settings
        self._tokenizer = await asyncio.to_thread(
            ChatTokenizer, folder, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
        return await TorchEngine.open(
            folder,
            version=version,
            run=settings.run,
            replica=settings.replica,
            boot=self.boot,
            slots=settings.slots,
            batch_invariant=settings.batch_invariant,
            threads=settings.threads,
            window=settings.window,
            kv_tokens=settings.kv_tokens,
        )


class _Front:
    """One app until another is ready."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def _starting(routes: list[Route], keys: Keys) -> Starlette:
    """Health and control, before there is a model; everything else is refused as retryable."""

    async def refuse(request: Request) -> Response:
        raise UnavailableError(f"{request.url.path}: this replica is starting", hint="ask again in a moment")

    every: list[BaseRoute] = [*routes, Route("/{path:path}", refuse, methods=["GET", "POST"])]
    return Starlette(routes=every, middleware=[Middleware(KeyGate, keys)], exception_handlers=HANDLERS)
