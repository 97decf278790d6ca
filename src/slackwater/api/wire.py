"""``POST /v1/generate``: tokens in, tokens out. A request as JSON; its answer as NDJSON lines that lose nothing.

Lines: ``origin`` at once, and again before the first token where it changed; ``token`` for each, behind ``kv`` where
its spans don't fit into one line, and behind ``mask`` and ``routes`` where those are asked for; then ``end``. Or an
``error``, which is the last. A body that ends without ``end`` or ``error`` was cut.
"""

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import lt
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, UnsetType

from slackwater.api.faults import Fault, fault, rebuild
from slackwater.api.mask_budget import MaskBudget
from slackwater.errors import CorruptError, InternalError, InvalidInputError, SlackwaterError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import (
    MASK_ID_BYTES,
    MAX_MASK_IDS,
    Finish,
    Origin,
    PolicySpan,
    TokenStep,
    mask_ids,
)
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing


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


MAX_NAME: Final = 256
"""Most characters of a replica's name, its boot or its run where a token tells them."""
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Mover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who samples from a token on, where another replica took over."""

    replica: _Name
    boot: _Name
    run: _Name
    seed: _Number
    cached_tokens: _Number = 0
    prompt_version: _Number | None = None

    def origin(self) -> Origin:
        """The value that it carries."""
        return Origin(
            replica=ReplicaId(self.replica),
            boot=BootId(self.boot),
            run=RunId(self.run),
            seed=self.seed,
            cached_tokens=self.cached_tokens,
            prompt_version=None if self.prompt_version is None else Version(self.prompt_version),
        )


KvSpan = tuple[Annotated[Version, msgspec.Meta(ge=0, le=2**63 - 1)], int, int]
"""[version, start, end) over positions."""


class KvLine(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """The first spans of the next token's ``kv``, which has too many for its own line."""

    spans: tuple[KvSpan, ...]


class MaskLine(msgspec.Struct, frozen=True, kw_only=True, tag="mask"):
    """The support that the next token was drawn from."""

    ids: Annotated[bytes, msgspec.Meta(max_length=MASK_ID_BYTES * MAX_MASK_IDS)]
    """As `slackwater.rollout.evidence.pack_mask` makes it; in JSON in base64."""


ROUTE_BYTES_PER_LINE: Final = 45 * 1024
"""In base64 they leave room in a line."""


class RoutesLine(msgspec.Struct, frozen=True, kw_only=True, tag="routes"):
    """A piece of the next token's routes, not always of whole rows."""

    rows: Annotated[bytes, msgspec.Meta(max_length=ROUTE_BYTES_PER_LINE)]
    """As `slackwater.rollout.routes.Routing` lays them out; in JSON in base64."""


class TokenLine(msgspec.Struct, frozen=True, kw_only=True, tag="token", omit_defaults=True):
    """One token. A log-probability of minus infinity, which JSON can't write, is null."""

    token_id: int
    logprob: float | None
    version: Version
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float | None, ...] = ()
    kv: tuple[KvSpan, ...] = ()
    provisional: bool = False
    moved: Mover | None = None
    finish: Finish | None = None
    raw_logprob: float | UnsetType | None = UNSET
    """Absent where it wasn't asked for."""
    raw_top_ids: tuple[int, ...] = ()
    raw_top_logprobs: tuple[float | None, ...] = ()


class EndLine(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The answer is whole."""

    finish: Finish


class ErrorLine(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The answer failed; the tokens before this line stand."""

    error: Fault


Part = KvLine | MaskLine | RoutesLine | TokenLine
"""Lines that make a step."""
Line = OriginLine | Part | EndLine | ErrorLine

MAX_LINE_BYTES: Final = 64 * 1024
"""Readers hold no longer line."""
KV_SPANS_PER_LINE: Final = 512
"""Each takes at most 64 bytes, and all else in a token's line less than 8 KiB."""

_LINES: Final = msgspec.json.Decoder(OriginLine | KvLine | MaskLine | RoutesLine | TokenLine | EndLine | ErrorLine)
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
            for item in token_lines(step):
                yield item
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


def token_lines(step: TokenStep) -> Iterator[Part]:
    """Put a token into a line, behind others where it has many KV spans, a mask or routes.

    Raises:
        InternalError: A log-probability is no such thing: NaN, or plus infinity.
    """
    spans = tuple((span.version, span.start, span.end) for span in step.kv)
    while len(spans) > KV_SPANS_PER_LINE:
        yield KvLine(spans=spans[:KV_SPANS_PER_LINE])
        spans = spans[KV_SPANS_PER_LINE:]
    if step.mask is not None:
        yield MaskLine(ids=step.mask)
    if step.routes is not None:
        yield from _route_lines(step.routes)
    yield TokenLine(
        token_id=step.token_id,
        logprob=_write(step.logprob),
        version=step.version,
        top_ids=step.top_ids,
        top_logprobs=tuple(map(_write, step.top_logprobs)),
        kv=spans,
        provisional=step.provisional,
        moved=_mover(step.moved) if step.moved else None,
        finish=step.finish,
        raw_logprob=UNSET if step.raw_logprob is None else _write(step.raw_logprob),
        raw_top_ids=step.raw_top_ids,
        raw_top_logprobs=tuple(map(_write, step.raw_top_logprobs)),
    )


def _route_lines(rows: bytes) -> Iterator[RoutesLine]:
    for begin in range(0, max(1, len(rows)), ROUTE_BYTES_PER_LINE):
        yield RoutesLine(rows=rows[begin : begin + ROUTE_BYTES_PER_LINE])


def _mover(by: Origin) -> Mover:
    return Mover(
        replica=by.replica,
        boot=by.boot,
        run=by.run,
        seed=by.seed,
        cached_tokens=by.cached_tokens,
        prompt_version=by.prompt_version,
    )


class StepReader:
    """Makes the lines of one answer steps again. What can't be is refused here, and only here.

    Args:
        prompt_tokens: Of the request: a token's spans must cover the positions before it.
        routing: What the replica's routers choose from; None: it doesn't tell.
        routes_from: Of the request.
    """

    def __init__(self, prompt_tokens: int, routing: Routing | None = None, routes_from: int | None = None) -> None:
        self._prompt = prompt_tokens
        self._rows = prompt_tokens
        self._spans: list[KvSpan] = []
        self._mask: bytes | None = None
        self._masks = MaskBudget()
        self._routes = _RouteReader(routing, routes_from)

    def take(self, line: Part) -> TokenStep | None:
        """The step that a line completes; None where it only begins one.

        Raises:
            CorruptError: KV spans aren't adjacent, are empty, or don't reach from 0 to the token; or another replica
                takes over at the first token, without telling of its KV, or with more of it than there is; or a mask
                has no rising ids; or routes weren't asked for, are no whole rows, or more than there are positions.
        """
        if isinstance(line, RoutesLine):
            self._routes.add(line.rows, self._rows)
            return None
        if isinstance(line, MaskLine):
            self._mask = self._masks.told(_rising(line.ids))
            return None
        self._spans += line.spans if isinstance(line, KvLine) else line.kv
        if len(self._spans) > self._rows:
            raise CorruptError(f"an answer tells {len(self._spans)} KV spans of {self._rows} positions")
        if isinstance(line, KvLine):
            return None
        kv, self._spans = _covering(self._spans, self._rows), []
        mask, self._mask = self._mask, None
        routes = self._routes.take(self._rows)
        moved = self._moved(line.moved, kv) if line.moved else None
        self._rows += 1
        return TokenStep(
            token_id=line.token_id,
            logprob=_read(line.logprob),
            version=line.version,
            top_ids=line.top_ids,
            top_logprobs=tuple(map(_read, line.top_logprobs)),
            kv=kv,
            provisional=line.provisional,
            moved=moved,
            finish=line.finish,
            raw_logprob=None if isinstance(line.raw_logprob, UnsetType) else _read(line.raw_logprob),
            raw_top_ids=line.raw_top_ids,
            raw_top_logprobs=tuple(map(_read, line.raw_top_logprobs)),
            mask=mask,
            routes=routes,
        )

    def _moved(self, by: Mover, kv: Sequence[PolicySpan]) -> Origin:
        if self._rows == self._prompt or not kv or by.cached_tokens > self._rows:
            raise CorruptError(f"an answer tells of a replica that can't have taken over at position {self._rows}")
        return by.origin()


class _RouteReader:
    """Joins the pieces of each token's routes."""

    def __init__(self, routing: Routing | None, begin: int | None) -> None:
        self._row_bytes = routing.row_bytes if routing and begin is not None else 0
        self._told = begin or 0
        """Positions before this one have been told of."""
        self._held: bytearray | None = None

    def add(self, rows: bytes, end: int) -> None:
        """Take a piece of the rows before position ``end``."""
        held = self._held = self._held or bytearray()
        held += rows
        if len(held) > self._row_bytes * (end - self._told):
            raise CorruptError(f"an answer tells more routes than were asked for, before position {end}")

    def take(self, end: int) -> bytes | None:
        """The rows before position ``end``; None where no piece came."""
        held, self._held = self._held, None
        if held is None:
            return None
        if self._row_bytes and len(held) % self._row_bytes:
            raise CorruptError(f"an answer's routes before position {end} are no whole rows of {self._row_bytes} bytes")
        self._told = end
        return bytes(held)


def _covering(spans: Sequence[KvSpan], rows: int) -> tuple[PolicySpan, ...]:
    starts = [start for _, start, _ in spans]
    ends = [end for _, _, end in spans]
    whole = starts == [0, *ends[:-1]] and ends[-1] == rows and all(map(lt, starts, ends))
    if spans and not whole:
        raise CorruptError(f"an answer's KV spans don't cover the {rows} positions before their token in order")
    return tuple(PolicySpan(version=version, start=start, end=end) for version, start, end in spans)


def _rising(mask: bytes) -> bytes:
    ids = mask_ids(mask) if len(mask) % MASK_ID_BYTES == 0 else (-1,)
    if min(ids, default=0) < 0 or not all(map(lt, ids, ids[1:])):
        raise CorruptError("an answer's mask has no rising token ids")
    return mask


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
