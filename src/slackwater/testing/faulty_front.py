"""A front before a store's server, on loopback, that does to requests what its rules say.

::

    with FaultyFront(endpoint, Rule(refuse(503, "SlowDown"), method="PUT", times=2)) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        ...
        assert front.count("PUT") == 3

Faults are in `slackwater.testing.http_faults`. Nothing here takes time of its own: what is slow waits at a gate.
"""

import contextlib
import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit

from slackwater.testing.http_faults import Fault, Forward, Reply, Request

_HOP: Final = frozenset({"connection", "expect", "keep-alive", "proxy-connection", "transfer-encoding"})
"""Headers that concern one connection: RFC 9110 section 7.6.1."""
_UPSTREAM_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Which requests meet a fault."""

    fault: Fault
    method: str = ""
    """Only this method; empty: any."""
    path: str = ""
    """Only where the decoded path and query contain this."""
    skip: int = field(default=0, kw_only=True)
    """Requests that fit and pass untouched first."""
    times: int | None = field(default=1, kw_only=True)
    """Requests that meet it, then it is spent; None: all."""

    def fits(self, request: Request) -> bool:
        """Whether the request is one of those."""
        return self.method in {"", request.method} and self.path in request.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A request that reached the front, and what the client was sent."""

    request: Request
    status: int | None
    """None: the connection was closed without an answer."""
    at: float
    """When it came, in seconds of `time.monotonic`."""


@dataclass(slots=True)
class _Pending:
    rule: Rule
    met: int = 0

    def take(self) -> bool:
        """Count a request that fits; whether it meets the fault."""
        self.met += 1
        past = self.met - self.rule.skip
        return past > 0 and (self.rule.times is None or past <= self.rule.times)


class FaultyFront:
    """Serves while it is entered: every request passes the rules, in their order, and then goes to the store.

    A rule's fault wraps what comes after it, so that several can meet one request; a rule behind one that doesn't
    forward isn't counted. Requests keep their ``Host``, which signatures cover.

    Args:
        upstream: The store's endpoint, ``http://host:port``; a path is not part of it.
        rules: Tried in order.

    Raises:
        Exception: At the end of the block: what a rule's fault raised, such as a gate's TimeoutError.
    """

    def __init__(self, upstream: str, *rules: Rule) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._rules = [_Pending(rule) for rule in rules]
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self._server = _Server(self._serve)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="faulty-front")
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        """Its endpoint."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()
        if error is None and self._server.failure is not None:
            raise self._server.failure

    def add(self, *rules: Rule) -> None:
        """Add rules behind the others."""
        with self._lock:
            self._rules += [_Pending(rule) for rule in rules]

    def clear(self) -> None:
        """Drop every rule: the store is well from now on."""
        with self._lock:
            self._rules.clear()

    @property
    def seen(self) -> tuple[Seen, ...]:
        """Every request so far, in the order of their answers."""
        with self._lock:
            return tuple(self._seen)

    def count(self, method: str = "", path: str = "") -> int:
        """Requests so far with this method whose decoded path and query contain ``path``."""
        return sum(method in {"", each.request.method} and path in each.request.path for each in self.seen)

    def _serve(self, request: Request) -> Reply | None:
        began = time.monotonic()
        with self._lock:
            rules = iter(tuple(self._rules))
        reply = self._pass(request, rules)
        with self._lock:
            self._seen.append(Seen(request=request, status=reply and reply.status, at=began))
        return reply

    def _pass(self, request: Request, rules: Iterator[_Pending]) -> Reply | None:
        for pending in rules:
            with self._lock:
                meets = pending.rule.fits(request) and pending.take()
            if meets:
                return pending.rule.fault(request, lambda on: self._pass(on, rules))
        return self._forward(request)

    def _forward(self, request: Request) -> Reply | None:
        connection = http.client.HTTPConnection(self._upstream, timeout=_UPSTREAM_S)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                connection.putheader(name, value)
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            headers = tuple(pair for pair in answer.getheaders() if pair[0].lower() not in _HOP)
            return Reply(status=answer.status, headers=headers, body=answer.read())
        except (OSError, http.client.HTTPException):
            return None  # the store is away, or it hung up: so does the front
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    """A thread a connection, all of them ended with the server."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, serve: Forward) -> None:
        self.serve = serve
        self.failure: BaseException | None = None
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep a rule's own error for the test."""
        del request, client_address
        self.failure = sys.exception()

    def hang_up(self) -> None:
        """End every connection, so that the threads that read from them end."""
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Reads requests from one connection and writes what the front says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _exchange(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has gone
            headers = tuple(pair for pair in self.headers.items() if pair[0].lower() not in _HOP)
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                raise ConnectionError  # in the middle of its request
            request = Request(method=self.command, target=self.path, headers=headers, body=body)
            self._send(cast("_Server", self.server).serve(request))
            return
        self.close_connection = True

    def _send(self, reply: Reply | None) -> None:
        if reply is None:
            self.close_connection = True
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers:
            if reply.framed or name.lower() != "content-length":
                self.send_header(name, value)
        if reply.framed and reply.header("content-length") is None:
            self.send_header("content-length", str(len(reply.body)))
        if not reply.framed or reply.sent is not None:
            self.send_header("connection", "close")  # http.server then closes it
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(reply)

    def _send_body(self, reply: Reply) -> None:
        body = memoryview(reply.body)[: reply.sent]
        begin = 0
        for at, gate in sorted(reply.stops, key=lambda stop: stop[0]):
            self.wfile.write(body[begin:at])
            gate.hold()
            begin = at
        self.wfile.write(body[begin:])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _exchange  # noqa: N815 - http.server looks for these names
