"""A5-10, A4-01: an answer that goes on elsewhere has every row once, wherever it was cut."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import pytest
from abort_rig import KEYS, SlowDoor, replica_app

from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import ReplicaLostError, UnavailableError
from slackwater.ids import ReplicaId
from slackwater.rollout.evidence import Completion
from slackwater.router.pool import ProbeReport
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableCompleter
from slackwater.testing.conformance_completer import REQUEST, answer
from slackwater.testing.loopback import Loopback
from slackwater.testing.routes import ROUTING, ScriptedRouter

A, B, C = (ReplicaId(name) for name in "abc")
SILENT: Final = ReplicaId("c")
LOST: Final = ReplicaLostError("gone")
TOKENS: Final = 6


class RoutedReplica(TableCompleter):
    """Answers probes; ``tells`` of its routers or doesn't."""

    def __init__(self, name: str, *, tells: bool = True) -> None:
        rows = [[((token * 5 + row) % 7) / 3 for token in range(8)] for row in range(3)]
        super().__init__(rows, replica=name, anchored=True, router=ScriptedRouter() if tells else None)

    async def probe(self) -> ProbeReport:
        return ProbeReport(status="serving", version=self.versions[0], window=self.window(), routing=self.routing())

    async def aclose(self) -> None:
        assert self.active == 0


@pytest.fixture
def fleet() -> dict[ReplicaId, RoutedReplica]:
    return {A: RoutedReplica("a"), B: RoutedReplica("b"), SILENT: RoutedReplica("c", tells=False)}


@pytest.fixture
async def router(fleet: dict[ReplicaId, RoutedReplica]) -> AsyncIterator[Router]:
    async with Router(fleet, clock=ManualClock()) as opened:
        yield opened


def rows(made: Completion) -> bytes:
    return b"".join(step.routes or b"" for step in made.steps)


@pytest.mark.parametrize("start", range(len(REQUEST.prompt_ids)))
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("cut", range(TOKENS + 1))
async def test_rows_join_without_a_gap_or_a_second_row(
    router: Router, fleet: dict[ReplicaId, RoutedReplica], *, cut: int, streamed: bool, start: int
) -> None:
    request = replace(REQUEST, streamed=streamed, routes_from=start, forced_routes=ScriptedRouter().rows([7, 7]))
    await router.remove(SILENT)
    undisturbed = await answer(fleet[A], request)
    fleet[A].fail_after(cut, LOST)
    made = await answer(router, request)
    assert [span.end for span in made.replicas] == sorted({cut, TOKENS} - {0})
    assert made.token_ids == undisturbed.token_ids
    assert rows(made) == rows(undisturbed)
    assert len(rows(made)) == (len(REQUEST.prompt_ids) + TOKENS - 1 - start) * ROUTING.row_bytes
    # Each token tells of the positions right before it.
    counts = [len(step.routes or b"") // ROUTING.row_bytes for step in made.steps]
    assert counts == [len(REQUEST.prompt_ids) - start, *[1] * (TOKENS - 1)]


async def test_what_the_replicas_agree_on_is_what_routers_choose_from(
    router: Router, fleet: dict[ReplicaId, RoutedReplica]
) -> None:
    assert router.routing() == ROUTING
    for name in (A, B):
        fleet[name].router = None
        await router.probe(name)
    assert router.routing() is None
    fleet[A].router = ScriptedRouter()
    fleet[B].router = ScriptedRouter(routing=replace(ROUTING, experts=13))
    for name in (A, B):
        await router.probe(name)
    assert router.routing() is None


@pytest.mark.parametrize("cut", range(1, TOKENS))
async def test_rows_that_the_first_replica_did_not_tell_are_not_asked_of_the_next(
    router: Router, fleet: dict[ReplicaId, RoutedReplica], cut: int
) -> None:
    """Its routers might choose otherwise than those that made the tokens."""
    await router.remove(B)
    fleet[SILENT].fail_after(cut, LOST)
    made = None
    while made is None or made.origin.replica != SILENT:
        made = await answer(router, replace(REQUEST, routes_from=0))
    assert [step.routes is None for step in made.steps] == [True] * cut + [False] * (TOKENS - cut)
    assert len(rows(made)) == (TOKENS - cut) * ROUTING.row_bytes


async def test_a_replica_that_tells_of_no_routers_is_not_asked_to_force_routes(tokenizer: ChatTokenizer) -> None:
    """One that is older than the field would ignore it."""
    table = SlowDoor()
    forced = replace(REQUEST, forced_routes=ScriptedRouter().rows([7]))
    async with Loopback(replica_app(table, tokenizer)) as server:
        remote = RemoteReplica(server.url, KEYS.inference)
        await remote.probe()
        with pytest.raises(UnavailableError):
            await remote.complete(forced)
        assert not table.requests
        table.router = ScriptedRouter()
        await remote.probe()
        assert len((await answer(remote, forced)).steps) == TOKENS
        await remote.aclose()
