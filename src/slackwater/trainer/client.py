"""The trainer's client: prompts in, samples out, with retries for what the fleet says will pass."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from slackwater.api.faults import RETRYABLE, Envelope, rebuild, silent_refusal
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InternalError, SlackwaterError, UnavailableError
from slackwater.rollout.request import ANY_POLICY, PolicyConstraint
from slackwater.trainer.samples import Sample, read_samples

FIRST_PAUSE_S: Final = 0.1
"""About the wait before the first retry; it doubles up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S: Final = 2.0
_OK: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSampling:
    """How answers are drawn; see `slackwater.rollout.request.SamplingSpec`. None leaves it to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Answer ``i`` of ``n`` draws with ``seed + i``."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


DEFAULT_SAMPLING: Final = RolloutSampling()
"""Everything as the server has it."""


class RolloutClient:
    """Asks a gateway for samples; any number of calls at once. An async context manager.

    It never makes ids from text: a server that gives no ids is refused with UnsupportedError.

    Args:
        base_url: The gateway's, without ``/v1``.
        key: The inference key.
        model: Name of the served model.
        deadline_s: Seconds over which one call is retried.
        answer_s: Longest wait for one answer, in seconds; then it counts as lost and is asked again until
            ``deadline_s``.
        clock: The machine's own by default.
        jitter: Gives numbers in [0, 1) that spread the retries; `random.random` by default.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        model: str = "",
        deadline_s: float = 120.0,
        answer_s: float = 1800.0,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._model = model
        self._deadline_s = deadline_s
        self._answer_s = answer_s
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"RolloutClient({self._base_url!r}, model={self._model!r})"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=self._answer_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        if self._session is not None:
            await self._session.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        n: int = 1,
        sampling: RolloutSampling = DEFAULT_SAMPLING,
        policy: PolicyConstraint = ANY_POLICY,
    ) -> list[Sample]:
        """Answer a conversation ``n`` times.

        Args:
            messages: Each with ``role`` and ``content``.
            n: Number of samples.
            sampling: How they are drawn.
            policy: Which versions may answer; while no replica holds one, the call waits and retries.

        Raises:
            UnavailableError: Nobody answered within the deadline. PolicyUnmetError alike.
            UnsupportedError: The server gives no token ids.
            SlackwaterError: What else the server said, by kind.
        """
        return await self._samples("/v1/chat/completions", {"messages": messages}, n, sampling, policy)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int = 1,
        sampling: RolloutSampling = DEFAULT_SAMPLING,
        policy: PolicyConstraint = ANY_POLICY,
    ) -> list[Sample]:
        """Continue token ids ``n`` times; as `chat`."""
        return await self._samples("/v1/completions", {"prompt": list(prompt_ids)}, n, sampling, policy)

    async def _samples(
        self,
        path: str,
        prompt: Mapping[str, object],
        n: int,
        sampling: RolloutSampling,
        policy: PolicyConstraint,
    ) -> list[Sample]:
        body = {
            **prompt,
            "model": self._model,
            "n": n,
            "return_token_ids": True,
            "engine_data": True,
            "policy": _policy(policy),
            **msgspec.to_builtins(sampling),
        }
        return list(read_samples(await self._post(path, msgspec.json.encode(body)), n))

    async def _post(self, path: str, body: bytes) -> bytes:
        end = self._clock.monotonic() + self._deadline_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await self._post_once(path, body)
            except SlackwaterError as error:
                wait = pause * (0.5 + self._jitter())
                if error.kind not in RETRYABLE or self._clock.monotonic() + wait > end:
                    raise
            await self._clock.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _post_once(self, path: str, body: bytes) -> bytes:
        if self._session is None:
            raise InternalError("the client isn't open", hint="use it as: async with RolloutClient(...) as client")
        try:
            async with self._session.post(self._base_url + path, data=body, headers=self._headers) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise UnavailableError(f"{self._base_url} gave no answer within {self._answer_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{self._base_url} can't be reached: {error or type(error).__name__}") from error
        if response.status == _OK:
            return answer
        raise _refusal(self._base_url, response.status, answer)


def _policy(policy: PolicyConstraint) -> dict[str, object]:
    # ``kv`` only where it is asked for: servers that don't know it refuse it.
    versions = {"min_version": policy.min_version, "exact_version": policy.exact_version}
    return {**versions, "kv": "any"} if policy.any_kv else {**versions}


def _refusal(base_url: str, status: int, body: bytes) -> SlackwaterError:
    try:
        return rebuild(msgspec.json.decode(body, type=Envelope).error)
    except msgspec.MsgspecError:
        return silent_refusal(base_url, status)
