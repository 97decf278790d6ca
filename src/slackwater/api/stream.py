"""Bodies that are written as they are made, and work that ends when its client goes away."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SSE: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
SEND_BYTES: Final = 256 * 1024
"""Most bytes that are sent in one go."""
DONE: Final = b"data: [DONE]\n\n"
"""The last event of a whole stream. A stream that ends in an error has none."""

_Result = TypeVar("_Result")


async def made(work: Callable[[], _Result], *, heavy: bool) -> _Result:
    """What ``work`` makes; in a thread where it is ``heavy``, so that others are answered meanwhile."""
    return await asyncio.to_thread(work) if heavy else work()


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def line(value: object) -> bytes:
    """One line of NDJSON."""
    return msgspec.json.encode(value) + b"\n"


def pieces(data: bytes) -> Iterator[bytes]:
    """Of a size that a connection takes at once: it copies what it can't send yet, which stops everybody."""
    for begin in range(0, len(data), SEND_BYTES):
        yield data[begin : begin + SEND_BYTES]


class Outlet:
    """Where a producer writes.

    The status line leaves with the first write, so an error before it can still choose its own. Writes of several
    tasks don't mix; each waits while the client reads slowly.
    """

    def __init__(self, send: Send, media_type: str) -> None:
        self.started = False
        """Whether the status line has left."""
        self._send = send
        self._media_type = media_type
        self._turn = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Send bytes now."""
        await self.make(lambda: data)

    async def make(self, work: Callable[[], bytes], *, heavy: bool = False) -> None:
        """Send what ``work`` makes once it is its turn; see `made`."""
        async with self._turn:
            data = await made(work, heavy=heavy)
            if not self.started:
                self.started = True
                await self._send(self._head())
            for piece in pieces(data):
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Close the body."""
        if not self.started:
            await self.write(b"")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self) -> dict[str, object]:
        headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-store")]
        return {"type": "http.response.start", "status": 200, "headers": headers}


class StreamedReply(Response):
    """A reply whose body ``produce`` writes.

    The producer is cancelled when the client goes away. What it raises before its first write becomes an ordinary
    error reply; after it the connection breaks. It replaces Starlette's own streaming reply, whose cancel scope
    would also cancel the awaits of a ``finally`` that frees answers.
    """

    def __init__(self, produce: Callable[[Outlet], Coroutine[Any, Any, None]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._produce = produce
        self._kind = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        del scope
        outlet = Outlet(send, self._kind)
        await until_disconnect(receive, self._run(outlet))

    async def _run(self, outlet: Outlet) -> None:
        await self._produce(outlet)
        await outlet.end()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Run ``work`` to its end; if the client goes away first, cancel it, wait for its clean-up and return None.

    The request's body must have been read whole.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await settle((task, watch))


async def together(jobs: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run jobs concurrently; the first failure cancels the rest and is raised once they have ended."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await settle(tasks)


async def settle(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel what still runs and wait for its end. What it raises then is dropped: it was told to stop."""
    open_tasks = [task for task in tasks if not task.done()]
    for task in open_tasks:
        task.cancel()
    await asyncio.gather(*open_tasks, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
