"""Apps on real loopback ports, and a client for them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from slackwater.api.auth import KeyGate, Keys
from slackwater.api.respond import HANDLERS

KEYS = Keys(inference="i", control="c")
CONTROL = {"Authorization": "Bearer c"}


def gated(routes: list[Route]) -> Starlette:
    """The routes behind the two keys, with the API's errors."""
    return Starlette(routes=routes, middleware=[Middleware(KeyGate, KEYS)], exception_handlers=HANDLERS)


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Client:
    """Calls one base URL; ``headers`` go with every call."""

    def __init__(self, session: aiohttp.ClientSession, base: str, headers: Mapping[str, str] | None = None) -> None:
        self._session = session
        self._base = base
        self._headers = dict(headers or {})

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.call("GET", path, headers=headers)

    async def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.call("POST", path, body, headers)

    async def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        sent = {**self._headers, **(headers or {})}
        async with self._session.request(method, self._base + path, data=data, headers=sent) as reply:
            return Reply(reply.status, await reply.read())


@asynccontextmanager
async def silent() -> AsyncGenerator[str]:
    """A port that accepts and never answers."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
