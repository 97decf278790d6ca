"""Every Completer keeps the same contract: the table itself, and a router over real replicas on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.respond import json_reply
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import CorruptError, ReplicaLostError, SlackwaterError, UnavailableError
from slackwater.ids import ReplicaId, Version
from slackwater.rollout.evidence import PolicySpan
from slackwater.rollout.request import SamplingSpec
from slackwater.router.policy import Health
from slackwater.router.pool import FAILURES_TO_EJECT
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import PROBE_TIMEOUT_S, Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableCompleter
from slackwater.testing.conformance_completer import REQUEST, CompleterTests, PassingOnTests, answer
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
ROWS = [[((token * 7 + position * 3) % 11) / 4 for token in range(12)] for position in range(5)]
WINDOW = 4096
"""So large that the KV spans of a prompt may be too many for one line between processes."""
A, B = ReplicaId("a"), ReplicaId("b")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One replica of the fleet."""

    completer: TableCompleter
    server: Loopback


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Two replicas behind a router."""

    router: Router
    a: Served
    b: Served


def replica_app(completer: TableCompleter, tokenizer: ChatTokenizer) -> ASGIApp:
    async def health(request: Request) -> Response:
        del request
        return json_reply(
            {
                "status": "serving",
                "version": completer.versions[-1],
                "window": completer.window(),
                "boot_id": "x",
                "routing": completer.routing(),
            }
        )

    routes = [Route("/health", health)]
    return create_app(completer, tokenizer, KEYS, model_name="m", extra_routes=routes)


@pytest.fixture
async def fleet(tokenizer: ChatTokenizer) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        served: list[Served] = []
        for name in (A, B):
            completer = TableCompleter(ROWS, window=WINDOW, anchored=True, replica=name)
            server = await stack.enter_async_context(Loopback(replica_app(completer, tokenizer)))
            served.append(Served(completer=completer, server=server))
        a, b = served
        remotes = {
            name: RemoteReplica(one.server.url, KEYS.inference) for name, one in zip((A, B), served, strict=True)
        }
        router = await stack.enter_async_context(Router(remotes, probe_interval_s=0.05))
        yield Fleet(router=router, a=a, b=b)


class TestTableCompleter(CompleterTests, PassingOnTests):
    @pytest.fixture
    async def completer(self) -> TableCompleter:
        return TableCompleter(ROWS, window=WINDOW, anchored=True)

    @pytest.fixture
    async def tables(self, completer: TableCompleter) -> list[TableCompleter]:
        return [completer]


class TestRouterOverLoopback(CompleterTests, PassingOnTests):
    @pytest.fixture
    async def completer(self, fleet: Fleet) -> Router:
        return fleet.router

    @pytest.fixture
    async def tables(self, fleet: Fleet) -> list[TableCompleter]:
        return [fleet.a.completer, fleet.b.completer]


async def test_nothing_is_lost_on_the_way(fleet: Fleet) -> None:
    forced = replace(REQUEST, forced_ids=(1, 11), sampling=replace(REQUEST.sampling, top_k=2))
    for request in (REQUEST, forced):
        there, here = await answer(fleet.router, request), await answer(fleet.a.completer, request)
        assert there.steps == here.steps
        assert replace(there.origin, replica=A) == replace(here.origin, replica=A)


async def test_a5_05_closing_a_remote_answer_frees_the_replica(fleet: Fleet) -> None:
    fleet.a.completer.hold(position=1)
    fleet.b.completer.hold(position=1)
    under_way = await fleet.router.complete(replace(REQUEST, streamed=True))
    async for _ in under_way:
        break
    await under_way.aclose()
    await asyncio.wait_for(fleet.a.completer.until_active(0), 2)
    await asyncio.wait_for(fleet.b.completer.until_active(0), 2)


async def test_a7_03_a_killed_replicas_answers_go_on_elsewhere(fleet: Fleet) -> None:
    fleet.a.completer.hold(position=3)
    asks = [asyncio.create_task(answer(fleet.router, REQUEST)) for _ in range(6)]
    await fleet.a.completer.until_active(3)
    fleet.a.server.kill()
    wholes = await asyncio.gather(*asks)
    assert {whole.token_ids for whole in wholes} == {(await answer(fleet.b.completer, REQUEST)).token_ids}
    shares = {tuple((span.replica, span.start, span.end) for span in whole.replicas) for whole in wholes}
    assert shares <= {((A, 0, made), (B, made, 6)) for made in range(1, 4)} | {((B, 0, 6),)}
    assert fleet.router.members()[A].health is not Health.GOOD
    assert (await answer(fleet.router, REQUEST)).origin.replica == B
    assert fleet.router.statistics().in_flight == 0
    fleet.a.completer.release()


async def test_a7_07_resets_eject_nobody_and_requests_succeed(fleet: Fleet) -> None:
    failures: list[SlackwaterError] = []

    async def ask(seed: int) -> None:
        try:
            await answer(fleet.router, replace(REQUEST, sampling=SamplingSpec(max_tokens=6, seed=seed)))
        except SlackwaterError as error:
            failures.append(error)

    for wave in range(6):
        asks = [asyncio.create_task(ask(wave * 8 + seed)) for seed in range(8)]
        (fleet.a, fleet.b)[wave % 2].server.reset()
        await asyncio.gather(*asks)
    assert failures == []
    assert Health.EJECTED not in {member.health for member in fleet.router.members().values()}


async def test_a_dead_address_is_a_lost_replica(fleet: Fleet) -> None:
    fleet.b.server.kill()
    remote = RemoteReplica(fleet.b.server.url, KEYS.inference)
    try:
        with pytest.raises(ReplicaLostError):
            await remote.complete(REQUEST)
        with pytest.raises(ReplicaLostError):
            await remote.probe()
    finally:
        await remote.aclose()


@dataclass(kw_only=True, slots=True)
class Freezer:
    """An app that takes requests and, while it is frozen, never answers them: what a stopped process looks like."""

    app: ASGIApp
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.asked.set()
            await self.thawed.wait()
        await self.app(scope, receive, send)


@dataclass(frozen=True, kw_only=True, slots=True)
class Freezing:
    """A router over A, which can be frozen, and B. Nothing is probed but by `eject`."""

    router: Router
    a: TableCompleter
    remote: RemoteReplica
    freezer: Freezer
    clock: ManualClock

    def freeze(self) -> None:
        self.freezer.thawed.clear()
        self.freezer.asked.clear()

    async def eject(self) -> None:
        for _ in range(FAILURES_TO_EJECT):
            self.freezer.asked.clear()
            probe = asyncio.create_task(self.router.probe(A))
            await self.freezer.asked.wait()
            await self.clock.advance(PROBE_TIMEOUT_S)
            await probe
        assert self.router.members()[A].health is Health.EJECTED


@pytest.fixture
async def freezing(tokenizer: ChatTokenizer) -> AsyncIterator[Freezing]:
    a, b = (TableCompleter(ROWS, window=64, anchored=True, replica=name) for name in (A, B))
    freezer, clock = Freezer(app=replica_app(a, tokenizer)), ManualClock()
    freezer.thawed.set()
    async with Loopback(freezer) as frozen, Loopback(replica_app(b, tokenizer)) as other:
        remotes = {A: RemoteReplica(frozen.url, KEYS.inference), B: RemoteReplica(other.url, KEYS.inference)}
        async with Router(remotes, clock=clock, probe_interval_s=1e9) as router:
            yield Freezing(router=router, a=a, remote=remotes[A], freezer=freezer, clock=clock)
            assert router.statistics().in_flight == 0
        freezer.thawed.set()
        a.release()


async def test_a_request_that_a_frozen_replica_never_admits_goes_elsewhere(freezing: Freezing) -> None:
    freezing.freeze()
    ask = asyncio.create_task(answer(freezing.router, REQUEST))
    await freezing.freezer.asked.wait()
    assert freezing.router.in_flight(A) == 1
    await freezing.eject()
    assert (await asyncio.wait_for(ask, 5)).origin.replica == B


async def test_an_answer_that_a_frozen_replica_never_ends_goes_on_elsewhere(freezing: Freezing) -> None:
    freezing.a.hold(position=3)
    ask = asyncio.create_task(answer(freezing.router, REQUEST))
    await freezing.a.until_active(1)
    freezing.freeze()
    await freezing.eject()
    assert (await asyncio.wait_for(ask, 5)).replicas[-1].replica == B
    assert len(freezing.a.requests) == 1
    await asyncio.wait_for(freezing.a.until_active(0), 5)


async def test_a5_10_a_stream_of_a_frozen_replica_goes_on_elsewhere(freezing: Freezing) -> None:
    freezing.a.hold(position=1)
    under_way = await freezing.router.complete(replace(REQUEST, streamed=True))
    steps = aiter(under_way)
    first = await anext(steps)
    stuck = asyncio.ensure_future(anext(steps))
    freezing.freeze()
    await freezing.eject()
    second = await asyncio.wait_for(stuck, 5)
    seen = [first, second, *[step async for step in steps]]
    await under_way.aclose()
    assert second.moved is not None
    assert (under_way.origin.replica, second.moved.replica) == (A, B)
    freezing.a.release()
    assert tuple(step.token_id for step in seen) == (await answer(freezing.a, REQUEST)).token_ids


async def test_a_loss_between_the_last_token_and_the_end_loses_nothing() -> None:
    async def cut(request: Request) -> Response:
        del request
        origin = '{"type":"origin","replica":"a","boot":"x","run":"demo","seed":1}\n'
        return Response(origin + '{"type":"token","token_id":1,"logprob":-1.0,"version":7,"finish":"length"}\n')

    async with Loopback(Starlette(routes=[Route("/v1/generate", cut, methods=["POST"])])) as server:
        remote = RemoteReplica(server.url, KEYS.inference)
        try:
            whole = await answer(remote, REQUEST)
        finally:
            await remote.aclose()
    assert (whole.token_ids, whole.finish) == ((1,), "length")


async def test_a5_10_a_replica_behind_two_gateways_is_named_by_both(fleet: Fleet, tokenizer: ChatTokenizer) -> None:
    for table in (fleet.a.completer, fleet.b.completer):
        table.fail_after(2, ReplicaLostError("gone"))

    def health(request: Request) -> Response:
        del request
        return json_reply({"status": "serving", "version": 7, "window": WINDOW})

    app = create_app(fleet.router, tokenizer, KEYS, model_name="m", extra_routes=[Route("/health", health)])
    async with Loopback(app) as server:
        remote = RemoteReplica(server.url, KEYS.inference)
        try:
            under_way = await remote.complete(replace(REQUEST, streamed=True))
            steps = aiter(under_way)
            seen = [await anext(steps) for _ in range(3)]
            await under_way.aclose()
        finally:
            await remote.aclose()
    moved = seen[2].moved
    assert moved is not None
    assert {under_way.origin.replica, moved.replica} == {A, B}
    assert seen[2].kv == (PolicySpan(version=Version(7), start=0, end=5),)


async def test_a_severed_replica_answers_later_calls(freezing: Freezing) -> None:
    under_way = await freezing.remote.complete(REQUEST)
    for _ in range(2):
        freezing.remote.sever()
    with pytest.raises(ReplicaLostError):
        _ = [step async for step in under_way]
    await under_way.aclose()
    assert (await answer(freezing.remote, REQUEST)).origin.replica == A


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_whose_version_is_taken_back_is_asked_for_elsewhere_unless_it_was_seen(
    fleet: Fleet, *, streamed: bool
) -> None:
    fleet.a.completer.fail_after(3, UnavailableError("version 7 was taken back", hint="ask again"))
    asks = [replace(REQUEST, streamed=streamed)] * 2
    ends = await asyncio.gather(*(answer(fleet.router, ask) for ask in asks), return_exceptions=True)
    failed = [end for end in ends if isinstance(end, BaseException)]
    assert [type(end) for end in failed] == [UnavailableError] * streamed
    assert {end.origin.replica for end in ends if not isinstance(end, BaseException)} == {B}
    assert len(fleet.a.completer.requests) == 1
    assert {member.health for member in fleet.router.members().values()} == {Health.GOOD}
    assert (fleet.router.statistics().losses, fleet.router.statistics().in_flight) == (0, 0)


HOSTILE_KV = (
    "[[7,1,3]]",
    "[[7,0,2]]",
    "[[7,0,4]]",
    "[[7,0,1],[8,2,3]]",
    "[[7,0,3],[8,3,3]]",
    "[[7,0,2],[8,1,3]]",
    "[[7,-1,3]]",
    "[[-7,0,3]]",
    "[[99999999999999999999999,0,3]]",
    "[[7,0,99999999999999999999999]]",
    "[[7,0,1],[7,1,2],[7,2,3],[7,3,4]]",
    "[[7,0]]",
    "[[7,0,3.5]]",
    "7",
)


@pytest.mark.parametrize("kv", HOSTILE_KV)
@pytest.mark.parametrize("ahead", [False, True])
async def test_kv_spans_of_a_replica_that_cannot_be_are_corrupt(kv: str, *, ahead: bool) -> None:
    spans = f'{{"type":"kv","spans":{kv}}}\n' if ahead else ""
    token = {"type": "token", "token_id": 1, "logprob": 0.0, "version": 7}

    async def lying(request: Request) -> Response:
        del request
        first = '{"type":"origin","replica":"a","boot":"x","run":"demo","seed":1}\n'
        last = json.dumps(token)[:-1] + ("" if ahead else f',"kv":{kv}') + "}\n"
        return Response(first + spans + last + '{"type":"end","finish":"length"}\n')

    async with Loopback(Starlette(routes=[Route("/v1/generate", lying, methods=["POST"])])) as server:
        remote = RemoteReplica(server.url, KEYS.inference)
        try:
            with pytest.raises(CorruptError):
                await answer(remote, REQUEST)
        finally:
            await remote.aclose()
