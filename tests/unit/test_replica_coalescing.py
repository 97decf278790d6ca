"""A replica that is several deltas behind goes to the newest version in one swap."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from replica_rig import SPECS, Rig, request, until, weights_at

from slackwater.checkpoint.tensor import Bits
from slackwater.errors import NotFoundError, SwapError, UnavailableError
from slackwater.ids import Version
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.route import Route
from slackwater.replica.status import ReplicaStatus, State
from slackwater.replica.swap import Stage
from slackwater.rollout.evidence import spans


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


async def go_to(rig: Rig, version: int) -> ReplicaStatus:
    await rig.replica.set_target(Version(version))
    return await rig.replica.settled()


def ways(rig: Rig) -> list[tuple[int, int, int]]:
    """Of each swap where it began, where it led, and how many deltas it took."""
    return [(swap.from_version, swap.version, swap.deltas) for swap in rig.replica.status().swaps]


def altered(base: dict[str, Bits], name: str, by: int) -> dict[str, Bits]:
    made = {key: bits.copy() for key, bits in base.items()}
    made[name][:2] ^= np.asarray(by, dtype=made[name].dtype)
    return made


async def test_several_deltas_are_one_pause(rig: Rig) -> None:
    await rig.start()
    rig.publish(5)
    status = await go_to(rig, 5)
    assert (status.version, status.state_digest) == (5, rig.fetcher.manifest(Version(5)).state)
    assert (rig.engine.commits, ways(rig)) == (1, [(0, 5, 5)])
    assert rig.holds(5)
    assert await rig.replica.weights_digest() == (5, status.state_digest)
    swap = status.swaps[-1]
    deltas = [rig.fetcher.manifest(Version(number)) for number in range(1, 6)]
    assert swap.bytes_fetched == sum(delta.num_bytes for delta in deltas)
    assert (swap.kind, swap.tiles) == ("delta", len(SPECS))


async def test_one_swap_makes_the_bits_that_one_after_the_other_make(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    slow = Rig(tmp_path / "slow", bucket=rig.bucket, limits=ExchangeLimits(threads=1, max_deltas=1))
    await rig.start()
    await slow.replica.start()
    rig.publish(4)
    await asyncio.gather(go_to(rig, 4), go_to(slow, 4))
    assert (ways(rig), ways(slow)) == ([(0, 4, 4)], [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1)])
    assert rig.engine.stamp == slow.engine.stamp
    assert rig.replica.status().state_digest == slow.replica.status().state_digest
    await slow.close()


async def test_bits_that_come_back_are_not_written(rig: Rig) -> None:
    await rig.start()
    rig.publish(weights=weights_at(1))
    rig.publish(weights=weights_at(0))
    status = await go_to(rig, 2)
    assert (status.version, rig.engine.commits, ways(rig)) == (2, 1, [(0, 2, 2)])
    assert (status.swaps[-1].tiles, status.swaps[-1].bytes_written) == (0, 0)
    assert rig.holds(2)


async def test_tokens_of_an_answer_in_flight_show_the_old_version_and_the_newest_only(rig: Rig) -> None:
    await rig.start()
    rig.engine.hold()
    answer = await rig.replica.complete(request(30))
    rig.engine.release(10)
    steps = aiter(answer)
    got = [await anext(steps) for _ in range(10)]
    rig.publish(6)
    await rig.follow()
    rig.engine.release()
    got += [step async for step in steps]
    assert [(s.version, s.start, s.end) for s in spans(step.version for step in got)] == [(0, 0, 10), (6, 10, 30)]
    await answer.aclose()


async def test_a_roll_back_gives_the_version_before_the_swap(rig: Rig) -> None:
    await rig.start(versions=2)
    rig.publish(4)
    await rig.follow()
    status = await rig.replica.roll_back()
    assert (status.version, status.state_digest) == (1, rig.fetcher.manifest(Version(1)).state)
    assert ways(rig)[-2:] == [(1, 5, 4), (5, 1, 0)]
    assert rig.holds(1)
    assert (await go_to(rig, 5)).version == 5
    assert rig.holds(5)


async def test_bits_that_differ_after_the_commit_are_undone_to_the_version_before_the_swap(rig: Rig) -> None:
    await rig.start()
    rig.publish(3)
    rig.engine.faults.flip_bit = True
    status = await go_to(rig, 3)
    assert (status.state, status.version, status.provisional) == (State.SERVING, 0, False)
    assert rig.holds(0)
    assert (await go_to(rig, 3)).version == 3
    assert rig.holds(3)


# Bounds


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (ExchangeLimits(threads=1, max_deltas=2), [(0, 2, 2), (2, 4, 2), (4, 5, 1)]),
        (ExchangeLimits(threads=1, max_bytes=0), [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1)]),
        (ExchangeLimits(threads=1, max_bytes=260), [(0, 3, 3), (3, 5, 2)]),
    ],
    ids=["two deltas", "no bytes", "some bytes"],
)
async def test_a_swap_goes_to_the_last_version_that_fits_and_the_rest_follows(
    tmp_path: Path, limits: ExchangeLimits, expected: list[tuple[int, int, int]]
) -> None:
    rig = Rig(tmp_path, limits=limits)
    await rig.start()
    rig.publish(5)
    assert (await go_to(rig, 5)).version == 5
    assert ways(rig) == expected
    assert rig.holds(5)
    await rig.close()


# Failures in the middle


async def test_a_broken_delta_in_the_middle_ends_the_swap_before_it(rig: Rig) -> None:
    await rig.start()
    rig.publish(5)
    whole = rig.spoil(3)
    status = await go_to(rig, 5)
    assert (status.state, status.version, status.target, status.stage) == (State.SERVING, 2, 5, Stage.IDLE)
    assert status.last_error is not None
    assert (status.last_error.kind, status.waiting) == ("corrupt", True)
    assert (rig.engine.commits, ways(rig)) == (1, [(0, 2, 2)])
    assert rig.holds(2)
    rig.repair(3, whole)
    assert (await go_to(rig, 5)).last_error is None
    assert ways(rig) == [(0, 2, 2), (2, 5, 3)]
    assert rig.holds(5)


async def test_an_anchor_leads_around_a_delta_that_broke_in_the_middle(rig: Rig) -> None:
    await rig.start()
    rig.publish(3)
    rig.spoil(2)
    rig.publish(anchor=True)
    rig.publish(2)
    await rig.replica.set_target(Version(3))
    assert (await rig.replica.settled()).version == 1
    assert (await go_to(rig, 6)).version == 6
    assert ways(rig) == [(0, 1, 1), (1, 4, 0), (4, 6, 2)]
    assert rig.holds(6)


async def test_a_bucket_that_stops_answering_costs_only_what_it_does_not_give(rig: Rig) -> None:
    await rig.start()
    rig.publish(4)
    rig.source.errors["bodies 4"] = UnavailableError("slow down")
    status = await go_to(rig, 4)
    assert status.last_error is not None
    assert (status.version, status.last_error.kind) == (3, "unavailable")
    del rig.source.errors["bodies 4"]
    assert (await go_to(rig, 4)).version == 4
    assert ways(rig) == [(0, 3, 3), (3, 4, 1)]


async def test_memory_that_a_later_delta_does_not_fit_retires_the_replica_at_once(rig: Rig) -> None:
    states = [weights_at(0)]
    for by, name in enumerate(SPECS, 1):
        states.append(altered(states[-1], name, by))
    rig.publish(weights=states[0])
    await rig.replica.start()
    for state in states[1:]:
        rig.publish(weights=state)
    rig.engine.poke("b.weight", 60)
    await rig.replica.set_target(Version(3))
    status = await rig.replica.settled()
    assert (status.state, status.version, status.swaps) == (State.RETIRED, 0, ())
    assert status.last_error is not None
    assert status.last_error.kind == "spoilt"


async def test_a_swap_that_the_engine_could_not_take_is_tried_in_single_steps(rig: Rig) -> None:
    await rig.start()
    rig.publish(3)
    rig.engine.faults.stage = SwapError("no memory")
    assert (await go_to(rig, 3)).version == 0
    assert (await go_to(rig, 3)).version == 3
    assert ways(rig) == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    rig.publish(2)
    assert (await go_to(rig, 5)).version == 5
    assert ways(rig)[-1] == (3, 5, 2)
    assert rig.holds(5)


async def test_a_manifest_that_can_not_be_read_ends_what_is_asked_for(rig: Rig) -> None:
    rig.publish(5)
    route = Route(rig.source)
    assert [step.version for step in route.next(Version(0), Version(4))] == [1]
    rig.source.errors["manifest 3"] = NotFoundError("collected meanwhile")
    assert [step.version for step in route.next(Version(0), Version(4), 9)] == [1, 2]
    with pytest.raises(NotFoundError, match="collected"):
        route.next(Version(2), Version(4), 9)
    assert [step.version for step in route.next(None, Version(4), 9)] == [0]


# Targets that move meanwhile


async def test_a_target_that_is_passed_ends_the_exchange_in_the_middle(rig: Rig) -> None:
    await rig.start()
    rig.publish(5)
    rig.source.hold(3)
    await rig.replica.set_target(Version(5))
    await until(rig.source.fetching.is_set)
    await rig.replica.set_target(Version(2))
    status = await rig.replica.settled()
    assert (status.version, status.stage, status.last_error) == (2, Stage.IDLE, None)
    assert (rig.engine.commits, ways(rig)) == (1, [(0, 2, 2)])
    assert rig.holds(2)


async def test_a_target_further_on_keeps_the_exchange(rig: Rig) -> None:
    await rig.start()
    rig.publish(5)
    rig.source.hold(2)
    await rig.replica.set_target(Version(3))
    await until(rig.source.fetching.is_set)
    await rig.replica.set_target(Version(5))
    rig.source.go.set()
    assert (await rig.replica.settled()).version == 5
    assert ways(rig) == [(0, 3, 3), (3, 5, 2)]
    assert rig.holds(5)


async def _inline(call: object, /, *args: object, **kwargs: object) -> object:
    await asyncio.sleep(0)
    assert callable(call)
    return call(*args, **kwargs)


@pytest.mark.parametrize("turns", range(0, 90, 6))
async def test_closing_at_any_await_of_a_long_exchange_never_mixes_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", _inline)
    rig = Rig(tmp_path)
    await rig.start()
    rig.publish(3)
    await rig.replica.set_target(Version(3))
    for _ in range(turns):
        await asyncio.sleep(0)
    await rig.replica.close()
    held = rig.engine.stats().version
    assert held in (0, 3)
    assert rig.holds(held)
