"""The gateway on a real socket: the API over a router, and what it says of its replicas."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import UnavailableError
from slackwater.ids import ReplicaId
from slackwater.router.app import create_gateway
from slackwater.router.pool import ProbeReport
from slackwater.router.router import Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
A = ReplicaId("a")


class LocalReplica(TableCompleter):
    """A table completer that answers probes."""

    closed = False
    status = "serving"

    async def probe(self) -> ProbeReport:
        return ProbeReport(status=self.status, version=self.versions[0], window=self.window())

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def replica() -> LocalReplica:
    return LocalReplica([[float(token % 7) for token in range(TINY_VOCAB)]])


@pytest.fixture
async def session(
    replica: LocalReplica, clock: ManualClock, tokenizer: ChatTokenizer
) -> AsyncIterator[aiohttp.ClientSession]:
    app = create_gateway(Router({A: replica}, clock=clock), tokenizer, KEYS, model_name="m")
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with Loopback(app) as server, aiohttp.ClientSession(server.url, headers=headers) as opened:
        yield opened
    assert replica.closed


async def test_replicas_are_listed_with_their_versions(session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/replicas") as reply:
        rows = (await reply.json())["replicas"]
    assert [(row["replica"], row["health"], row["version"], row["in_flight"]) for row in rows] == [("a", "good", 7, 0)]


async def test_a_gateway_answers_and_is_healthy_as_long_as_a_replica_serves(
    session: aiohttp.ClientSession, replica: LocalReplica, clock: ManualClock
) -> None:
    body = {"prompt": "x", "max_tokens": 3, "engine_data": True}
    async with session.post("/v1/completions", json=body) as reply:
        assert (await reply.json())["choices"][0]["engine_data"]["policy"] == [[7, 0, 3]]
    replica.status = "draining"
    await clock.advance(0.5)
    async with session.get("/health") as reply:
        assert await reply.json() == {"status": "no_replica", "replicas": 0}
    async with session.post("/v1/completions", json=body) as reply:
        assert reply.status == 503
        assert (await reply.json())["error"]["type"] == UnavailableError.kind
        assert reply.headers["Retry-After"] == "1"
