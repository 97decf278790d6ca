"""A clock that stands still until a test turns it."""

import asyncio
import heapq
from itertools import count
from typing import Final

_TURNS: Final = 32
"""Turns of the event loop that woken tasks get before time goes on."""


class ManualClock:
    """Implements `slackwater.clock.Clock` without real time. For one event loop.

    Args:
        start: First reading of both `monotonic` and `wall`, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._order = count()
        self._parked: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = asyncio.Event()

    def monotonic(self) -> float:
        """See `slackwater.clock.Clock.monotonic`."""
        return self._now

    def wall(self) -> float:
        """See `slackwater.clock.Clock.wall`."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """See `slackwater.clock.Clock.sleep`: returns once `advance` has turned time that far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._parked, (self._now + seconds, next(self._order), woken))
        self._arrivals.set()
        await woken

    @property
    def sleepers(self) -> int:
        """Tasks that sleep now."""
        return sum(not woken.done() for _, _, woken in self._parked)

    async def parked(self, sleepers: int = 1) -> None:
        """Return once at least so many tasks sleep: work in threads between two sleeps takes real time."""
        while self.sleepers < sleepers:
            self._arrivals.clear()
            await self._arrivals.wait()

    async def advance(self, seconds: float) -> None:
        """Turn time on: wake sleepers in the order of their times, each at its own time, and let them run.

        A task that sleeps again within the span is woken again.
        """
        until = self._now + seconds
        await _settle()
        while self._parked and self._parked[0][0] <= until:
            due, _, woken = heapq.heappop(self._parked)
            if not woken.done():
                self._now = due
                woken.set_result(None)
                await _settle()
        self._now = until


async def _settle() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
