"""An app with its aborts on a real socket: over a table, and behind a gateway."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.respond import json_reply
from slackwater.api.tokens import ChatTokenizer
from slackwater.ids import ReplicaId
from slackwater.router.app import create_gateway
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.routes import ScriptedRouter
from slackwater.testing.tiny_model import TINY_VOCAB

KEYS = Keys(inference="inference-key", control="control-key")
ROWS = [[((token * 31 + position * 17) % 97) / 12 for token in range(TINY_VOCAB)] for position in range(9)]
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True})
TEXT = ("/v1/completions", {"prompt": [1, 2, 3], "logprobs": 0})
SHOWN: Mapping[str, object] = {"max_tokens": 200, "seed": 1, "return_token_ids": True, "engine_data": True}
"""Fields that show all of an answer, which has 200 tokens where nobody ends it."""


class SlowDoor(TableCompleter):
    """A table that may keep requests waiting for their admission."""

    def __init__(self, router: ScriptedRouter | None = None) -> None:
        super().__init__(ROWS, router=router)
        self.knocked = asyncio.Semaphore(0)
        self.opened = asyncio.Event()
        self.opened.set()

    async def complete(self, request: Any) -> Any:
        self.knocked.release()
        await self.opened.wait()
        return await super().complete(request)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where requests are sent to, and the table that answers them."""

    session: aiohttp.ClientSession
    table: SlowDoor
    router: Router | None = None

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.post(path, data=json.dumps(body).encode()) as reply:
            return reply.status, json.loads(await reply.read())

    async def events(self, path: str, body: Mapping[str, object]) -> list[Any]:
        """The events of a stream; the last one is the word ``[DONE]``."""
        async with self.session.post(path, json={**body, "stream": True}) as reply:
            text = (await reply.read()).decode()
        *parts, rest = [part.removeprefix("data: ") for part in text.split("\n\n")]
        assert rest == ""
        return [part if part == "[DONE]" else json.loads(part) for part in parts]

    async def held(self, answers: int = 1) -> None:
        """Return once so many answers wait, each further than one token, and what was made of them has arrived."""
        await self.table.until_waiting(answers)
        assert (await self.post(TEXT[0], {**TEXT[1], "max_tokens": 1}))[0] == 200

    async def abort(self, name: object) -> tuple[int, Any]:
        return await self.post("/v1/abort", {"request_id": name})


def replica_app(table: TableCompleter, tokenizer: ChatTokenizer) -> ASGIApp:
    async def health(request: Request) -> Response:
        del request
        told = {"window": table.window(), "routing": table.routing()}
        return json_reply({"status": "serving", "version": 7, "boot_id": "x", **told})

    return create_app(table, tokenizer, KEYS, model_name="m", extra_routes=[Route("/health", health)])


@asynccontextmanager
async def site(
    tokenizer: ChatTokenizer, *, gateway: bool, routed: ScriptedRouter | None = None
) -> AsyncGenerator[Site]:
    """A replica's API, or that of a gateway before it; ``routed`` gives the model its routers."""
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with AsyncExitStack() as stack:
        table, router = SlowDoor(routed), None
        server = await stack.enter_async_context(Loopback(replica_app(table, tokenizer)))
        if gateway:
            router = Router({ReplicaId("a"): RemoteReplica(server.url, KEYS.inference)})
            server = await stack.enter_async_context(Loopback(create_gateway(router, tokenizer, KEYS, model_name="m")))
        everyone = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(server.url, headers=headers, connector=everyone)
        )
        yield Site(session=session, table=table, router=router)
        table.opened.set()
        table.release()
