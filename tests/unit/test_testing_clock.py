"""The manual clock: order and cancellation, as tests of others rely on them."""

import asyncio

import pytest

from slackwater.testing.clock import ManualClock


async def sleep_and_note(clock: ManualClock, seconds: float, notes: list[tuple[float, float]]) -> None:
    await clock.sleep(seconds)
    notes.append((seconds, clock.monotonic()))


async def test_wakes_sleepers_in_order_each_at_its_own_time() -> None:
    clock, notes = ManualClock(start=0.0), list[tuple[float, float]]()
    async with asyncio.TaskGroup() as group:
        for seconds in (3.0, 1.0, 2.0, 9.0):
            group.create_task(sleep_and_note(clock, seconds, notes))
        await clock.advance(5.0)
        assert notes == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
        assert clock.monotonic() == clock.wall() == 5.0
        assert clock.sleepers == 1
        await clock.advance(4.0)
    assert notes[-1] == (9.0, 9.0)


async def test_wakes_a_task_that_sleeps_again_within_the_span() -> None:
    clock, ticks = ManualClock(start=0.0), list[float]()

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(tick())
    await clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.sleepers == 0
    await clock.advance(1.0)
    assert clock.monotonic() == 4.5


async def test_parked_waits_for_sleepers() -> None:
    clock = ManualClock()
    waiting = asyncio.create_task(clock.parked(2))
    async with asyncio.TaskGroup() as group:
        group.create_task(clock.sleep(1.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        group.create_task(clock.sleep(1.0))
        await waiting
        await clock.advance(1.0)


async def test_no_time_at_all_needs_no_advance() -> None:
    clock = ManualClock()
    await clock.sleep(0.0)
    await clock.sleep(-1.0)
    assert clock.sleepers == 0
