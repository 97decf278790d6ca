"""Waiting with a way out: for work that has a deadline, or that a newer target makes pointless."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stop:
    """A flag that tasks can wait for and threads can look at. Set once, from the event loop."""

    def __init__(self) -> None:
        self._seen = threading.Event()
        self._awaited = asyncio.Event()

    def set(self) -> None:
        """Raise the flag; it stays up."""
        self._seen.set()
        self._awaited.set()

    def is_set(self) -> bool:
        """Whether it is up. Any thread."""
        return self._seen.is_set()

    async def wait(self) -> None:
        """Return once it is up."""
        await self._awaited.wait()


async def first(work: Coroutine[Any, Any, T], limit: Coroutine[Any, Any, object]) -> T | None:
    """The result of ``work``, or None where ``limit`` ends before it; the other is cancelled and awaited.

    Work that ends at the same moment wins. Cancelling this cancels both.
    """
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(limit)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        await _reap(tasks)


async def _reap(tasks: tuple["asyncio.Future[Any]", ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def joined(call: Callable[[], T], stop: Stop) -> T:
    """Run ``call`` in a thread that is never left behind: cancellation raises ``stop`` and waits for its end.

    For work that reads the engine's memory, which must be over before the next exchange.
    """
    future = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(future, return_exceptions=True)
        raise
