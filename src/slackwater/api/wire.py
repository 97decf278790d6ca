"""``POST /v1/generate``: tokens in, tokens out. A request as JSON; its answer as NDJSON lines that lose nothing.

Lines: ``origin`` at once, and again before the first token where it changed; ``token`` for each; then ``end``. Or
an ``error``, which is the last. A body that ends without ``end`` or ``error`` was cut.
"""

import math
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from slackwater.api.faults import Fault, fault, rebuild
from slackwater.errors import CorruptError, InternalError, InvalidInputError, SlackwaterError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest


class OriginLine(msgspec.Struct, frozen=True, kw_only=True, tag="origin"):
    """Who answers; the last one stands."""

    replica: ReplicaId
    boot: BootId
    run: RunId
    seed: int
    cached_tokens: int = 0
    prompt_version: Version | None = None

    def origin(self) -> Origin:
        """The value that it carries."""
        return Origin(
            replica=self.replica,
            boot=self.boot,
            run=self.run,
            seed=self.seed,
            cached_tokens=self.cached_tokens,
            prompt_version=self.prompt_version,
        )


class TokenLine(msgspec.Struct, frozen=True, kw_only=True, tag="token", omit_defaults=True):
    """One token. A log-probability of minus infinity, which JSON can't write, is null."""

    token_id: int
    logprob: float | None
    version: Version
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float | None, ...] = ()
    finish: Finish | None = None

    def step(self) -> TokenStep:
        """The value that it carries."""
        return TokenStep(
            token_id=self.token_id,
            logprob=_read(self.logprob),
            version=self.version,
            top_ids=self.top_ids,
            top_logprobs=tuple(map(_read, self.top_logprobs)),
            finish=self.finish,
        )


class EndLine(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The answer is whole."""

    finish: Finish


class ErrorLine(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The answer failed; the tokens before this line stand."""

    error: Fault


Line = OriginLine | TokenLine | EndLine | ErrorLine

MAX_LINE_BYTES: Final = 64 * 1024
"""Readers hold no longer line."""

_LINES: Final = msgspec.json.Decoder(OriginLine | TokenLine | EndLine | ErrorLine)
_REQUESTS: Final = msgspec.json.Decoder(CompletionRequest)


def encode_request(request: CompletionRequest) -> bytes:
    """The body of a request."""
    return msgspec.json.encode(request)


def decode_request(body: bytes) -> CompletionRequest:
    """Read a body back.

    Raises:
        InvalidInputError: It isn't such a request.
    """
    try:
        return _REQUESTS.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the body is no completion request: {error}", hint="see docs/rl-api.md") from error


def decode_line(data: bytes) -> Line:
    """Read one line.

    Raises:
        CorruptError: It breaks the protocol.
    """
    try:
        return _LINES.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"a line of the answer can't be read: {error}") from error


async def lines(answer: Answer) -> AsyncIterator[Line]:
    """Put an answer into lines; what it raises becomes the last one. The caller closes the answer."""
    sent = answer.origin
    yield origin_line(sent)
    try:
        async for step in answer:
            if sent != answer.origin:
                sent = answer.origin
                yield origin_line(sent)
            yield token_line(step)
        yield _end_line(answer)
    except SlackwaterError as error:
        yield ErrorLine(error=fault(error))


def origin_line(origin: Origin) -> OriginLine:
    """Put an origin into a line."""
    return OriginLine(
        replica=origin.replica,
        boot=origin.boot,
        run=origin.run,
        seed=origin.seed,
        cached_tokens=origin.cached_tokens,
        prompt_version=origin.prompt_version,
    )


def token_line(step: TokenStep) -> TokenLine:
    """Put a token into a line.

    Raises:
        InternalError: A log-probability is no such thing: NaN, or plus infinity.
    """
    return TokenLine(
        token_id=step.token_id,
        logprob=_write(step.logprob),
        version=step.version,
        top_ids=step.top_ids,
        top_logprobs=tuple(map(_write, step.top_logprobs)),
        finish=step.finish,
    )


def read_error(line: ErrorLine) -> SlackwaterError:
    """The error that a line carries."""
    return rebuild(line.error)


def _end_line(answer: Answer) -> EndLine:
    if answer.finish is None:
        raise InternalError("an answer ended without a finish")
    return EndLine(finish=answer.finish)


def _write(logprob: float) -> float | None:
    if math.isnan(logprob) or logprob == math.inf:
        raise InternalError(f"the engine reported a log-probability of {logprob}")
    return None if logprob == -math.inf else logprob


def _read(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob
