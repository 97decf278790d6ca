"""The trainer's client: prompts in, samples out, with retries for what the fleet says will pass."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from slackwater.api.faults import MAX_RETRY_AFTER_S, RETRYABLE, Envelope, rebuild, silent_refusal
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InternalError, OverloadedError, SlackwaterError, UnavailableError
from slackwater.rollout.request import ANY_POLICY, PolicyConstraint
from slackwater.trainer.samples import Sample, read_samples

FIRST_PAUSE_S: Final = 0.1
"""About the wait before the first retry; it doubles up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S: Final = 2.0
_OK: Final = 200
_ASK_LATER: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Whose ``Retry-After`` is kept to. A policy that isn't met yet may be at any moment."""


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
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    """By token id."""
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    raw_logprobs: bool = False
    """Samples have raw log-probabilities too."""
    sampling_mask: bool = False
    """Samples have the support of each draw."""
    routes_from: int | None = None
    """Samples have the routes of positions from this one of the prompt on."""

    def fields(self) -> dict[str, object]:
        """As the body of a request has them."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        evidence: dict[str, object] = {name: True for name in ("raw_logprobs", "sampling_mask") if named.pop(name)}
        start = named.pop("routes_from")
        if start is not None:
            evidence["routed_experts"] = {"start": start}
        # An object only where it is asked for: older servers take a flag alone.
        return {**named, "engine_data": evidence or True}


Message = Mapping[str, object]
"""``role`` and what it has: ``content``, and as the API has them ``tool_calls``, ``tool_call_id``, ``name`` and
``reasoning_content``."""
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
        messages: Sequence[Message],
        *,
        n: int = 1,
        sampling: RolloutSampling = DEFAULT_SAMPLING,
        policy: PolicyConstraint = ANY_POLICY,
    ) -> list[Sample]:
        """Answer a conversation ``n`` times.

        Args:
            messages: The conversation, tool messages included.
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
            "policy": _policy(policy),
            **sampling.fields(),
        }
        return list(read_samples(await self._post(path, msgspec.json.encode(body)), n))

    async def _post(self, path: str, body: bytes) -> bytes:
        end = self._clock.monotonic() + self._deadline_s
        pause = FIRST_PAUSE_S
        while True:
            told = await self._post_once(path, body)
            if isinstance(told, bytes):
                return told
            spread = self._jitter()
            wait = max(pause * (0.5 + spread), told.wait_s * (1.0 + spread / 4))
            if told.error.kind not in RETRYABLE or self._clock.monotonic() + wait > end:
                raise told.error
            await self._clock.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _post_once(self, path: str, body: bytes) -> "bytes | _Refusal":
        if self._session is None:
            raise InternalError("the client isn't open", hint="use it as: async with RolloutClient(...) as client")
        try:
            async with self._session.post(self._base_url + path, data=body, headers=self._headers) as response:
                answer = await response.read()
        except TimeoutError:
            return _Refusal(error=UnavailableError(f"{self._base_url} gave no answer within {self._answer_s:g} s"))
        except (aiohttp.ClientError, OSError) as error:
            lost = UnavailableError(f"{self._base_url} can't be reached: {error or type(error).__name__}")
            return _Refusal(error=lost)
        if response.status == _OK:
            return answer
        wait_s = _told_wait(response.headers.get("Retry-After", "")) if response.status in _ASK_LATER else 0.0
        return _Refusal(error=_refusal(self._base_url, response.status, answer), wait_s=wait_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """Why one attempt gave nothing, and how long to wait at least."""

    error: SlackwaterError
    wait_s: float = 0.0


def _told_wait(text: str) -> float:
    """Seconds that a ``Retry-After`` asks for, as far as it is believed; 0 where it gives no number of them."""
    return float(min(int(text), MAX_RETRY_AFTER_S)) if re.fullmatch(r"[0-9]{1,9}", text) else 0.0


def _policy(policy: PolicyConstraint) -> dict[str, object]:
    # The younger fields only where they are asked for: servers that don't know them refuse them.
    versions = {"min_version": policy.min_version, "exact_version": policy.exact_version}
    lag = {} if policy.max_lag is None else {"max_lag": policy.max_lag}
    kv = {"kv": "any"} if policy.any_kv else {}
    return {**versions, **lag, **kv}


def _refusal(base_url: str, status: int, body: bytes) -> SlackwaterError:
    try:
        return rebuild(msgspec.json.decode(body, type=Envelope).error)
    except msgspec.MsgspecError:
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return OverloadedError(f"{base_url} takes no more requests now", hint="ask again later")
        return silent_refusal(base_url, status)
