"""``POST /inference/v1/generate``: tokens in, tokens out, in the shape of vLLM's route of that name."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.arrays import Array
from slackwater.api.asking import Wanted, check_model, text_wanted
from slackwater.api.bodies import read_known
from slackwater.api.engine_data import EngineData
from slackwater.api.faults import Envelope, fault
from slackwater.api.foreign import (
    Dialect,
    TextView,
    WeightVersion,
    alternatives,
    check_routed,
    ended,
    evidence,
    finite,
    masks,
    text_body,
    weight_versions,
    with_routes,
)
from slackwater.api.reading import Piece, Reading
from slackwater.api.replies import Usage
from slackwater.api.respond import read_body
from slackwater.api.schema import EngineDataField, PolicyField, StreamOptions, TextBody
from slackwater.api.serving import Begun, Serving, answered
from slackwater.api.shapes import usage
from slackwater.api.stream import DONE, SSE, Outlet, StreamedReply, event, made, together
from slackwater.errors import InvalidInputError, SlackwaterError
from slackwater.rollout.evidence import Finish, TokenStep

ROUTES_START: Final = "routed_experts_prompt_start"
"""Asks for routes, and from which position on: vLLM's server has one setting for all requests instead."""
SAMPLING: Final = Dialect(
    same=frozenset({
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens",
        "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs",
        "bad_words", "prompt_logprobs", "structured_outputs",
    }),
    renamed=MappingProxyType({"trace_decode_token_ids": "forced_token_ids"}),
    neutral=MappingProxyType({
        "skip_special_tokens": (), "include_stop_str_in_output": (),
        "spaces_between_special_tokens": (), "detokenize": (), "output_kind": (), "flat_logprobs": (),
        ROUTES_START: (), "extra_args": ({},),
        "allowed_token_ids": ([],), "logits_processors": ([],), "bad_words_token_ids": ([],),
    }),
    words=MappingProxyType({"logprobs": "top_logprobs", "token_ids": "prompt"}),
)  # fmt: skip
"""The sampling parameters of vLLM. Some shape the text alone."""
HINTS: Final = frozenset({"session_id", "assistant_tokens_mask", "token_offsets"})
"""Fields without effect: routing hints, and what vLLM's render route puts into a body."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /inference/v1/generate``."""

    token_ids: tuple[int, ...]
    """The prompt."""
    sampling_params: Annotated[
        dict[str, object], msgspec.Meta(extra_json_schema={"propertyNames": {"enum": sorted(SAMPLING.names)}})
    ] = msgspec.field(default_factory=dict[str, object])
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    """``text`` adds the text to every choice, and that of tokens to log-probabilities."""
    return_token_ids: bool | None = None
    """Repeat the prompt's ids in the reply."""
    cache_salt: str | None = None
    policy: PolicyField | None = None
    engine_data: bool | EngineDataField | None = None
    forced_routes: Array | None = None


class GeneratedLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token and its log-probability, named twice: as vLLM names it now, and as it did."""

    token_id: int
    token: str
    """``token_id:N``; its text where the output mode is ``text``."""
    logprob: float
    bytes: tuple[int, ...] | None = None
    """Its true bytes, in that mode."""


class GeneratedPosition(GeneratedLogprob, frozen=True, kw_only=True):
    """The sampled token of a position."""

    top_logprobs: tuple[GeneratedLogprob, ...]
    """The sampled token, then the others by rank; empty unless alternatives were asked for."""


class GeneratedLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per token."""

    content: tuple[GeneratedPosition, ...]


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, whole or a chunk's part."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: GeneratedLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    """The stop string that ended it, or the token where it is one of ``stop_token_ids``."""
    text: str | UnsetType = UNSET
    sampling_mask: tuple[tuple[int, ...], ...] | UnsetType | None = UNSET
    """Where ``engine_data`` asks for it: the ids that each token was drawn from."""
    routed_experts: str | UnsetType | None = UNSET
    """Where the sampling parameters ask for it: base64 of an ``.npy`` file of shape [rows, layers, experts per token].
    null where rows are missing. In a stream, of the last chunk alone."""
    routed_experts_layers: tuple[int, ...] | UnsetType = UNSET
    """An addition: the layers on its second axis, those that have a router. Where ``routed_experts`` is."""
    weight_versions: tuple[WeightVersion, ...] | UnsetType = UNSET
    """In a stream, of the last chunk alone."""
    engine_data: EngineData | UnsetType = UNSET
    """Likewise."""


class GeneratedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply or one chunk."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: tuple[GeneratedChoice, ...]
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    """On request; in a stream, of its first chunk alone."""


_DECODER: Final = msgspec.json.Decoder(GenerateBody)
_KNOWN: Final = frozenset(GenerateBody.__struct_fields__)


def routes(serving: Serving) -> list[Route]:
    """The route, for `slackwater.api.app.create_app`. Normative page: docs/rl-api.md."""
    return [Route("/inference/v1/generate", _VllmRoute(serving).generate, methods=["POST"])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    body: GenerateBody
    text: TextBody
    wanted: Wanted
    view: TextView

    def reply(
        self, begun: Begun, choices: Iterable[GeneratedChoice], *, counted: Usage | None = None, opens: bool = False
    ) -> GeneratedReply:
        """Fill in what all replies and chunks share."""
        shows_prompt = opens and bool(self.body.return_token_ids)
        return GeneratedReply(
            request_id=f"generate-tokens-{begun.name}",
            model=begun.readings[0].request.model,
            created=begun.created,
            output_mode=self.body.output_mode,
            choices=tuple(choices),
            usage=counted,
            prompt_token_ids=begun.readings[0].request.prompt_ids if shows_prompt else UNSET,
        )

    def choice(self, reading: Reading, steps: Sequence[TokenStep], finish: Finish | None, text: str) -> GeneratedChoice:
        """A part of an answer; the last one has its evidence."""
        routes = reading.routes if finish and self.routes_start is not None else None
        return GeneratedChoice(
            index=reading.index,
            token_ids=tuple(step.token_id for step in steps),
            logprobs=self._logprobs(steps) if self.wanted.logprobs else None,
            finish_reason=ended(finish),
            stop_reason=self._stop_reason(reading, finish),
            text=text if self.shows_text else UNSET,
            sampling_mask=masks(steps) if self.wanted.sampling_mask else UNSET,
            routed_experts=routes.npy(reading.rows_end) if routes else UNSET,
            routed_experts_layers=routes.layers if routes else UNSET,
            weight_versions=weight_versions(reading.steps) if finish else UNSET,
            engine_data=self._evidence(reading) if finish else UNSET,
        )

    @property
    def routes_start(self) -> int | None:
        """From where on routes are asked for in vLLM's words."""
        return _routes_start(self.body.sampling_params)

    @property
    def words(self) -> Mapping[str, str]:
        """What of ours is asked for in other words, and which."""
        return {} if self.routes_start is None else {"engine_data": ROUTES_START}

    @property
    def shows_text(self) -> bool:
        return self.body.output_mode == "text"

    def _stop_reason(self, reading: Reading, finish: Finish | None) -> int | str | None:
        matched = self.view.matched(reading, finish)
        named = isinstance(matched, str) or matched in reading.request.sampling.stop_token_ids
        return matched if named else None

    def _evidence(self, reading: Reading) -> EngineData | UnsetType:
        return evidence(reading, wanted=bool(self.body.engine_data), top_logprobs=self.wanted.top_logprobs)

    def _logprobs(self, steps: Sequence[TokenStep]) -> GeneratedLogprobs:
        return GeneratedLogprobs(content=tuple(map(self._position, steps)))

    def _position(self, step: TokenStep) -> GeneratedPosition:
        own = self._entry(step.token_id, step.logprob)
        others = [self._entry(token, value) for token, value in alternatives(step) if token != step.token_id]
        return GeneratedPosition(
            token_id=own.token_id,
            token=own.token,
            logprob=own.logprob,
            bytes=own.bytes,
            top_logprobs=(own, *others) if self.wanted.top_logprobs else (),
        )

    def _entry(self, token_id: int, logprob: float) -> GeneratedLogprob:
        if not self.shows_text:
            return GeneratedLogprob(token_id=token_id, token=f"token_id:{token_id}", logprob=finite(logprob))
        piece = self.view.table.piece(token_id)
        name = piece.decode("utf-8", "backslashreplace")
        return GeneratedLogprob(token_id=token_id, token=name, logprob=finite(logprob), bytes=tuple(piece))


class _VllmRoute:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request) -> Response:
        """``POST /inference/v1/generate``."""
        asked = self._asked(await read_body(request))
        if asked.wanted.stream:
            return StreamedReply(partial(self._streamed, asked), SSE)
        return await answered(request, self._whole(asked), heavy=asked.wanted.routes_from is not None)

    def _asked(self, data: bytes) -> _Asked:
        body = read_known(_DECODER, data, _KNOWN, HINTS)
        check_model(body.model or "", self._serving.model)
        if _routes_start(body.sampling_params) is not None:
            check_routed(self._serving.completer.routing(), ROUTES_START)
        # vLLM fills what is left of the window where no limit is named.
        left = max(1, self._serving.completer.window() - len(body.token_ids))
        fields = SAMPLING.fields(body.sampling_params)
        with SAMPLING.worded():
            text = text_body({"max_tokens": left, **fields, **_shared(body)})
            wanted = text_wanted(text)
        shown = body.sampling_params
        view = TextView(
            table=self._serving.tokenizer.table,
            stops=wanted.stops,
            specials=shown.get("skip_special_tokens") is False,
            keeps_stop=bool(shown.get("include_stop_str_in_output")),
        )
        return _Asked(body=body, text=text, wanted=wanted, view=view)

    async def _whole(self, asked: _Asked) -> GeneratedReply:
        with SAMPLING.worded(asked.words):
            async with self._serving.begun(
                asked.text, asked.wanted, partial(_ready, asked), asked.view.stream
            ) as begun:
                await together(reading.read(begun.completer) for reading in begun.readings)
                return await made(partial(_ended, asked, begun), heavy=asked.wanted.routes_from is not None)

    async def _streamed(self, asked: _Asked, outlet: Outlet) -> None:
        with SAMPLING.worded(asked.words):
            async with self._serving.begun(
                asked.text, asked.wanted, partial(_ready, asked), asked.view.stream
            ) as begun:
                await self._stream(asked, begun, outlet)

    async def _stream(self, asked: _Asked, begun: Begun, outlet: Outlet) -> None:
        try:
            await together(_stream_choice(asked, begun, reading, outlet) for reading in begun.readings)
        except SlackwaterError as error:
            if not outlet.started:
                raise
            await outlet.write(event(Envelope(fault(error))))
            return
        if asked.wanted.usage:
            await outlet.write(event(asked.reply(begun, (), counted=usage(begun.readings))))
        await outlet.write(DONE)


def _ended(asked: _Asked, begun: Begun) -> GeneratedReply:
    choices = [
        asked.choice(reading, reading.steps, end := reading.completion().finish, asked.view.text(reading, end))
        for reading in begun.readings
    ]
    return asked.reply(begun, choices, counted=usage(begun.readings), opens=True)


async def _ready(asked: _Asked) -> tuple[int, ...]:
    return asked.body.token_ids


async def _stream_choice(asked: _Asked, begun: Begun, reading: Reading, outlet: Outlet) -> None:
    sent = 0
    async with aclosing(reading.pieces(begun.completer)) as pieces:
        async for piece in pieces:
            text = _added(asked.view, reading, piece, sent)
            sent += len(text)
            steps = (piece.step,) if piece.step else ()
            heavy = piece.finish is not None and reading.routes is not None
            choice = await made(partial(asked.choice, reading, steps, piece.finish, text), heavy=heavy)
            await outlet.make(partial(_chunk, asked, begun, choice, outlet), heavy=heavy)


def _chunk(asked: _Asked, begun: Begun, choice: GeneratedChoice, outlet: Outlet) -> bytes:
    return event(asked.reply(begun, (choice,), opens=not outlet.started))


def _added(view: TextView, reading: Reading, piece: Piece, sent: int) -> str:
    return view.text(reading, piece.finish)[sent:] if piece.finish else piece.text


def _shared(body: GenerateBody) -> dict[str, object]:
    start = _routes_start(body.sampling_params)
    fields = {
        "prompt": body.token_ids,
        "request_id": body.request_id,
        "stream": body.stream,
        "stream_options": body.stream_options,
        "cache_salt": body.cache_salt,
        "policy": body.policy,
        "engine_data": body.engine_data if start is None else with_routes(body.engine_data, start),
        "forced_routes": body.forced_routes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _routes_start(params: Mapping[str, object]) -> int | None:
    start = params.get(ROUTES_START)
    if start is None or (isinstance(start, int) and not isinstance(start, bool)):
        return start
    raise InvalidInputError(f"{ROUTES_START} is wrong: it is a number", hint="name a position of the prompt")
