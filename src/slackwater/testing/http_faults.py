"""What goes wrong between a client and a store's server, as functions around one exchange.

A fault is given the request and the way on, and says what the client receives::

    def teapot(request: Request, forward: Forward) -> Reply | None:
        return Reply(status=418)

Rules of a `slackwater.testing.faulty_front.FaultyFront` say which requests meet it.
"""

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import Final, TypeAlias
from urllib.parse import unquote

from slackwater.testing.bucket import Gate

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values as they stood in the message."""

PRECONDITIONS: Final = frozenset({"if-none-match", "if-match", "x-goog-if-generation-match"})
"""Headers by which stores create only if absent, and swap: RFC 9110 section 13.1, and GCS's own."""

_DATED: Final = frozenset({"date", "last-modified"})
_LISTED_DATE: Final = re.compile(rb"(<Last-?Modified>)([^<]+)")
"""S3 and GCS list ISO 8601, Azure lists HTTP dates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request."""

    method: str
    target: str
    """Path and query as they were sent, percent-encoded."""
    headers: Headers = ()
    body: bytes = b""

    @property
    def path(self) -> str:
        """Path and query, decoded."""
        return unquote(self.target)

    def header(self, name: str) -> str | None:
        """The value of a header."""
        return _value(self.headers, name)

    def without(self, names: Iterable[str]) -> "Request":
        """The request without some headers."""
        return replace(self, headers=_without(self.headers, names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer, and how it is sent."""

    status: int = 200
    headers: Headers = ()
    """A ``content-length`` among them is sent as it is; without one the body's own is."""
    body: bytes = b""
    sent: int | None = None
    """Bytes of the body after which the connection breaks; None: all are sent and it stays open."""
    framed: bool = True
    """False: no ``content-length``; the end of the connection is the end of the body."""
    stops: tuple[tuple[int, Gate], ...] = ()
    """Gates before which the sending waits, each after so many bytes of the body."""

    def header(self, name: str) -> str | None:
        """The value of a header."""
        return _value(self.headers, name)


Forward: TypeAlias = Callable[[Request], Reply | None]
"""The way on: the next rule that fits, in the end the store. None: there was no answer."""

Fault: TypeAlias = Callable[[Request, Forward], Reply | None]
"""What the client receives. None: the connection is closed without an answer."""


def _value(headers: Headers, name: str) -> str | None:
    return next((value for each, value in headers if each.lower() == name.lower()), None)


def _without(headers: Headers, names: Iterable[str]) -> Headers:
    unwanted = {name.lower() for name in names}
    return tuple((name, value) for name, value in headers if name.lower() not in unwanted)


def refuse(status: int, code: str = "", *, headers: Headers = ()) -> Fault:
    """The store isn't asked; the answer is an error.

    Args:
        status: HTTP status.
        code: The store's code in an XML body, as S3 and Azure send it; empty: no body.
        headers: More headers, such as ``retry-after``.
    """
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
    reply = Reply(status=status, headers=(("content-type", "application/xml"), *headers), body=body if code else b"")
    return lambda _request, _forward: reply


def answer(body: bytes, *, status: int = 200, content_type: str = "text/html") -> Fault:
    """The store isn't asked; something else answers in its place, such as a proxy's sign-in page."""
    reply = Reply(status=status, headers=(("content-type", content_type),), body=body)
    return lambda _request, _forward: reply


def hang_up() -> Fault:
    """The connection is closed without an answer; the store never saw the request."""
    return lambda _request, _forward: None


def lose_answer() -> Fault:
    """The store carries the request out; the connection is closed before the answer."""

    def meet(request: Request, forward: Forward) -> None:
        forward(request)

    return meet


def cut(at: int, *, framed: bool = True) -> Fault:
    """The connection breaks after so many bytes of the answer's body.

    Args:
        at: Bytes that arrive.
        framed: False: there is no ``content-length`` either, so that the end looks like one.
    """

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request)
        return reply and replace(reply, sent=at, framed=framed)

    return meet


def shorten(length: int) -> Fault:
    """The answer's body ends early, and its ``content-length`` agrees with that."""

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request)
        if reply is None:
            return None
        return replace(reply, body=reply.body[:length], headers=_without(reply.headers, ["content-length"]))

    return meet


def hold(gate: Gate, *, after: bool = False) -> Fault:
    """The request waits at the gate: a slow or stuck store.

    Args:
        gate: Opened by the test.
        after: The store carries it out first; only the answer waits.
    """

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request) if after else None
        gate.hold()
        return reply if after else forward(request)

    return meet


def stall(gate: Gate, at: int) -> Fault:
    """The answer's body waits at the gate after so many bytes, its connection open; several make a slow one."""

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request)
        return reply and replace(reply, stops=(*reply.stops, (at, gate)))

    return meet


def ignore_preconditions() -> Fault:
    """Conditional writes become plain ones, as in stores that accept such headers and do nothing about them.

    Not for stores that check signatures over these headers, as Azurite does: they refuse the altered request.
    """
    return lambda request, forward: forward(request.without(PRECONDITIONS))


def shift_clock(seconds: float) -> Fault:
    """The store's clock is wrong by so many seconds: in ``Date`` and ``Last-Modified``, and in listings."""
    by = timedelta(seconds=seconds)

    def moved(date: str) -> str:
        if date.endswith("GMT"):
            return format_datetime(parsedate_to_datetime(date) + by, usegmt=True)
        there = datetime.fromisoformat(date) + by
        return there.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request)
        if reply is None:
            return None
        headers = tuple((name, moved(value) if name.lower() in _DATED else value) for name, value in reply.headers)
        if (reply.header("content-type") or "").partition(";")[0] != "application/xml":
            return replace(reply, headers=headers)
        body = _LISTED_DATE.sub(lambda found: found[1] + moved(found[2].decode()).encode(), reply.body)
        return replace(reply, headers=_without(headers, ["content-length"]), body=body)

    return meet


def expire_token(token: str, *, status: int = 403, code: str = "ExpiredToken") -> Fault:
    """Requests that bear this session or bearer token are refused; others pass."""
    refused = refuse(status, code)

    def meet(request: Request, forward: Forward) -> Reply | None:
        borne = (
            request.header("x-amz-security-token"),
            (request.header("authorization") or "").removeprefix("Bearer "),
        )
        return refused(request, forward) if token in borne else forward(request)

    return meet


def stale_reads() -> Fault:
    """Each target is answered for ever as it was when it was first read here, absence and listings included."""
    seen: dict[tuple[str, str, str | None], Reply | None] = {}
    lock = threading.Lock()

    def meet(request: Request, forward: Forward) -> Reply | None:
        if request.method not in {"GET", "HEAD"}:
            return forward(request)
        asked = (request.method, request.target, request.header("range"))
        with lock:
            if asked not in seen:
                seen[asked] = forward(request)
            return seen[asked]

    return meet


def limit_writes(refusals: int) -> Fault:
    """Every write to an object but its first is refused with 429 so many times before it passes.

    As GCS does with more than about one write a second to one name, but counted instead of timed.
    """
    written: Counter[str] = Counter()
    lock = threading.Lock()
    refused = refuse(429, "SlowDown")

    def meet(request: Request, forward: Forward) -> Reply | None:
        if request.method not in {"PUT", "POST"}:
            return forward(request)
        with lock:
            turn = written[request.path] % (refusals + 1)
            written[request.path] += 1
        return forward(request) if turn == 0 else refused(request, forward)

    return meet


def sometimes(share: float, faults: Sequence[Fault], *, seed: int) -> Fault:
    """A share of the requests meets one of several faults, each as likely.

    Args:
        share: From 0 to 1.
        faults: What happens to those.
        seed: Of the choice, which is a function of it and of the order of the requests.
    """
    chance = random.Random(seed)  # noqa: S311 - a script, no secret
    lock = threading.Lock()

    def meet(request: Request, forward: Forward) -> Reply | None:
        with lock:
            met = chance.choice(faults) if chance.random() < share else None
        return met(request, forward) if met else forward(request)

    return meet
