"""A rank of an engine's group dies: the whole group is out at once, says nothing more, and returns as one version."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import aiohttp
import pytest
from http_rig import Client, gated
from replica_rig import request
from routed_rig import Routed
from stamp_rig import Lineage, World, turns

from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, UnavailableError
from slackwater.ids import ReplicaId, Version
from slackwater.replica.app import control_routes
from slackwater.replica.status import State
from slackwater.replica.swap import Stage
from slackwater.rollout.evidence import Finish
from slackwater.router.policy import Candidate, Health, Refusal, RoutingContext, choose
from slackwater.router.pool import SERVING
from slackwater.router.router import PROBE_INTERVAL_S, Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.conformance_completer import answer
from slackwater.testing.history import answers, check
from slackwater.testing.loopback import Loopback
from slackwater.testing.stamp import weights_mark

WRITES: Final = 3
"""Of a swap between any two versions: one a tensor."""
V1: Final = Version(1)

pytestmark = pytest.mark.usefixtures("inline_threads")

OpenWorld = Callable[[], Awaitable[World]]


@pytest.fixture
async def opened(lineage: Lineage) -> AsyncIterator[OpenWorld]:
    """Gives a world with three answers under way, the third of which waits for a slot."""
    worlds: list[World] = []

    async def open_world() -> World:
        worlds.append(await World(lineage).start())
        for number in range(3):
            await worlds[-1].ask((1, 2, number), 30)
        worlds[-1].engine.release(5)
        await turns(100)
        worlds[-1].publish()
        return worlds[-1]

    yield open_world
    for world in worlds:
        await world.close()


async def reaches(world: World, stage: Stage) -> None:
    """Wait until the swap under way is at a stage."""
    async with asyncio.timeout(20):
        while world.replica.status().stage is not stage:
            await turns(1)


async def died(world: World) -> None:
    """Wait for the death, and look at the replica in the very turn in which it happens."""
    async with asyncio.timeout(20):
        while not world.engine.stats().failure:
            await turns(1)
    assert world.replica.state is State.RETIRED
    with pytest.raises(UnavailableError):
        await world.replica.complete(request())


async def is_out(world: World, *, tokens: int) -> None:
    """Whatever is done now: no further token comes, every answer has ended as lost, and nothing is taken any more."""
    world.engine.release()
    await turns(200)
    await world.ask((1, 2, 3), 4)
    with pytest.raises(ConflictError):
        await world.replica.set_target("head")
    with pytest.raises(ConflictError):
        await world.replica.weights_digest()
    status = world.replica.status()
    assert (status.state, status.in_flight) == (State.RETIRED, 0)
    assert status.last_error is not None
    assert (status.last_error.kind, "a rank died" in status.last_error.message) == ("unavailable", True)
    assert "replica-drive" not in status.last_error.message  # its own task ended as it should
    whole = answers(world.log)
    assert [[end.error for end in one.ends] for one in whole] == [["replica_lost"]] * 3
    assert sum(len(one.steps) for one in whole) == tokens


async def returns(world: World, lineage: Lineage) -> None:
    """Started again, it serves one version, whose bits are the manifest's, and the history breaks no promise."""
    await world.kill()
    assert world.replica.state is State.SERVING
    assert await world.replica.weights_digest() == (V1, lineage.fetcher.manifest(V1).state)
    await world.ask((1, 2, 3), 8)
    await world.heal()
    *_, last = answers(world.log)
    assert [step.version for step in last.steps] == [V1] * 8
    assert check(world.log) == ()


def is_half(world: World, lineage: Lineage) -> bool:
    return world.engine.mark not in {weights_mark(lineage.truth[version]) for version in (0, 1)}


@pytest.mark.parametrize("in_flight", [InFlight.CONTINUE, InFlight.RECOMPUTE, InFlight.ABORT])
@pytest.mark.parametrize("write", range(WRITES + 1))
async def test_f32_a_rank_that_dies_in_the_copy_takes_its_whole_group_out_until_it_is_started_again(
    opened: OpenWorld, lineage: Lineage, write: int, in_flight: InFlight
) -> None:
    world = await opened()
    world.engine.faults.commit_dies_at_write = write
    world.steer(V1, in_flight)
    await died(world)
    assert is_half(world, lineage) == (0 < write < WRITES)
    await is_out(world, tokens=10)
    assert {step.version for one in answers(world.log) for step in one.steps} == {Version(0)}
    assert (world.replica.status().stage, world.replica.status().version) == (Stage.RETIRED, Version(0))
    await returns(world, lineage)


async def test_f32_a_commit_that_ends_as_unavailable_is_not_trusted_even_before_the_death_is_known(
    opened: OpenWorld, lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise UnavailableError("a rank died, it seems")

    world = await opened()
    monkeypatch.setattr(world.engine, "commit", lost)
    world.steer(V1)
    await reaches(world, Stage.RETIRED)
    assert (world.replica.state, world.engine.stats().failure) == (State.RETIRED, "")
    world.engine.release()
    await turns(200)
    whole = answers(world.log)
    assert [(len(one.steps), one.ends[0].finish) for one in whole] == [(5, Finish.ABORT)] * 2 + [(0, Finish.ABORT)]
    await returns(world, lineage)


async def test_f32_a_rank_that_dies_as_the_last_answers_have_drained_takes_its_group_out(
    opened: OpenWorld, lineage: Lineage
) -> None:
    world = await opened()
    world.engine.faults.commit_dies_at_write = 1
    world.steer(V1, InFlight.DRAIN)
    await reaches(world, Stage.DRAINING)
    world.engine.release()
    await died(world)
    await turns(10)
    assert is_half(world, lineage)
    whole = answers(world.log)
    assert [(len(one.steps), one.ends[0].error) for one in whole] == [(30, ""), (30, ""), (0, "replica_lost")]
    await returns(world, lineage)


@pytest.mark.parametrize("write", range(WRITES + 1))
async def test_f32_a_rank_that_dies_in_a_roll_back_takes_its_whole_group_out(
    opened: OpenWorld, lineage: Lineage, write: int
) -> None:
    world = await opened()
    world.steer(V1)
    await turns(200)
    assert world.replica.status().version == V1
    world.engine.faults.undo_dies_at_write = write
    world.roll_back()
    await died(world)
    assert is_half(world, lineage) == (0 < write < WRITES)
    await is_out(world, tokens=10)
    assert world.replica.status().stage is Stage.RETIRED
    await returns(world, lineage)


@pytest.mark.parametrize("write", range(WRITES + 1))
async def test_f32_a_rank_that_dies_as_spoilt_weights_are_taken_back_leaves_no_token_of_them_unmarked(
    opened: OpenWorld, lineage: Lineage, write: int
) -> None:
    world = await opened()
    world.engine.faults.flip_bit = True
    world.engine.faults.undo_dies_at_write = write
    world.steer(V1)
    await reaches(world, Stage.COMMITTING)
    world.engine.release()
    await died(world)
    await turns(10)
    steps = [step for one in answers(world.log) for step in one.steps]
    assert {step.provisional for step in steps if step.version == 1} == {True}
    await is_out(world, tokens=len(steps))
    await returns(world, lineage)


async def test_f32_a_rank_that_dies_between_commit_and_verification_confirms_nothing(
    opened: OpenWorld, lineage: Lineage
) -> None:
    world = await opened()
    world.steer(V1)
    await reaches(world, Stage.COMMITTING)
    world.engine.release()
    await reaches(world, Stage.VERIFYING)
    world.engine.die("a rank died")
    await died(world)
    await turns(10)
    steps = [step for one in answers(world.log) for step in one.steps]
    assert {step.provisional for step in steps if step.version == 1} == {True}
    await is_out(world, tokens=len(steps))
    await returns(world, lineage)


async def test_f32_a_rank_may_die_at_any_moment_of_a_swap(opened: OpenWorld, lineage: Lineage) -> None:
    stages: set[Stage] = set()
    for point in range(40):
        world = await opened()
        world.engine.release(20)
        world.steer(V1)
        await turns(point)
        stages.add(world.replica.status().stage)
        world.engine.die("a rank died")
        await died(world)
        await turns(10)
        await is_out(world, tokens=sum(len(one.steps) for one in answers(world.log)))
        await returns(world, lineage)
    assert stages >= {Stage.IDLE, Stage.PREPARING, Stage.COMMITTING, Stage.VERIFYING}


@pytest.mark.parametrize("write", range(WRITES + 1))
async def test_f32_a_rank_that_dies_before_the_group_first_serves_ends_the_start(lineage: Lineage, write: int) -> None:
    world = World(lineage)
    world.publish()
    starting = asyncio.ensure_future(world.start())
    while not world.opened:
        await turns(1)
    world.engine.faults.commit_dies_at_write = write
    with pytest.raises(UnavailableError, match="a rank died"):
        await starting
    await world.ask((1, 2, 3), 4)
    assert (world.replica.state, answers(world.log)) == (State.CLOSED, ())
    await returns(world, lineage)
    await world.close()


async def test_f32_calls_to_a_dead_group_are_refused_and_a_second_death_changes_nothing(opened: OpenWorld) -> None:
    engine = (await opened()).engine
    staged = await engine.stage(())
    engine.faults.stall = True
    waiting = [asyncio.ensure_future(call) for call in (engine.commit(staged, V1), engine.undo(staged, Version(0)))]
    await turns(10)
    engine.die("first")
    engine.die("second")
    calls = (engine.generate(request()), engine.stage(()), engine.drain(), engine.abort_all(),
             engine.commit(staged, V1), engine.undo(staged, Version(0)), *waiting)  # fmt: skip
    for call in calls:
        with pytest.raises(UnavailableError, match="first"):
            await call
    assert engine.stats().failure == "first"


async def health(world: World) -> tuple[str, int | None]:
    """What ``GET /health`` says of state and window."""
    async with Loopback(gated(control_routes(world.replica))) as server, aiohttp.ClientSession() as session:
        told = (await Client(session, server.url).get("/health")).json()
        return told["status"], told["window"]


async def test_f32_a_dead_group_says_so_to_whoever_probes_it(opened: OpenWorld) -> None:
    world = await opened()
    assert await health(world) == ("serving", 64)
    world.engine.faults.commit_dies_at_write = 1
    world.steer(V1)
    await died(world)
    assert await health(world) == ("retired", None)


async def test_f32_a_router_gives_a_dead_group_nothing_until_it_is_started_again(lineage: Lineage) -> None:
    names = ReplicaId("dying"), ReplicaId("steady")
    dying, steady = [Routed(await World(lineage, name=name, slots=8).start()) for name in names]
    clock = ManualClock()
    async with Router({names[0]: dying, names[1]: steady}, clock=clock) as router:
        asks = [asyncio.create_task(answer(router, request(20, name=f"r{number}"))) for number in range(6)]
        dying.world.engine.release(5)
        await turns(100)
        assert dying.world.replica.status().in_flight == 3
        dying.world.publish()
        dying.world.engine.faults.commit_dies_at_write = 1
        dying.world.steer("head")
        await died(dying.world)
        steady.world.engine.release()
        assert [[step.version for step in (await ask).steps] for ask in asks] == [[Version(0)] * 20] * 6
        await clock.advance(PROBE_INTERVAL_S)
        report = router.members()[names[0]].report
        assert report is not None
        assert report.status == "retired"
        for number in range(6):
            assert (await answer(router, request(4, name=f"s{number}"))).origin.replica == names[1]
        await dying.world.kill()
        dying.world.engine.release()
        await clock.advance(PROBE_INTERVAL_S)
        later = [asyncio.create_task(answer(router, request(4, name=f"t{number}"))) for number in range(6)]
        made = [await ask for ask in later]
    found = {(one.origin.replica, step.version) for one in made for step in one.steps}
    assert found == {(names[0], V1), (names[1], Version(0))}


@pytest.mark.parametrize("state", [state for state in State if state is not State.SERVING])
def test_f32_policy_chooses_no_replica_that_does_not_serve(state: State) -> None:
    alone = Candidate(replica=ReplicaId("dead"), health=Health.GOOD, serving=state.value == SERVING, version=V1)
    assert choose(RoutingContext(), [alone]) == Refusal(kind="unavailable")
