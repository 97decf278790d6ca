"""Following the head while the store goes away, goes back and comes again."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slackwater.checkpoint.keys import manifest_key
from slackwater.delivery.fetcher import Fetcher, HeadView
from slackwater.delivery.watcher import LONGEST_WAIT_S, Watcher, back_off
from slackwater.errors import AuthError, NotFoundError, SlackwaterError, UnavailableError
from slackwater.ids import RunId, Version
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.testing.clock import ManualClock

POLL_S = 2.0


class Heads:
    """A source that a test sets."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        self.error: SlackwaterError | None = None
        self.looks: list[Version | None] = []

    def look(self, known: Version | None) -> HeadView:
        self.looks.append(known)
        if self.error:
            raise self.error
        return HeadView(version=None if self.version is None else Version(self.version), receded=False)


@asynccontextmanager
async def following(watcher: Watcher, after: int | None = None) -> AsyncGenerator[asyncio.Queue[Version]]:
    seen: asyncio.Queue[Version] = asyncio.Queue()

    async def follow() -> None:
        async for version in watcher.versions(None if after is None else Version(after)):
            seen.put_nowait(version)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_emits_each_newer_head_and_only_those() -> None:
    heads, clock = Heads(3), ManualClock()
    async with following(Watcher(heads, clock, POLL_S)) as seen:
        assert await seen.get() == 3
        await clock.parked()
        await clock.advance(POLL_S)
        await clock.parked()
        assert seen.empty()
        heads.version = 4
        await clock.advance(POLL_S)
        assert await seen.get() == 4


async def test_coalesces_what_came_between_two_looks() -> None:
    heads, clock = Heads(3), ManualClock()
    async with following(Watcher(heads, clock, POLL_S), after=3) as seen:
        await clock.parked()
        heads.version = 9
        await clock.advance(POLL_S)
        assert await seen.get() == 9
        await clock.parked()
        assert seen.empty()


async def test_iterating_the_watcher_itself_starts_at_the_first_head() -> None:
    async for version in Watcher(Heads(0), ManualClock(), POLL_S):
        assert version == 0
        break


@pytest.mark.parametrize("error", [UnavailableError("away"), AuthError("expired")])
async def test_f19_f26_backs_off_while_the_store_is_away_and_goes_on_alone(
    caplog: pytest.LogCaptureFixture, error: SlackwaterError
) -> None:
    heads, clock = Heads(1), ManualClock()
    heads.error = error
    watcher = Watcher(heads, clock, POLL_S)
    async with following(watcher) as seen:
        await clock.parked()
        assert watcher.trouble is error
        await clock.advance(back_off(POLL_S, 1) - 0.5)
        assert len(heads.looks) == 1
        await clock.advance(0.5)
        await clock.parked()
        assert len(heads.looks) == 2
        heads.error = None
        await clock.advance(back_off(POLL_S, 2))
        assert await seen.get() == 1
        assert watcher.trouble is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_a_bucket_that_does_not_exist_ends_the_watch() -> None:
    heads = Heads()
    heads.error = NotFoundError("no such bucket")
    with pytest.raises(NotFoundError):
        await anext(Watcher(heads, ManualClock(), POLL_S).__aiter__())


async def test_f16_a_head_that_goes_back_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    heads, clock = Heads(9), ManualClock()
    watcher = Watcher(heads, clock, POLL_S)
    async with following(watcher) as seen:
        assert await seen.get() == 9
        heads.version = 5
        for _ in range(3):
            await clock.parked()
            await clock.advance(POLL_S)
        await clock.parked()
        assert seen.empty()
        assert watcher.receded is True
        heads.version = 10
        await clock.advance(POLL_S)
        assert await seen.get() == 10
        assert watcher.receded is False
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_f17_a_freeze_is_quiet() -> None:
    heads, clock = Heads(9), ManualClock()
    async with following(Watcher(heads, clock, POLL_S), after=9) as seen:
        for _ in range(10):
            await clock.parked()
            await clock.advance(POLL_S)
        await clock.parked()
        assert seen.empty()
        assert len(heads.looks) == 11


async def test_cancelling_a_look_under_way_ends_the_watch(tmp_path: Path) -> None:
    gate = Gate()
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="get", gate=gate))
    fetcher = Fetcher(bucket, RunId("demo"), tmp_path)
    async with following(Watcher(fetcher, ManualClock(), POLL_S)) as seen:
        assert await asyncio.to_thread(gate.reached.wait, 10)
    gate.open()
    assert seen.empty()


async def test_cancelling_a_sleep_leaves_no_sleeper() -> None:
    clock = ManualClock()
    async with following(Watcher(Heads(), clock, POLL_S)):
        await clock.parked()
    assert clock.sleepers == 0


async def test_f06_follows_a_real_bucket_without_a_hint(tmp_path: Path) -> None:
    memory, clock, run = MemoryBucket(), ManualClock(), RunId("demo")
    async with following(Watcher(Fetcher(memory, run, tmp_path), clock, POLL_S)) as seen:
        await clock.parked()
        for version in range(3):
            memory.put_if_absent(manifest_key(run, Version(version)), b"{}")
            await clock.advance(POLL_S)
            assert await seen.get() == version
            await clock.parked()


@pytest.mark.parametrize("poll_s", [0.1, 2.0, 300.0])
def test_back_off_grows_to_its_bound_and_never_below_a_poll(poll_s: float) -> None:
    waits = [back_off(poll_s, failures) for failures in range(1, 2000)]
    assert waits == sorted(waits)
    assert waits[0] >= poll_s
    assert waits[-1] == max(poll_s, LONGEST_WAIT_S)
