"""A listener on the line between a gateway and one replica: it passes bytes on and remembers what was said."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Bytes that came at once, in one direction."""

    line: int
    """Which connection."""
    is_reply: bool
    data: bytes


class Tap:
    """Accepts connections on a port of its own and carries each to a loopback port, until it is left.

    Args:
        port: Where to.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._said: list[Said] = []
        self._lock = threading.Lock()
        self._lines = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        """Its base URL."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="tap", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def mark(self) -> int:
        """Now, for `replies`."""
        with self._lock:
            return len(self._said)

    def replies(self, asked: str, *, before: str, after: int) -> Sequence[bytes]:
        """Bodies of the replies to requests that begin with ``asked``, before the first that begins with ``before``.

        Replies that came too late for a request that was given up are not among them.
        """
        found: list[bytes] = []
        asking: dict[int, bytes] = {}
        replying: dict[int, int] = {}
        with self._lock:
            said = list(self._said)
        for index, item in enumerate(said):
            if not item.is_reply:
                asking[item.line] = item.data
                replying.pop(item.line, None)
                if index >= after and item.data.startswith(before.encode()):
                    break
            elif index >= after and asking[item.line].startswith(asked.encode()):
                if item.line not in replying:
                    replying[item.line] = len(found)
                    found.append(b"")
                found[replying[item.line]] += item.data
        return [reply.partition(b"\r\n\r\n")[2] for reply in found]

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            self._lines += 1
            for source, sink, is_reply in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(self._lines, source, sink, is_reply), daemon=True).start()

    def _carry(self, line: int, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            with suppress(OSError):  # one side is gone
                while data := source.recv(1 << 16):
                    with self._lock:
                        self._said.append(Said(line=line, is_reply=is_reply, data=data))
                    sink.sendall(data)
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # which ends the other direction's wait, too
                end.close()
