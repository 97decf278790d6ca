"""From a body to requests: defaults, bounds and what the caller wants to see of the evidence. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from slackwater.api.schema import ChatBody, EngineDataField, PolicyField, RoutesField, Sampled, TextBody
from slackwater.errors import ContextLengthError, InvalidInputError, NotFoundError
from slackwater.ids import RequestId, Version
from slackwater.rollout.request import (
    ANY_POLICY,
    MAX_TOKENS,
    MAX_TOP_K,
    CompletionRequest,
    PolicyConstraint,
    SamplingSpec,
)

DEFAULT_MAX_TOKENS: Final = 1024
"""Most tokens of an answer whose request names no limit; less where less of the window is left."""
MAX_CHOICES: Final = 64
"""Most answers to one request."""
MAX_STOPS: Final = 16
"""Most stop strings."""
MAX_STOP_CHARACTERS: Final = 256
"""Longest stop string."""
MAX_MESSAGES: Final = 10_000
"""Most messages of one conversation."""
MAX_ALTERNATIVES: Final = 4 * 1024 * 1024
"""Most alternatives of one reply: answers times tokens times alternatives per token."""
MAX_ROUTE_BYTES: Final = 256 * 1024 * 1024
"""Most bytes of routes of one reply, before base64."""
MAX_REQUEST_ID: Final = 128
"""Longest name of a request."""
_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID}}}")
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the reply shows."""

    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    """A stream's last chunk carries the usage."""
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    engine_data: bool = False
    raw_logprobs: bool = False
    """As part of ``engine_data``."""
    sampling_mask: bool = False
    """Likewise."""
    routes_from: int | None = None
    """The first position whose routes are wanted; None: of none."""
    prefills: bool = False
    """``max_tokens`` is 0: the prompt is read, and the answer has no token."""
    prior_ids: tuple[int, ...] = ()
    """Of an episode that goes on: how many of them the prompt kept is told."""


def chat_wanted(body: ChatBody) -> Wanted:
    """Read what a chat body wants, and refuse what it can't have.

    Raises:
        InvalidInputError: A bound is exceeded.
        UnsupportedError: A field asks for something that this server doesn't do.
    """
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise InvalidInputError("messages is out of range", hint=f"send 1 to {MAX_MESSAGES}")
    if body.top_logprobs and not body.logprobs:
        raise InvalidInputError("top_logprobs needs logprobs", hint='send "logprobs": true as well')
    wanted = _wanted(body, logprobs=bool(body.logprobs), top=body.top_logprobs or 0)
    return replace(wanted, prior_ids=body.prior_token_ids or ())


def text_wanted(body: TextBody) -> Wanted:
    """As `chat_wanted`."""
    return _wanted(body, logprobs=body.logprobs is not None, top=body.logprobs or 0)


def _wanted(body: Sampled, *, logprobs: bool, top: int) -> Wanted:
    body.refuse()
    evidence = body.evidence()
    _within("n", _or(body.n, 1), 1, MAX_CHOICES)
    _within("top_k", _or(body.top_k, 0), -1, MAX_TOP_K)
    for name, limit in _limits(body):
        _within(name, limit, 0, MAX_TOKENS)
    if body.request_id is not None:
        check_request_id(body.request_id)
    return Wanted(
        stops=_stops(body.stop),
        stream=bool(body.stream),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=logprobs,
        top_logprobs=top,
        token_ids=bool(body.return_token_ids),
        engine_data=evidence is not None,
        raw_logprobs=evidence is not None and evidence.raw_logprobs,
        sampling_mask=evidence is not None and evidence.sampling_mask,
        routes_from=_routes_from(evidence),
        prefills=_prefills(body),
    )


def _routes_from(evidence: EngineDataField | None) -> int | None:
    asked = evidence.routed_experts if evidence else False
    return asked.start if isinstance(asked, RoutesField) else 0 if asked else None


def _prefills(body: Sampled) -> bool:
    prefills = _limit(body) == 0
    if prefills and (body.min_tokens or body.forced_token_ids):
        raise InvalidInputError(
            "max_tokens is wrong: 0 leaves no token for min_tokens or forced_token_ids",
            hint="leave these out, or allow tokens",
        )
    return prefills


def _limit(body: Sampled) -> int | None:
    return next((limit for _, limit in _limits(body)), None)


def _limits(body: Sampled) -> Iterator[tuple[str, int]]:
    """Most tokens of the answer, each with its field; the first one counts."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        yield "max_completion_tokens", body.max_completion_tokens
    if body.max_tokens is not None:
        yield "max_tokens", body.max_tokens


def check_model(asked: str, served: str) -> None:
    """Raises NotFoundError unless ``asked`` is empty or the model that is served."""
    if asked not in ("", served):
        raise NotFoundError(f"model {asked[:80]!r} isn't served here", hint=f"this server has {served!r}")


def check_request_id(text: str) -> str:
    """Give a caller's name for a request back.

    Raises:
        InvalidInputError: It is empty, too long, or has other characters.
    """
    if not _REQUEST_ID.fullmatch(text):
        raise InvalidInputError(
            f"request_id {text[:80]!r} is no name",
            hint=f"use 1 to {MAX_REQUEST_ID} letters, digits, '.', '_', ':' and '-'",
        )
    return text


def requests(
    body: Sampled,
    wanted: Wanted,
    prompt_ids: tuple[int, ...],
    *,
    window: int,
    request_id: str,
    model: str,
    forced_routes: bytes = b"",
) -> tuple[CompletionRequest, ...]:
    """One request per choice; choice ``i`` draws with ``seed + i``.

    Args:
        body: The decoded body.
        wanted: Of the same body.
        prompt_ids: The rendered prompt.
        window: Context window in tokens.
        request_id: Unique; each choice appends its index.
        model: Name of the served model.
        forced_routes: Of the same body, checked.

    Raises:
        ContextLengthError: Nothing of the window is left.
        InvalidInputError: A bound is exceeded.
    """
    left = window - len(prompt_ids)
    if left < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and the window {window}", hint="shorten the prompt"
        )
    if wanted.routes_from is not None and not 0 <= wanted.routes_from < len(prompt_ids):
        raise InvalidInputError(
            f"engine_data is out of range: routes from position {wanted.routes_from}",
            hint=f"name a position of the prompt, which has {len(prompt_ids)}",
        )
    forced = body.forced_token_ids or ()
    if len(forced) > left:
        raise InvalidInputError("forced_token_ids exceeds the window", hint=f"{left} tokens are left of {window}")
    asks = tuple(
        CompletionRequest(
            request_id=RequestId(f"{request_id}-{index}"),
            prompt_ids=prompt_ids,
            sampling=_sampling(body, wanted, index, len(forced) or min(left, DEFAULT_MAX_TOKENS)),
            policy=policy_constraint(body.policy),
            forced_ids=forced,
            streamed=wanted.stream,
            model=model,
            cache_salt=body.cache_salt or "",
            routes_from=wanted.routes_from,
            forced_routes=forced_routes,
        )
        for index in range(_or(body.n, 1))
    )
    check_alternatives(asks, window)
    return asks


def check_alternatives(asks: Sequence[CompletionRequest], window: int) -> None:
    """Raises InvalidInputError where the log-probabilities of all alternatives are too many for one reply.

    Args:
        asks: All that one reply answers.
        window: Context window in tokens.
    """
    most = sum(ask.sampling.top_logprobs * min(ask.sampling.max_tokens, window - len(ask.prompt_ids)) for ask in asks)
    if most > MAX_ALTERNATIVES:
        raise InvalidInputError(
            f"top_logprobs is out of range: one reply could have {most} alternatives",
            hint=f"answers times max_tokens times top_logprobs: at most {MAX_ALTERNATIVES}",
        )


def check_route_bytes(asks: Sequence[CompletionRequest], window: int, row_bytes: int) -> None:
    """Raises InvalidInputError where the routes of all answers are too many for one reply.

    Args:
        asks: All that one reply answers.
        window: Context window in tokens.
        row_bytes: Of one position, as the reply has it.
    """
    positions = sum(
        min(window, len(ask.prompt_ids) + ask.sampling.max_tokens) - ask.routes_from
        for ask in asks
        if ask.routes_from is not None
    )
    most = positions * row_bytes
    if most > MAX_ROUTE_BYTES:
        raise InvalidInputError(
            f"engine_data is out of range: one reply could have {most} bytes of routed_experts",
            hint=f"at most {MAX_ROUTE_BYTES}: ask for a later start, fewer tokens or fewer choices",
        )


def _sampling(body: Sampled, wanted: Wanted, index: int, default_tokens: int) -> SamplingSpec:
    return SamplingSpec(
        # Every engine samples a token; the reader of an answer without one drops it.
        max_tokens=1 if wanted.prefills else _or(_limit(body), default_tokens),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=0 if body.top_k == -1 else _or(body.top_k, 0),
        seed=None if body.seed is None else body.seed + index,
        stop_token_ids=body.stop_token_ids or (),
        top_logprobs=wanted.top_logprobs,
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_biases(body.logit_bias or {}),
        min_tokens=_or(body.min_tokens, 0),
        ignore_eos=bool(body.ignore_eos),
        raw_logprobs=wanted.raw_logprobs,
        sampling_mask=wanted.sampling_mask,
        grammar=body.grammar(),
    )


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    wrong = next((name for name in given if not _TOKEN_ID.fullmatch(name)), None)
    if wrong is not None:
        raise InvalidInputError(f"logit_bias is wrong: {wrong[:80]!r} is no token id", hint="name ids in decimals")
    return tuple((int(name), bias) for name, bias in given.items())


def policy_constraint(policy: PolicyField | None) -> PolicyConstraint:
    """Which versions a request admits.

    Raises:
        InvalidInputError: A version is negative, or no version can meet both bounds.
    """
    if policy is None:
        return ANY_POLICY
    low, exact = policy.min_version, policy.exact_version
    if min(_or(low, 0), _or(exact, 0)) < 0:
        raise InvalidInputError("policy is out of range", hint="versions count from 0")
    return PolicyConstraint(
        min_version=None if low is None else Version(low),
        exact_version=None if exact is None else Version(exact),
        any_kv=policy.kv == "any",
        max_lag=policy.max_lag,
    )


def _stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise InvalidInputError(
            "stop is out of range",
            hint=f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
        )
    return stops


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInputError(f"{name} is out of range", hint=f"allowed: {least} to {most}")


_Value = TypeVar("_Value")


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value
