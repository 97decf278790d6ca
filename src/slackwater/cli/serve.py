"""Serve an app on loopback until told to stop: a port taken early, one ready line, an ordered end."""

import asyncio
import errno
import json
import socket
import sys
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slackwater.api.respond import error_reply
from slackwater.cli.ending import Ending
from slackwater.errors import InvalidInputError, UnavailableError

_DRAIN_S: Final = 5
"""Seconds for requests under way to end."""


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow begins. Port 0 takes a free one.

    Raises:
        UnavailableError: Something listens there already.
        InvalidInputError: This machine has no such address, or the port needs other rights.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio leaves Nagle's delay on what it accepts: streamed tokens would wait 40 ms.
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen(2048)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(
                f"port {port} on {host} is in use", hint="stop what listens there, or choose another --port"
            ) from error
        raise InvalidInputError(
            f"can't listen on {host}:{port}: {error.strerror}", hint="check --host and --port"
        ) from error
    taken.setblocking(False)
    return taken


def address(taken: socket.socket) -> str:
    """The base URL of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an app on a bound socket until it is stopped or the process is told to end.

    Args:
        app: Its lifespan runs.
        taken: See `bind`.
    """

    def __init__(self, app: ASGIApp, taken: socket.socket) -> None:
        config = uvicorn.Config(
            _Drained(app), log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=_DRAIN_S
        )
        super().__init__(config)
        self._taken = taken

    async def run_until(self, ending: Ending) -> None:
        """Print one JSON line, ``{"ready": URL}``, once connections are accepted; return after an end in order.

        That end: no connection is accepted, requests under way have a few seconds and are refused after
        that, then the app's lifespan ends.
        """
        with ending.in_order(self.stop):
            await self.serve(sockets=[self._taken])
        if not self.started:
            raise UnavailableError("the server could not start", hint="its log says why")

    def stop(self) -> None:
        """Begin to end in order; from any thread, any number of times."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(json.dumps({"ready": address(self._taken)}) + "\n")
            sys.stdout.flush()


class _Drained:
    """An app whose requests are cancelled by its server alone, when they outlast its end: refused as retryable then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:  # else the connection breaks off, which readers of streams take for what it is
                error = UnavailableError("this server is ending", hint="ask again, or ask another replica")
                await error_reply(error)(scope, receive, send)
