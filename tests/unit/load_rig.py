"""A replica's app with few places, on a real socket, over a table engine that can be held between two steps."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from replica_rig import Rig
from starlette.types import ASGIApp

from slackwater.api.admission import replica_capacity
from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.replica.app import control_routes
from slackwater.testing.engine import TableEngine
from slackwater.testing.loopback import Loopback

KEYS: Final = Keys(inference="inference-key", control="control-key")
SLOTS: Final = 4
"""Of a table engine."""
WAITING: Final = 2
PLACES: Final = SLOTS + WAITING
TEXT: Final = "/v1/completions"
IDS: Final[Mapping[str, object]] = {"prompt": [1, 2, 3], "seed": 5, "max_tokens": 3, "return_token_ids": True}
HI: Final[Mapping[str, object]] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 5}


class Counted(ChatTokenizer):
    """Counts the prompts that it makes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.made = 0

    def encode(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        self.made += 1
        return super().encode(*args, **kwargs)

    def render(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        self.made += 1
        return super().render(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A reply."""

    status: int
    body: bytes
    retry_after: str | None

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json()["error"]["code"]

    @property
    def ids(self) -> list[list[int]]:
        return [choice["token_ids"] for choice in self.json()["choices"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """The app and what is behind it."""

    rig: Rig
    tokenizer: Counted
    session: aiohttp.ClientSession
    url: str

    @property
    def engine(self) -> TableEngine:
        return self.rig.engine

    @property
    def load(self) -> int:
        """Answers that the engine has."""
        return self.engine.stats().active + self.engine.stats().waiting

    async def post(self, path: str, body: Mapping[str, object]) -> Told:
        async with self.session.post(path, data=json.dumps(body)) as reply:
            return Told(status=reply.status, body=await reply.read(), retry_after=reply.headers.get("Retry-After"))


def busy_app(rig: Rig, tokenizer: ChatTokenizer, max_waiting: int = WAITING) -> ASGIApp:
    """A replica's own app, as its process makes it."""
    return create_app(
        rig.replica,
        tokenizer,
        KEYS,
        model_name="m",
        extra_routes=control_routes(rig.replica),
        capacity=replica_capacity(SLOTS, max_waiting, 1024),
    )


@asynccontextmanager
async def busy(folder: Path, tokenizer: Counted) -> AsyncGenerator[Busy]:
    """A replica at version 0, with `PLACES`."""
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with AsyncExitStack() as stack:
        rig = Rig(folder)
        stack.push_async_callback(rig.close)
        await rig.start()
        server = await stack.enter_async_context(Loopback(busy_app(rig, tokenizer)))
        everyone = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(server.url, headers=headers, connector=everyone)
        )
        stack.callback(rig.engine.release)
        yield Busy(rig=rig, tokenizer=tokenizer, session=session, url=server.url)
