"""A replica over HTTP, as a Completer: ``POST /v1/generate`` for answers, ``GET /health`` for probes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Final
from weakref import WeakSet

import aiohttp
import msgspec

from slackwater.api.faults import Envelope, rebuild, silent_refusal
from slackwater.api.wire import (
    MAX_LINE_BYTES,
    EndLine,
    ErrorLine,
    KvLine,
    Line,
    MaskLine,
    OriginLine,
    RoutesLine,
    StepReader,
    TokenLine,
    decode_line,
    encode_request,
    read_error,
)
from slackwater.errors import AuthError, CorruptError, ReplicaLostError, SlackwaterError, UnavailableError
from slackwater.ids import BootId, RunId, Version
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing
from slackwater.router.pool import ProbeReport

CONNECT_TIMEOUT_S: Final = 5.0
"""A replica that takes longer to accept a connection is lost."""
KEEP_ALIVE_S: Final = 2.0
"""Idle connections are closed here before the replica's server does: its close, met by a request, looks like a loss."""
_OK: Final = 200
_AT_ONCE: Final = 0.0
"""A time of the event loop that has passed."""


class _Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    run: RunId | None = None
    version: Version | None = None
    boot_id: BootId | None = None
    in_flight: int = 0
    draining: bool = False
    window: int | None = None
    routing: Routing | None = None


_HEALTH: Final = msgspec.json.Decoder(_Health)
_ENVELOPE: Final = msgspec.json.Decoder(Envelope)


class RemoteReplica:
    """One replica's API. Any number of answers at once; open it on the event loop that uses it.

    Args:
        base_url: Such as ``http://127.0.0.1:8001``.
        key: The replica's inference key.
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self._window: int | None = None
        self._routing: Routing | None = None
        self._waits: set[asyncio.Timeout] = set()
        """Of requests that aren't admitted yet."""
        self._responses: WeakSet[aiohttp.ClientResponse] = WeakSet()
        """Whose lines are read."""

    def __repr__(self) -> str:
        return f"RemoteReplica({self.base_url!r})"

    def window(self) -> int:
        """See `Completer.window`: as the last probe said.

        Raises:
            UnavailableError: No probe has been answered yet.
        """
        if self._window is None:
            raise UnavailableError(f"{self.base_url} hasn't told its window yet")
        return self._window

    def routing(self) -> Routing | None:
        """See `Completer.routing`: as the last probe said."""
        return self._routing

    async def probe(self) -> ProbeReport:
        """Ask how it is.

        Raises:
            ReplicaLostError: It can't be reached.
            CorruptError: Its answer is no health report.
        """
        with _reaching(self.base_url):
            async with self._open().get(f"{self.base_url}/health") as response:
                body = await response.read()
        try:
            seen = _HEALTH.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{self.base_url}/health answered nonsense: {error}") from error
        self._window = seen.window or self._window
        self._routing = seen.routing
        return ProbeReport(
            status=seen.status,
            run=seen.run,
            version=seen.version,
            boot=seen.boot_id,
            in_flight=seen.in_flight,
            draining=seen.draining,
            window=seen.window,
            routing=seen.routing,
        )

    async def complete(self, request: CompletionRequest) -> "RemoteAnswer":
        """See `Completer.complete`.

        Raises:
            ReplicaLostError: It can't be reached, or broke off or was severed before it admitted the request.
            CorruptError: Its answer broke the protocol.
            UnavailableError: It is to force routes, and doesn't tell of routers: older ones would ignore them.
        """
        if request.forced_routes and self._routing is None:
            raise UnavailableError(f"{self.base_url} tells of no routers to force", hint="ask another replica")
        url, body = f"{self.base_url}/v1/generate", encode_request(request)
        with ExitStack() as undo:
            async with self._severable():
                with _reaching(self.base_url):
                    response = await self._open().post(url, data=body, headers=self._headers)
                undo.callback(response.close)
                self._responses.add(response)
                if response.status != _OK:
                    raise await self._refusal(response)
                steps = StepReader(len(request.prompt_ids), self._routing, request.routes_from)
                answer = RemoteAnswer(self.base_url, response, steps)
                await answer.begin()
            undo.pop_all()
        return answer

    def sever(self) -> None:
        """See `slackwater.router.router.Replica.sever`."""
        waits, self._waits = self._waits, set()
        for wait in waits:
            wait.reschedule(_AT_ONCE)
        for response in self._responses:
            response.close()

    async def aclose(self) -> None:
        """Sever it and close all connections. Idempotent."""
        self.sever()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _severable(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
                if wait.when() is not None:
                    # Severed, but what was awaited came in the same turn of the loop.
                    raise TimeoutError  # noqa: TRY301 - it joins the timeout's own
        except TimeoutError as error:
            raise ReplicaLostError(f"{self.base_url} was given up before it admitted a request") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=MAX_LINE_BYTES,
            )
        return self._session

    async def _refusal(self, response: aiohttp.ClientResponse) -> SlackwaterError:
        with _reaching(self.base_url):
            async with response:
                body = await response.read()
        try:
            error = rebuild(_ENVELOPE.decode(body).error)
        except msgspec.MsgspecError:
            return silent_refusal(self.base_url, response.status)
        if isinstance(error, AuthError):
            # The caller's own key was right; ours for the replica is not.
            return UnavailableError(f"{self.base_url} refuses this gateway's key", hint="start both with one key")
        return error


class RemoteAnswer:
    """See `slackwater.rollout.completer.Answer`."""

    def __init__(self, base_url: str, response: aiohttp.ClientResponse, steps: StepReader) -> None:
        self.finish: Finish | None = None
        self._base_url = base_url
        self._response = response
        self._steps = steps
        self._origin: Origin | None = None

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        if self._origin is None:
            raise CorruptError(f"{self._base_url} didn't say who answers")
        return self._origin

    async def begin(self) -> None:
        """Read the first line, which says that the request is admitted and by whom."""
        await self._take(await self._line())
        _ = self.origin

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        while self.finish is None:
            try:
                step = await self._take(await self._line())
            except ReplicaLostError:
                if self.finish is not None:  # closed by another task while this one read
                    return
                raise
            if step is None:
                continue
            if step.finish is not None:
                await self._end(step.finish)
            yield step

    async def aclose(self) -> None:
        """See `Answer.aclose`. Closing the connection is what aborts at the replica."""
        self.finish = self.finish or Finish.ABORT
        self._response.close()

    async def _end(self, finish: Finish) -> None:
        """Read the end before the last token is shown: a reader who then closes leaves a clean connection."""
        try:
            await self._take(await self._line())
        except ReplicaLostError:
            # Nothing is missing from the answer.
            self.finish = finish

    async def _line(self) -> Line:
        with _reaching(self._base_url):
            data = await self._response.content.readline()
        if not data.endswith(b"\n"):
            raise ReplicaLostError(f"{self._base_url} broke off within an answer")
        return decode_line(data)

    async def _take(self, line: Line) -> TokenStep | None:
        match line:
            case KvLine() | MaskLine() | RoutesLine() | TokenLine():
                return self._steps.take(line)
            case OriginLine():
                self._origin = line.origin()
            case EndLine():
                self.finish = line.finish
                with suppress(aiohttp.ClientError, TimeoutError, OSError):  # nothing is missing from the answer
                    await self._response.read()
            case ErrorLine():
                raise read_error(line)
        return None


@contextmanager
def _reaching(base_url: str) -> Generator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ReplicaLostError(f"{base_url} is lost: {error or type(error).__name__}") from error
    except ValueError as error:  # aiohttp's word for a line past the buffer
        raise CorruptError(f"{base_url} sent a line of more than {MAX_LINE_BYTES} bytes") from error
