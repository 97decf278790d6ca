"""An app on a real loopback port, inside the test's own event loop; it can die as abruptly as a killed process."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import uvicorn
from starlette.types import ASGIApp

_LOOKS_S: Final = 0.002
"""Between looks at what is still open, as it ends."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, tells when it listens, and ends at once where uvicorn sleeps 0.2 s."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self.ends = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            await asyncio.wait_for(self._finished(), self.config.timeout_graceful_shutdown)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    async def _finished(self) -> None:
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - these sets tell nobody
            await asyncio.sleep(_LOOKS_S)
        for server in self.servers:
            await server.wait_closed()


class Loopback:
    """Serves ``app`` while it is entered.

    Args:
        app: Any ASGI app; its lifespan runs.
        port: 0 takes a free one.
    """

    def __init__(self, app: ASGIApp, *, port: int = 0) -> None:
        # Named as TCP, or asyncio leaves Nagle's algorithm on: every other answer then waits 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        """Its base URL."""
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        listens = asyncio.create_task(self._server.listens.wait())
        await asyncio.wait((self._task, listens), return_when=asyncio.FIRST_COMPLETED)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._server.ends.set()
        if self._task is not None:
            await self._task

    def kill(self) -> None:
        """Drop every connection without a word and listen no more."""
        for server in self._server.servers:
            server.close()
        self._socket.close()
        self.reset()

    def reset(self) -> None:
        """Drop every connection without a word and go on listening."""
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.Transport):
                transport.abort()
