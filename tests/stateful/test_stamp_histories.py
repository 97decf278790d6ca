"""Random histories of a replica over the stamp engine, held against the offline checker.

``SLACKWATER_HISTORIES`` says how many (10,000 before a release), ``SLACKWATER_HISTORY_SEED`` where their seeds begin.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import product
from typing import Final

import aiohttp
import pytest
from http_rig import CONTROL, Client, gated
from replica_rig import request
from routed_rig import Routed
from stamp_rig import Lineage, World, played, turns

from depth import examples
from slackwater.ids import ReplicaId, Version
from slackwater.replica.app import control_routes
from slackwater.replica.status import State
from slackwater.replica.swap import Stage
from slackwater.rollout.evidence import Finish, spans
from slackwater.rollout.request import PolicyConstraint
from slackwater.router.policy import Health
from slackwater.router.router import PROBE_INTERVAL_S, Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.conformance_completer import answer
from slackwater.testing.history import Sampled, answers, check
from slackwater.testing.loopback import Loopback
from slackwater.testing.stamp import StampBugs

HISTORIES: Final = int(os.environ.get("SLACKWATER_HISTORIES", examples(100)))
FIRST_SEED: Final = int(os.environ.get("SLACKWATER_HISTORY_SEED", "0"))
ROUNDS: Final = max(examples(60), HISTORIES // 10)

pytestmark = pytest.mark.usefixtures("inline_threads")

OpenWorld = Callable[..., Awaitable[World]]

PLANTED: Final = {
    "a label flipped a step early": (StampBugs(early_label=True), "I1"),
    "half of the tensors written before a step": (StampBugs(torn_step=True), "I1"),
    "KV kept over a swap": (StampBugs(keep_kv=True), "I8"),
    "KV kept over a swap in silence": (StampBugs(keep_kv=True, hide_reuse=True), "I1"),
    "answers not computed again": (StampBugs(skip_recompute=True), "I1"),
    "a request lost": (StampBugs(lose_waiting=True), "I5"),
}


@pytest.fixture
async def opened(lineage: Lineage) -> AsyncIterator[OpenWorld]:
    worlds: list[World] = []

    async def open_world(slots: int = 2) -> World:
        worlds.append(World(lineage, slots=slots))
        return await worlds[-1].start()

    yield open_world
    for world in worlds:
        await world.close()


@pytest.mark.timeout(max(120, HISTORIES))
async def test_no_random_history_breaks_a_promise(lineage: Lineage) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        async with asyncio.timeout(60):
            log = await played(lineage, seed)
        assert check(log) == (), f"SLACKWATER_HISTORY_SEED={seed} SLACKWATER_HISTORIES=1 plays it again"


async def test_a_seed_plays_the_same_history_again(lineage: Lineage) -> None:
    assert await played(lineage, 3) == await played(lineage, 3)


@pytest.mark.parametrize("bug", PLANTED)
async def test_a_planted_bug_is_found_by_its_check(lineage: Lineage, bug: str) -> None:
    bugs, number = PLANTED[bug]
    for seed in range(200):
        if any(violation.check == number for violation in check(await played(lineage, seed, bugs=bugs))):
            return
    pytest.fail(f"{number} never told of {bug}")


async def test_f31_a_replica_killed_anywhere_in_a_swap_comes_back_as_one_version(opened: OpenWorld) -> None:
    stages: set[Stage] = set()
    for point in range(40):
        world = await opened()
        await world.ask((1, 2, 3), 20)
        world.engine.release()
        world.publish()
        world.steer("head")
        await turns(point)
        stages.add(world.replica.status().stage)
        await world.kill()
        assert (world.replica.state, world.replica.status().version) == (State.SERVING, 1)
        await world.ask((1, 2, 3), 4)
        await world.heal()
        assert check(world.log) == ()
    assert stages >= {Stage.IDLE, Stage.PREPARING, Stage.COMMITTING, Stage.VERIFYING}


async def test_a1_08_tokens_of_a_spoilt_version_are_provisional_and_so_no_false_labels(
    opened: OpenWorld,
) -> None:
    world = await opened()
    await world.ask((1, 2, 3), 50)
    world.engine.release()
    world.publish()
    world.engine.faults.flip_bit = True
    world.steer(Version(1))
    await turns(300)
    assert world.replica.status().version == 0
    await world.heal()
    assert check(world.log) == ()
    (whole,) = answers(world.log)
    assert {step.version for step in whole.steps if step.provisional} == {1}
    assert (whole.ends[0].finish, whole.ends[0].error) == (None, "unavailable")
    believed = [replace(one, step=replace(one.step, provisional=False)) if isinstance(one, Sampled) else one
                for one in world.log]  # fmt: skip
    assert [violation.check for violation in check(believed)] == ["I1"]


@pytest.mark.parametrize("write", range(4))
async def test_f33_no_token_is_of_a_commit_that_raised(opened: OpenWorld, write: int) -> None:
    world = await opened()
    await world.ask((1, 2, 3), 20)
    world.engine.release(5)
    world.publish()
    world.engine.faults.commit_at_write = write
    world.steer(Version(1))
    await turns(200)
    assert world.replica.status().last_error is not None
    world.engine.release(15)
    await turns(200)
    (whole,) = answers(world.log)
    assert [step.version for step in whole.steps] == [0] * 20
    await world.heal()
    assert check(world.log) == ()


async def test_f34_a_commit_that_hangs_gives_no_token_and_every_caller_an_end(opened: OpenWorld) -> None:
    world = await opened()
    await world.ask((1, 2, 3), 20)
    world.engine.release(5)
    await turns(100)
    world.publish()
    world.engine.faults.stall = True
    world.steer(Version(1))
    await turns(100)
    world.engine.release()
    await world.clock.advance(31.0)
    await turns(100)
    (whole,) = answers(world.log)
    assert (world.replica.state, len(whole.steps), whole.ends[0].finish) == (State.RETIRED, 5, Finish.ABORT)
    await world.heal()
    assert check(world.log) == ()


async def test_f35_a2_12_a_call_repeated_while_its_swap_is_made_is_one_swap(opened: OpenWorld) -> None:
    world = await opened()
    world.publish()
    world.engine.faults.stall = True
    for _ in range(5):
        world.steer(Version(1))
        await turns(100)
    world.engine.faults.stall = False
    world.engine.release()
    await turns(200)
    assert (world.engine.commits, world.replica.status().version) == (1, 1)
    await world.heal()
    assert check(world.log) == ()


async def test_f36_a_target_that_comes_late_never_overtakes(opened: OpenWorld) -> None:
    world = await opened()
    world.publish()
    world.publish()
    world.steer(Version(1))
    world.steer(Version(2))
    await turns(300)
    assert world.replica.status().version == 2
    await world.heal()
    assert check(world.log) == ()


async def test_f37_a2_08_a_swap_at_full_load_aborts_nobody_and_each_answer_has_two_spans(opened: OpenWorld) -> None:
    world = await opened(slots=16)
    for number in range(16):
        await world.ask((1, 2, number), 40)
    world.engine.release(20)
    await turns(200)
    world.publish()
    world.steer("head")
    await turns(200)
    assert world.replica.status().swaps[-1].in_flight == 16
    await world.heal()
    for whole in answers(world.log):
        assert whole.ends[0].finish is Finish.LENGTH
        assert [step.version for step in whole.steps] == [0] * 20 + [1] * 20
    assert check(world.log) == ()


async def test_a5_11_an_answer_that_grows_stale_ends_by_itself_and_says_how_old_each_token_is(
    opened: OpenWorld,
) -> None:
    world = await opened()
    await world.ask((1, 2, 3), 50, policy=PolicyConstraint(min_version=Version(0)))
    for _ in range(4):
        world.engine.release(10)
        await turns(200)
        world.publish()
        world.steer("head")
        await turns(200)
    await world.heal()
    (whole,) = answers(world.log)
    assert whole.ends[0].finish is Finish.LENGTH
    found = spans(step.version for step in whole.steps)
    assert [(span.version, span.start, span.end) for span in found] == [(at, 10 * at, 10 * at + 10) for at in range(5)]
    assert check(world.log) == ()


async def test_a2_01_a2_04_a_prompt_is_built_anew_after_a_swap_and_shared_after_that(opened: OpenWorld) -> None:
    world = await opened()
    world.engine.release()
    for _ in range(2):
        await world.ask((1, 2, 3), 4)
        await turns(100)
    world.publish()
    world.steer("head")
    await turns(200)
    for _ in range(2):
        await world.ask((1, 2, 3), 4)
        await turns(100)
    await world.heal()
    assert [whole.sampled[0].origin.cached_tokens for whole in answers(world.log)] == [0, 3, 0, 3]
    assert check(world.log) == ()


async def test_a2_09_rounds_of_swaps_and_answers_at_random_moments_all_end(opened: OpenWorld) -> None:
    chance = random.Random(9)
    world = await opened()
    world.publish()
    for number in range(ROUNDS):
        world.steer(Version(number % 2))
        await turns(chance.randint(0, 30))
        await world.ask((1, 2, 3), 8)
        world.engine.release(chance.randint(1, 8))
        await turns(chance.randint(0, 30))
    await world.heal()
    assert [len(whole.ends) for whole in answers(world.log)] == [1] * ROUNDS
    assert check(world.log) == ()


async def test_a1_15_the_same_target_again_is_no_swap(opened: OpenWorld) -> None:
    world = await opened()
    world.publish()
    for _ in range(3):
        world.steer(Version(1))
        await turns(200)
    assert world.engine.commits == 1
    await world.heal()
    assert check(world.log) == ()


async def test_a2_17_control_messages_that_are_none_harm_no_answer(opened: OpenWorld) -> None:
    world = await opened()
    paths = ("target", "rollback", "pause", "flush", "../v1/target", "target/0", "")
    bodies = (b"", b"{}", b"[]", b'{"version": -1}', b'{"version": "tail"}', b"\xff", b"{" * 2000, b"null")
    async with Loopback(gated(control_routes(world.replica))) as server, aiohttp.ClientSession() as session:
        client = Client(session, server.url, CONTROL)
        await world.ask((1, 2, 3), 40)
        world.engine.release(20)
        calls = product(("POST", "DELETE"), [f"/control/v1/{path}" for path in paths], bodies)
        replies = await asyncio.gather(*(client.call(*call) for call in calls))
    assert len(replies) > 100
    assert all(400 <= reply.status < 500 for reply in replies)
    await world.heal()
    (whole,) = answers(world.log)
    assert (len(whole.steps), whole.ends[0].finish) == (40, Finish.LENGTH)
    assert check(world.log) == ()


async def test_a2_22_before_any_swap_the_label_is_the_base_anchors(opened: OpenWorld) -> None:
    world = await opened()
    await world.ask((1, 2, 3), 2)
    await world.heal()
    (whole,) = answers(world.log)
    assert [(one.step.version, one.origin.prompt_version) for one in whole.sampled] == [(0, 0)] * 2


async def test_f41_a_replica_that_was_stopped_is_out_until_it_has_shown_its_version_twice(lineage: Lineage) -> None:
    names = ReplicaId("stopped"), ReplicaId("steady")
    stopped, steady = [Routed(await World(lineage, name=name, slots=8).start()) for name in names]
    clock = ManualClock()
    for routed in (stopped, steady):
        routed.thaw()
    async with Router({names[0]: stopped, names[1]: steady}, clock=clock) as router:
        stopped.freeze()
        asks = [asyncio.create_task(answer(router, request(4, name=f"r{number}"))) for number in range(6)]
        await turns(100)
        assert stopped.world.replica.status().in_flight > 0
        await clock.advance(15.0)
        assert {(await ask).origin.replica for ask in asks} == {names[1]}
        for routed in (stopped, steady):
            routed.world.publish()
        steady.world.steer("head")
        await turns(200)
        await clock.advance(300.0)
        stopped.thaw()
        for _ in range(2):
            assert router.members()[names[0]].health is Health.EJECTED
            assert (await answer(router, request(4))).origin.replica == names[1]
            stopped.world.steer("head")
            await turns(200)
            await clock.advance(PROBE_INTERVAL_S)
        member = router.members()[names[0]]
        assert (member.health, member.report and member.report.version) == (Health.GOOD, 1)
        later = [asyncio.create_task(answer(router, request(4, name=f"s{number}"))) for number in range(6)]
        assert {span.version for ask in later for span in (await ask).policy} == {1}
