"""``POST /generate``: SGLang's native route, single prompts and batches of them, whole and as a stream."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.admission import Places
from slackwater.api.asking import check_alternatives, check_model, check_route_bytes
from slackwater.api.engine_data import EngineData
from slackwater.api.faults import Envelope, fault
from slackwater.api.foreign import WeightVersion, alternatives, check_routed, evidence, finite, masks, weight_versions
from slackwater.api.reading import Reading
from slackwater.api.respond import read_body
from slackwater.api.routed import INT32_BYTES
from slackwater.api.scoring import prompt_scoring
from slackwater.api.serving import Begun, Serving, answered
from slackwater.api.sglang_shapes import (
    SAMPLING,
    Batch,
    FinishReason,
    Generated,
    MetaInfo,
    Prompt,
    Scored,
    read_batch,
)
from slackwater.api.stream import DONE, SSE, Outlet, StreamedReply, event, made, together
from slackwater.clock import Clock
from slackwater.errors import SlackwaterError
from slackwater.rollout.evidence import Finish, TokenStep

SPARSE_FROM: Final = 64
"""An event of a stream has the whole answer so far. Each of the first 64 tokens has one; after them, one comes when
the answer has grown by a 64th, so that all of them together stay in proportion to the answer."""


def routes(serving: Serving) -> list[Route]:
    """The route, for `slackwater.api.app.create_app`. Normative page: docs/rl-api.md."""
    return [Route("/generate", _SglangRoute(serving).generate, methods=["POST"])]


class _SglangRoute:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request) -> Response:
        """``POST /generate``."""
        batch = read_batch(await read_body(request), self._serving.tokenizer.table)
        check_model(batch.model, self._serving.model)
        if batch.stream:
            return StreamedReply(partial(self._streamed, batch), SSE)
        return await answered(request, self._whole(batch), heavy=_heavy(batch))

    async def _whole(self, batch: Batch) -> Generated | list[Generated]:
        with SAMPLING.worded(_words(batch)):
            async with AsyncExitStack() as stack:
                running = await self._begin(batch, stack)
                await together(reading.read(one.begun.completer) for one in running for reading in one.all())
                replies = await made(partial(_ended, running), heavy=_heavy(batch))
                return replies if batch.is_list else replies[0]

    async def _streamed(self, batch: Batch, outlet: Outlet) -> None:
        with SAMPLING.worded(_words(batch)):
            async with AsyncExitStack() as stack:
                running = await self._begin(batch, stack)
                try:
                    await together(_stream(one, outlet, numbered=batch.is_list) for one in running)
                except SlackwaterError as error:
                    if not outlet.started:
                        raise
                    await outlet.write(event(Envelope(fault(error))))
                    return
                await outlet.write(DONE)

    async def _begin(self, batch: Batch, stack: AsyncExitStack) -> list["_Running"]:
        places = stack.enter_context(self._serving.admission.taking(sum(map(_answers, batch.prompts))))
        beside = len(batch.prompts) - 1
        running = [await self._begin_one(prompt, places, stack, beside) for prompt in batch.prompts]
        check_alternatives(
            [reading.request for one in running for reading in one.all()], self._serving.completer.window()
        )
        self._check_routes(running)
        return running

    def _check_routes(self, running: Sequence["_Running"]) -> None:
        routing, asks = self._serving.completer.routing(), [one.request for run in running for one in run.readings]
        if any(run.prompt.routes for run in running):
            check_routed(routing, "return_routed_experts")
        wide = len(routing.layers) * routing.per_token * INT32_BYTES if routing else 0
        check_route_bytes(asks, self._serving.completer.window(), wide)

    async def _begin_one(self, prompt: Prompt, places: Places, stack: AsyncExitStack, beside: int) -> "_Running":
        serving = self._serving
        ids = partial(serving.encoded, prompt.body.prompt)
        part, others = places.part(_answers(prompt)), _scorings(prompt)
        begun = await stack.enter_async_context(
            serving.begun(
                prompt.body, prompt.wanted, ids, prompt.view.stream, others=others, beside=beside, taking=part
            )
        )
        return _Running(prompt=prompt, begun=begun, clock=serving.clock, inputs=self._inputs(prompt, begun))

    def _inputs(self, prompt: Prompt, begun: Begun) -> Reading | None:
        ask = begun.readings[0].request
        if prompt.start is None or prompt.start >= len(ask.prompt_ids) - 1:
            return None
        window, text = self._serving.completer.window(), self._serving.tokenizer.stream()
        return prompt_scoring(ask, prompt.start, window=window, text=text, top_logprobs=prompt.wanted.top_logprobs)


def _words(batch: Batch) -> Mapping[str, str]:
    routes = any(prompt.routes for prompt in batch.prompts)
    return {"engine_data": "routed_experts_start_len"} if routes else {}


def _heavy(batch: Batch) -> bool:
    return any(prompt.wanted.routes_from is not None for prompt in batch.prompts)


def _ended(running: Sequence["_Running"]) -> list[Generated]:
    return [one.generated(reading, reading.completion().finish) for one in running for reading in one.readings]


def _scorings(prompt: Prompt) -> int:
    return int(prompt.start is not None)


def _answers(prompt: Prompt) -> int:
    return (prompt.body.n or 1) + _scorings(prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """One prompt under way."""

    prompt: Prompt
    begun: Begun
    clock: Clock
    inputs: Reading | None
    """Of the prompt's own log-probabilities, where they are asked for."""
    since: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "since", self.clock.monotonic())

    @property
    def readings(self) -> Sequence[Reading]:
        return self.begun.readings

    def all(self) -> list[Reading]:
        """What must be read for a whole reply."""
        return [*([] if self.inputs is None else [self.inputs]), *self.readings]

    def generated(self, reading: Reading, finish: Finish | None, *, numbered: bool = False) -> Generated:
        """An answer so far; with a finish, all of it."""
        return Generated(
            text=self.prompt.view.text(reading, finish),
            output_ids=tuple(step.token_id for step in reading.steps),
            meta_info=self._meta(reading, finish),
            index=self.prompt.first + reading.index if numbered else UNSET,
        )

    def _meta(self, reading: Reading, finish: Finish | None) -> MetaInfo:
        shows, steps = self.prompt.wanted.logprobs, reading.steps
        versions = weight_versions(steps)
        routes = reading.routes if finish and self.prompt.routes else None
        return MetaInfo(
            id=self.begun.name,
            finish_reason=self._reason(reading, finish),
            prompt_tokens=len(reading.request.prompt_ids),
            completion_tokens=len(steps),
            weight_versions=versions,
            weight_version=versions[-1].version if versions else _built(reading, finish),
            cached_tokens=reading.completion().origin.cached_tokens if finish else UNSET,
            e2e_latency=self.clock.monotonic() - self.since if finish else UNSET,
            output_token_logprobs=tuple(map(self._scored, steps)) if shows else UNSET,
            output_token_logprobs_length=len(steps) if shows else UNSET,
            output_token_sampling_mask=masks(steps) if self.prompt.masks else UNSET,
            routed_experts=routes.int32(reading.rows_end) if routes else UNSET,
            routed_experts_layers=routes.layers if routes else UNSET,
            output_top_logprobs=tuple(map(self._top, steps)) if self.prompt.wanted.top_logprobs else UNSET,
            input_token_logprobs=self._input_logprobs(reading),
            input_top_logprobs=self._input_top(),
            input_weight_versions=self._input_versions(),
            engine_data=self._evidence(reading) if finish else UNSET,
        )

    def _reason(self, reading: Reading, finish: Finish | None) -> FinishReason | None:
        if finish is None:
            return None
        if finish is Finish.LENGTH:
            return FinishReason(type="length", length=len(reading.steps))
        if finish is Finish.STOP:
            matched = self.prompt.view.matched(reading, finish)
            return FinishReason(type="stop", matched=UNSET if matched is None else matched)
        return FinishReason(type="abort", message=finish.value)

    def _scored(self, step: TokenStep) -> Scored:
        return (finite(step.logprob), step.token_id, self._name(step.token_id))

    def _top(self, step: TokenStep) -> tuple[Scored, ...]:
        return tuple((logprob, token_id, self._name(token_id)) for token_id, logprob in alternatives(step))

    def _name(self, token_id: int) -> str | None:
        if not self.prompt.names:
            return None
        return self.prompt.view.table.piece(token_id).decode("utf-8", "backslashreplace")

    def _input_logprobs(self, reading: Reading) -> tuple[Scored, ...] | UnsetType:
        if not self.prompt.wanted.logprobs:
            return UNSET
        if self.prompt.start is None:
            return ()
        first = reading.request.prompt_ids[self.prompt.start : self.prompt.start + 1]
        heads: list[Scored] = [(None, token_id, self._name(token_id)) for token_id in first]
        return (*heads, *map(self._scored, self.inputs.steps if self.inputs else ()))

    def _input_top(self) -> tuple[tuple[Scored, ...] | None, ...] | UnsetType:
        if self.inputs is None or not self.prompt.wanted.top_logprobs:
            return UNSET
        return (None, *map(self._top, self.inputs.steps))

    def _input_versions(self) -> tuple[WeightVersion, ...] | UnsetType:
        if self.inputs is None or self.prompt.start is None:
            return UNSET
        return weight_versions(self.inputs.steps, self.prompt.start + 1)

    def _evidence(self, reading: Reading) -> EngineData | UnsetType:
        wanted = self.prompt.wanted
        return evidence(reading, wanted=self.prompt.shows_data, top_logprobs=wanted.top_logprobs)


def _built(reading: Reading, finish: Finish | None) -> str | UnsetType:
    version = reading.completion().origin.prompt_version if finish else None
    return UNSET if version is None else str(version)


async def _stream(one: _Running, outlet: Outlet, *, numbered: bool) -> None:
    if one.inputs is not None:
        await one.inputs.read(one.begun.completer)
    await together(_stream_choice(one, reading, outlet, numbered=numbered) for reading in one.readings)


async def _stream_choice(one: _Running, reading: Reading, outlet: Outlet, *, numbered: bool) -> None:
    shown = 0
    async with aclosing(reading.pieces(one.begun.completer)) as pieces:
        async for piece in pieces:
            tokens = len(reading.steps)
            if piece.finish or tokens >= shown + max(1, shown // SPARSE_FROM):
                shown = tokens
                heavy = piece.finish is not None and reading.routes is not None
                await outlet.make(partial(_chunk, one, reading, piece.finish, numbered=numbered), heavy=heavy)


def _chunk(one: _Running, reading: Reading, finish: Finish | None, *, numbered: bool) -> bytes:
    return event(one.generated(reading, finish, numbered=numbered))
