"""The router over fakes: no token twice, no place lost, however a replica or a caller goes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from slackwater.errors import (
    CorruptError,
    InternalError,
    InvalidInputError,
    OverloadedError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.ids import ReplicaId, Version
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import CompletionRequest, PolicyConstraint
from slackwater.router.policy import Health
from slackwater.router.pool import ProbeReport
from slackwater.router.router import Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableAnswer, TableCompleter
from slackwater.testing.conformance_completer import MIXED, REQUEST, answer

A, B, C, D = (ReplicaId(name) for name in "abcd")
STREAMED = replace(REQUEST, streamed=True)
LOST = ReplicaLostError("gone")


class LocalReplica(TableCompleter):
    """A table completer that answers probes and can hold a request before it admits it."""

    def __init__(self, name: str, version: int = 7) -> None:
        super().__init__([[float(token) for token in range(8)]], versions=(version,), replica=name)
        self.probe_error: SlackwaterError | None = None
        self.status = "serving"
        self.stalls = False
        self.closed = False
        self.admits = asyncio.Event()
        self.admits.set()
        self.asked = asyncio.Event()

    async def probe(self) -> ProbeReport:
        if self.stalls:
            await asyncio.Event().wait()
        if self.probe_error is not None:
            raise self.probe_error
        return ProbeReport(status=self.status, version=self.versions[-1], window=self.window())

    async def complete(self, request: CompletionRequest) -> TableAnswer:
        self.asked.set()
        await self.admits.wait()
        return await super().complete(request)

    async def aclose(self) -> None:
        self.closed = True


Fleet = dict[ReplicaId, LocalReplica]


@pytest.fixture
async def fleet() -> Fleet:
    return {name: LocalReplica(name) for name in (A, B)}


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def router(fleet: Fleet, clock: ManualClock) -> AsyncIterator[Router]:
    async with Router(fleet, clock=clock) as opened:
        yield opened
        assert opened.statistics().in_flight == 0
    assert all(replica.closed and replica.active == 0 for replica in fleet.values())


async def test_an_answer_frees_its_place(router: Router, fleet: Fleet) -> None:
    whole = await answer(router, REQUEST)
    assert whole.finish is Finish.LENGTH
    assert whole.origin.replica == A
    assert not fleet[B].requests


async def test_a2_07_after_a_swap_a_replica_is_not_preferred_for_a_prompt_that_it_had_answered(
    router: Router, fleet: Fleet, clock: ManualClock
) -> None:
    """Its KV of the prompt is another version's: what the router may have hoped to find there is nothing now."""
    assert (await answer(router, REQUEST)).origin.replica == A
    fleet[A].versions = (8,)
    await clock.advance(2)
    assert (await answer(router, REQUEST)).origin.replica == B


async def test_cancelled_while_it_waits_for_admission(router: Router, fleet: Fleet) -> None:
    fleet[A].admits.clear()
    task = asyncio.create_task(answer(router, REQUEST))
    await fleet[A].asked.wait()
    assert router.in_flight(A) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.in_flight(A) == 0


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
async def test_cancelled_while_it_waits_for_a_token(
    router: Router, fleet: Fleet, request_: CompletionRequest, position: int
) -> None:
    fleet[A].hold(position=position)
    task = asyncio.create_task(answer(router, request_))
    await fleet[A].until_active(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (router.in_flight(A), fleet[A].active) == (0, 0)


async def test_cancelled_while_it_moves_to_another_replica(router: Router, fleet: Fleet) -> None:
    fleet[A].fail_after(0, LOST)
    fleet[B].admits.clear()
    task = asyncio.create_task(answer(router, STREAMED))
    await fleet[B].asked.wait()
    assert (router.in_flight(A), router.in_flight(B)) == (0, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.in_flight(B) == 0


@pytest.mark.parametrize("error", [LOST, OverloadedError("full"), UnavailableError("starting")])
async def test_a_replica_that_does_not_admit_is_replaced(router: Router, fleet: Fleet, error: SlackwaterError) -> None:
    fleet[A].admission_error = error
    assert (await answer(router, STREAMED)).origin.replica == B
    suspected = router.members()[A].health is Health.SUSPECT
    assert suspected == isinstance(error, ReplicaLostError)


@pytest.mark.parametrize("position", [0, 3])
async def test_a_whole_answer_that_fails_for_a_while_begins_again_and_its_replica_stays_good(
    router: Router, fleet: Fleet, position: int
) -> None:
    fleet[A].fail_after(position, UnavailableError("version 7 was taken back"))
    assert (await answer(router, REQUEST)).origin.replica == B
    assert (router.members()[A].health, router.statistics().losses) == (Health.GOOD, 0)
    assert router.statistics().retries == 1


async def test_a_stream_that_has_begun_ends_with_what_its_replica_says(router: Router, fleet: Fleet) -> None:
    fleet[A].fail_after(2, UnavailableError("version 7 was taken back"))
    under_way = await router.complete(STREAMED)
    steps = aiter(under_way)
    assert [(await anext(steps)).finish for _ in range(2)] == [None, None]
    with pytest.raises(UnavailableError, match="taken back"):
        await anext(steps)
    await under_way.aclose()
    assert (router.members()[A].health, router.statistics().losses, len(fleet[B].requests)) == (Health.GOOD, 0, 0)


async def test_an_answer_that_begins_again_has_nothing_of_the_first_try(router: Router, fleet: Fleet) -> None:
    fleet[A].kv, fleet[A].provisional = {0: MIXED}, range(3)
    fleet[A].fail_after(3, UnavailableError("version 7 was taken back"))
    whole = await answer(router, REQUEST)
    assert not any(step.kv or step.provisional for step in whole.steps)
    assert whole.origin.prompt_version == 7


async def test_attempts_are_bounded(fleet: Fleet, clock: ManualClock) -> None:
    fleet |= {name: LocalReplica(name) for name in (C, D)}
    for replica in fleet.values():
        replica.fail_after(0, LOST)
    async with Router(fleet, clock=clock) as router:
        with pytest.raises(ReplicaLostError):
            await answer(router, REQUEST)
        assert sum(len(replica.requests) for replica in fleet.values()) == 3


@pytest.mark.parametrize("error", [InvalidInputError("bad"), InternalError("bug"), CorruptError("torn")])
async def test_a7_08_a_bad_requests_answer_counts_against_nobody(
    router: Router, fleet: Fleet, error: SlackwaterError
) -> None:
    fleet[A].admission_error = error
    for _ in range(100):
        with pytest.raises(type(error)):
            await answer(router, replace(REQUEST, policy=PolicyConstraint(exact_version=Version(7))))
        fleet[B].admission_error = error
    assert {member.health for member in router.members().values()} == {Health.GOOD}
    assert router.statistics().losses == 0


async def test_a_replica_that_swapped_after_the_choice_is_passed_over(router: Router, fleet: Fleet) -> None:
    fleet[A].versions = (Version(8),)
    exact = replace(REQUEST, policy=PolicyConstraint(exact_version=Version(7)))
    assert (await answer(router, exact)).origin.replica == B
    fleet[B].versions = (Version(8),)
    with pytest.raises(PolicyUnmetError) as unmet:
        await answer(router, exact)
    assert unmet.value.versions == (8,)


async def test_a_refusal_names_the_versions_held(router: Router) -> None:
    with pytest.raises(PolicyUnmetError) as unmet:
        await router.complete(replace(REQUEST, policy=PolicyConstraint(min_version=Version(9))))
    assert unmet.value.versions == (7,)


async def test_a7_03_a_lost_replica_is_out_until_it_answers_a_probe(
    router: Router, fleet: Fleet, clock: ManualClock
) -> None:
    fleet[A].fail_after(0, LOST)
    assert (await answer(router, REQUEST)).origin.replica == B
    asked = len(fleet[A].requests)
    assert [(await answer(router, REQUEST)).origin.replica for _ in range(3)] == [B, B, B]
    assert len(fleet[A].requests) == asked
    fleet[A].fail_after(0, None)
    await clock.advance(0.6)
    assert router.members()[A].health is Health.GOOD
    assert (await answer(router, REQUEST)).origin.replica == A


async def test_a7_14_a_stalled_probe_fails_by_its_timeout(router: Router, fleet: Fleet, clock: ManualClock) -> None:
    fleet[A].stalls = True
    seen: list[Health] = []
    for _ in range(3):
        await clock.advance(0.5)
        await clock.advance(2.0)
        seen.append(router.members()[A].health)
    assert seen == [Health.GOOD, Health.GOOD, Health.EJECTED]
    fleet[A].stalls = False
    for _ in range(2):
        await clock.advance(0.5)
        seen.append(router.members()[A].health)
    assert seen[3:] == [Health.EJECTED, Health.GOOD]


async def test_ejection_ends_the_waits_for_a_replica_that_stopped(
    router: Router, fleet: Fleet, clock: ManualClock
) -> None:
    fleet[A].hold(position=2)
    asks = [asyncio.create_task(answer(router, REQUEST)) for _ in range(2)]
    await fleet[A].until_active(1)
    fleet[A].stalls = True
    await clock.advance(7.0)
    assert not asks[0].done()
    await clock.advance(0.5)
    assert router.members()[A].health is Health.EJECTED
    ends = [await ask for ask in asks]
    assert [[(span.replica, span.start, span.end) for span in end.replicas] for end in ends] == [
        [(A, 0, 2), (B, 2, 6)],
        [(B, 0, 6)],
    ]
    assert (router.in_flight(A), fleet[A].severs) == (0, 1)
    await clock.advance(10.0)
    assert fleet[A].severs == 1


async def test_replicas_come_and_go(router: Router, fleet: Fleet, clock: ManualClock) -> None:
    fleet[C] = LocalReplica(C)
    router.add(C, fleet[C])
    assert router.members()[C].health is Health.UNKNOWN
    await clock.advance(0.5)
    assert router.members()[C].health is Health.GOOD
    for name in (A, B):
        await router.remove(name)
    assert (await answer(router, REQUEST)).origin.replica == C
    assert "c: good" in repr(router)


async def test_a_window_is_the_smallest_that_replicas_tell(fleet: Fleet, clock: ManualClock) -> None:
    router = Router(fleet, clock=clock)
    with pytest.raises(UnavailableError):
        router.window()
    assert Router({}, window=12).window() == 12
    async with router:
        assert router.window() == 256


async def test_closing_early_aborts_and_a_closed_answer_gives_nothing(router: Router, fleet: Fleet) -> None:
    under_way = await router.complete(REQUEST)
    await under_way.aclose()
    assert under_way.finish is Finish.ABORT
    assert [step async for step in under_way] == []
    assert fleet[A].active == 0
