"""The clock seam: everything that waits or measures asks a Clock, so that tests turn time by hand."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Implementations are safe to share between tasks of one event loop."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never falls. Durations and deadlines use this."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch. For people to read; no decision rests on it."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after at least ``seconds``; cancellation ends it at once."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)
