"""A4-09: very long routes are answered, and others are answered meanwhile."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api import routed, serving
from slackwater.api.app import create_app
from slackwater.api.arrays import joined
from slackwater.api.auth import Keys
from slackwater.api.respond import json_reply
from slackwater.api.tokens import ChatTokenizer
from slackwater.ids import ReplicaId
from slackwater.rollout.routes import Routing
from slackwater.router.app import create_gateway
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.routes import ScriptedRouter
from slackwater.testing.tiny_model import write_tiny_tokenizer

KEYS: Final = Keys(inference="inference-key", control="control-key")
HEADERS: Final = {"Authorization": f"Bearer {KEYS.inference}"}
POSITIONS: Final = 65_536
LONG: Final = 1024 * 1024
LARGE: Final = ScriptedRouter(routing=Routing(layers=tuple(range(48)), experts=128, per_token=8))
BODY: Final = {
    "prompt": [position % 8 for position in range(POSITIONS)],
    "max_tokens": 1,
    "engine_data": {"routed_experts": True},
}
OTHER: Final = {"prompt": [1], "max_tokens": 1}


@pytest.fixture
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    tokenizer = ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    table = TableCompleter([[0.0] * 8], window=POSITIONS + 8, router=LARGE)

    async def health(request: Request) -> Response:
        del request
        told = {"window": table.window(), "routing": table.routing()}
        return json_reply({"status": "serving", "version": 7, "boot_id": "x", **told})

    extra = [Route("/health", health)]
    async with Loopback(create_app(table, tokenizer, KEYS, model_name="m", extra_routes=extra)) as replica:
        router = Router({ReplicaId("a"): RemoteReplica(replica.url, KEYS.inference)})
        async with Loopback(create_gateway(router, tokenizer, KEYS, model_name="m")) as gateway:
            yield gateway.url


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether what is long was made in the thread of the event loop."""
    loops: set[bool] = set()
    loop_thread = threading.current_thread()

    def watched(work: Callable[[Any], Any], size: Callable[[Any], int]) -> Callable[[Any], Any]:
        def made(given: Any) -> Any:
            result = work(given)
            if size(result) > LONG:
                loops.add(threading.current_thread() is loop_thread)
            return result

        return made

    monkeypatch.setattr(routed, "joined", watched(joined, len))
    monkeypatch.setattr(serving, "json_reply", watched(json_reply, lambda reply: len(reply.body)))
    return loops


async def test_a4_09_long_routes_are_made_in_a_thread_and_others_go_on(
    url: str, makers: set[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        alone = [await _timed(session, url) for _ in range(20)]
        begun = time.perf_counter()
        long = asyncio.ensure_future(_read(session, url, BODY))
        meanwhile: list[float] = []
        while not long.done():
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 200
            meanwhile.append(await _timed(session, url))
        data = await long
        took = time.perf_counter() - begun
    with capsys.disabled():
        shown = f"{took:.2f} s; others at most {max(meanwhile) * 1e3:.0f} ms, alone {max(alone) * 1e3:.0f} ms"
        print(f"\n{POSITIONS} x 48 x 8: {shown}")  # noqa: T201 - a measure for whoever reads
    told = json.loads(data)["choices"][0]["engine_data"]["routed_experts"]
    assert told["shape"] == [POSITIONS, 48, 8]
    assert base64.b64decode(told["data"]) == LARGE.rows(BODY["prompt"])  # type: ignore[arg-type]
    assert makers == {False}
    assert len(meanwhile) > 3


async def _read(session: aiohttp.ClientSession, url: str, body: object) -> bytes:
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200
        return await reply.read()


async def _timed(session: aiohttp.ClientSession, url: str) -> float:
    begun = time.perf_counter()
    await _read(session, url, OTHER)
    return time.perf_counter() - begun
