"""A target over HTTP: the control routes of one replica."""

import asyncio
from typing import Final

import aiohttp
import msgspec

from slackwater.api.faults import Envelope, rebuild
from slackwater.config.in_flight import InFlight
from slackwater.errors import CorruptError, UnavailableError
from slackwater.hotload.target import Goal, TargetStatus
from slackwater.ids import ReplicaId

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""A longer answer is no replica's."""


class HttpTarget:
    """A `slackwater.hotload.target.Target` behind ``base_url``.

    Args:
        replica: Its name.
        base_url: Such as ``http://127.0.0.1:8001``.
        control_key: The key of its control routes.
        session: Shared with other targets; the caller closes it.
        deadline_s: Seconds for each call, from connecting to the last byte.
    """

    def __init__(
        self,
        replica: ReplicaId,
        base_url: str,
        control_key: str,
        session: aiohttp.ClientSession,
        *,
        deadline_s: float = 5.0,
    ) -> None:
        self.replica: Final = replica
        self._base = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {control_key}"}
        self._session = session
        self._deadline_s = deadline_s

    async def set_target(self, goal: Goal, in_flight: InFlight | None = None) -> TargetStatus:
        """See `Target.set_target`."""
        body = {"version": goal} if in_flight is None else {"version": goal, "in_flight": in_flight}
        return self._read(await self._call("POST", "/control/v1/target", msgspec.json.encode(body)))

    async def status(self) -> TargetStatus:
        """See `Target.status`."""
        return self._read(await self._call("GET", "/control/v1/status", None))

    def _read(self, body: bytes) -> TargetStatus:
        try:
            status = msgspec.json.decode(body, type=TargetStatus)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise CorruptError(f"{self._base} does not answer as a replica does: {error}") from error
        if status.replica != self.replica:
            raise CorruptError(f"{self._base} is replica {status.replica!r}, not {self.replica!r}")
        return status

    async def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._exchange(method, self._base + path, body)
        except TimeoutError as error:
            raise UnavailableError(f"replica {self.replica} did not answer within {self._deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"replica {self.replica} can't be reached: {error}") from error

    async def _exchange(self, method: str, url: str, body: bytes | None) -> bytes:
        call = self._session.request(method, url, data=body, headers=self._headers, allow_redirects=False)
        async with call as reply:
            answer = await reply.content.read(MAX_REPLY_BYTES + 1)
            while len(answer) <= MAX_REPLY_BYTES and (more := await reply.content.read(MAX_REPLY_BYTES)):
                answer += more
            if len(answer) > MAX_REPLY_BYTES:
                raise CorruptError(f"{url} answers with more than {MAX_REPLY_BYTES} bytes")
            if reply.ok:
                return answer
            raise self._refusal(reply.status, answer)

    def _refusal(self, status: int, answer: bytes) -> Exception:
        try:
            return rebuild(msgspec.json.decode(answer, type=Envelope).error)
        except (msgspec.MsgspecError, UnicodeError):
            return CorruptError(f"replica {self.replica} answered {status} without saying why")
