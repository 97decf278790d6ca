"""The HTTP API over any Completer: OpenAI's routes, and tokens in, tokens out. Replica and gateway both serve it."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from slackwater.api import capabilities, openapi, score, sglang, tokenizing, vllm
from slackwater.api.admission import Admission, Capacity
from slackwater.api.asking import Wanted, chat_wanted, check_model, check_request_id, text_wanted
from slackwater.api.auth import KeyGate, Keys
from slackwater.api.choices import Exchange, stream, whole
from slackwater.api.conversation import conversation, parsing
from slackwater.api.foreign import worded
from slackwater.api.live import Live
from slackwater.api.replies import Aborted, ModelCard, ModelList, Reply
from slackwater.api.respond import HANDLERS, json_reply, read_body
from slackwater.api.schema import Sampled, read_abort, read_chat, read_text
from slackwater.api.serving import Serving, answered
from slackwater.api.shapes import ChatShape, Shape, TextShape
from slackwater.api.stream import NDJSON, SSE, Outlet, StreamedReply, line
from slackwater.api.text import TextStream
from slackwater.api.wire import decode_request, lines
from slackwater.clock import Clock, SystemClock
from slackwater.rollout.completer import Completer
from slackwater.rollout.request import CompletionRequest

if TYPE_CHECKING:
    from slackwater.api.tokens import ChatTokenizer

_PARTS: Final = (
    tokenizing.routes,
    score.routes,
    capabilities.routes,
    vllm.routes,
    sglang.routes,
    openapi.routes,
)
"""Further routes, each a module of its own."""

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
"""What an app starts before its first request and ends after its last."""


def create_app(
    completer: Completer,
    tokenizer: "ChatTokenizer",
    keys: Keys,
    *,
    model_name: str,
    extra_routes: Sequence[BaseRoute] = (),
    lifespan: Lifespan | None = None,
    clock: Clock | None = None,
    capacity: Capacity | None = None,
) -> Starlette:
    """Make the API. Normative page: docs/rl-api.md.

    Args:
        completer: Answers the requests.
        tokenizer: The model's.
        keys: The inference key opens the routes below; every path that isn't listed in `slackwater.api.auth` needs
            the control key, extra routes too.
        model_name: The one model that is served.
        extra_routes: Come first, so they may replace ``/health``. What they raise is answered as here.
        lifespan: Of whatever the app's parts need started.
        clock: Gives ``created``; the machine's own by default.
        capacity: How much it takes on at once.
    """
    serving = Serving(
        completer=completer,
        tokenizer=tokenizer,
        model=model_name,
        clock=clock or SystemClock(),
        live=Live(),
        admission=Admission(capacity or Capacity()),
    )
    service = _Service(serving)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.text, methods=["POST"]),
        Route("/v1/generate", service.generate, methods=["POST"]),
        Route("/v1/abort", service.abort, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
        *(route for part in _PARTS for route in part(serving)),
    ]
    return Starlette(
        routes=[*extra_routes, *routes],
        middleware=[Middleware(KeyGate, keys)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A body that passed its checks."""

    body: Sampled
    wanted: Wanted
    shape: Shape
    prompt: Callable[[], Awaitable[tuple[int, ...]]]
    """Makes the prompt's ids."""
    text: Callable[[], TextStream] | None = None
    """Makes each choice's decoder; None: of plain text."""


class _Service:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._completer = serving.completer
        self._tokenizer = serving.tokenizer
        self._model = serving.model
        self._live = serving.live
        self._since = int(serving.clock.wall())

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = read_chat(await read_body(request))
        wanted = chat_wanted(body)
        told = conversation(body)
        check_model(body.model, self._model)
        parsed = parsing(body, self._tokenizer.reasoning_format, self._tokenizer.tool_format)
        asked = _Asked(
            body=body,
            wanted=wanted,
            shape=ChatShape(self._tokenizer.table, wanted, parsed),
            prompt=partial(self._serving.rendered, told),
            text=partial(self._tokenizer.stream, wanted.stops, parsed.marks),
        )
        return await self._answer(request, asked)

    async def text(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = read_text(await read_body(request))
        wanted = text_wanted(body)
        check_model(body.model, self._model)
        shape = TextShape(self._tokenizer.table, wanted)
        asked = _Asked(body=body, wanted=wanted, shape=shape, prompt=partial(self._serving.encoded, body.prompt))
        return await self._answer(request, asked)

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        if asked.wanted.stream:
            return StreamedReply(partial(self._streamed, asked), SSE)
        heavy = asked.wanted.routes_from is not None
        return await answered(request, self._whole(asked), heavy=heavy)

    async def _streamed(self, asked: _Asked, outlet: Outlet) -> None:
        async with self._under_way(asked) as exchange:
            await stream(exchange, outlet)

    async def _whole(self, asked: _Asked) -> Reply:
        async with self._under_way(asked) as exchange:
            return await whole(exchange)

    @asynccontextmanager
    async def _under_way(self, asked: _Asked) -> AsyncGenerator[Exchange]:
        prior = {"prompt": "prior_token_ids"} if asked.wanted.prior_ids else {}
        with worded(prior):
            async with self._serving.begun(asked.body, asked.wanted, asked.prompt, asked.text) as begun:
                yield Exchange(
                    completer=begun.completer,
                    readings=begun.readings,
                    shape=asked.shape,
                    wanted=asked.wanted,
                    reply_id=f"{asked.shape.prefix}-{begun.name}",
                    created=begun.created,
                    model=self._model,
                )

    async def generate(self, request: Request) -> Response:
        """``POST /v1/generate``."""
        ask = decode_request(await read_body(request))
        check_model(ask.model, self._model)
        return StreamedReply(partial(self._generate, ask), NDJSON)

    async def _generate(self, ask: CompletionRequest, outlet: Outlet) -> None:
        # A router asks again while the connection that it lost may still be open here: the name is shared.
        with (
            self._serving.admission.taking(1) as places,
            places.prompting(len(ask.prompt_ids)),
            self._live.entered(ask.request_id, self._completer, places, shared=True) as completer,
        ):
            answer = await completer.complete(ask)
            try:
                async for item in lines(answer):
                    await outlet.write(line(item))
            finally:
                await answer.aclose()

    async def abort(self, request: Request) -> Response:
        """``POST /v1/abort``."""
        name = check_request_id(read_abort(await read_body(request)).request_id)
        return json_reply(Aborted(request_id=name, aborted=await self._live.abort(name)))

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        del request
        return json_reply(ModelList(data=(ModelCard(id=self._model, created=self._since),)))

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        del request
        return json_reply({"status": "serving", "window": self._completer.window()})
