"""Serve an app on loopback until told to stop: a port taken early, one ready line, an ordered end."""

import errno
import json
import socket
import sys
from typing import Final

import uvicorn
from starlette.types import ASGIApp

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
    taken = socket.socket(family, socket.SOCK_STREAM)
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


async def serve(app: ASGIApp, taken: socket.socket, ending: Ending) -> None:
    """Serve until told to end: stop accepting, give requests a few seconds, then the app's lifespan ends.

    Prints one JSON line, ``{"ready": URL}``, once connections are accepted.
    """
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=_DRAIN_S)
    server = _Announced(config)
    with ending.in_order(server.stop):
        await server.serve(sockets=[taken])
    if not server.started:
        raise UnavailableError("the server could not start", hint="its log says why")


class _Announced(uvicorn.Server):
    """Says on standard output when it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup(sockets)
        if self.started and sockets:
            sys.stdout.write(json.dumps({"ready": address(sockets[0])}) + "\n")
            sys.stdout.flush()

    def stop(self) -> None:
        """Have `serve` end in order; from any thread."""
        self.should_exit = True
