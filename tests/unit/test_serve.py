"""Taking a port, and what is accepted on it."""

import asyncio
import socket

import pytest

from slackwater.cli.serve import bind
from slackwater.errors import UnavailableError


async def test_what_is_accepted_sends_at_once() -> None:
    """Nagle's delay would hold back each small piece of a stream until the one before it is acknowledged."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    taken = bind("127.0.0.1", 0)
    async with await asyncio.start_server(look, sock=taken):
        _, writer = await asyncio.open_connection(*taken.getsockname())
        assert await found
        writer.close()


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
