"""The HTTP API over any Completer: OpenAI's routes, and tokens in, tokens out. Replica and gateway both serve it."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from slackwater.api.asking import Wanted, chat_wanted, check_model, check_request_id, requests, text_wanted
from slackwater.api.auth import KeyGate, Keys
from slackwater.api.choices import Exchange, stream, whole
from slackwater.api.live import Live
from slackwater.api.reading import Reading
from slackwater.api.replies import Aborted, ModelCard, ModelList, Reply
from slackwater.api.respond import CLIENT_GONE, HANDLERS, json_reply, read_body
from slackwater.api.schema import Sampled, read_abort, read_chat, read_text
from slackwater.api.shapes import ChatShape, Shape, TextShape
from slackwater.api.stream import NDJSON, SSE, Outlet, StreamedReply, line, until_disconnect
from slackwater.api.wire import decode_request, lines
from slackwater.clock import Clock, SystemClock
from slackwater.rollout.completer import Completer
from slackwater.rollout.request import CompletionRequest

if TYPE_CHECKING:
    from slackwater.api.tokens import ChatTokenizer

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
    """
    service = _Service(completer, tokenizer, model_name, clock or SystemClock())
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.text, methods=["POST"]),
        Route("/v1/generate", service.generate, methods=["POST"]),
        Route("/v1/abort", service.abort, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
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


class _Service:
    def __init__(self, completer: Completer, tokenizer: "ChatTokenizer", model: str, clock: Clock) -> None:
        self._completer = completer
        self._tokenizer = tokenizer
        self._model = model
        self._clock = clock
        self._since = int(clock.wall())
        self._live = Live()

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = read_chat(await read_body(request))
        wanted = chat_wanted(body)
        messages = [message.plain() for message in body.messages]
        check_model(body.model, self._model)
        shape = ChatShape(self._tokenizer.table, wanted)
        asked = _Asked(body=body, wanted=wanted, shape=shape, prompt=partial(self._rendered, messages))
        return await self._answer(request, asked)

    async def text(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = read_text(await read_body(request))
        wanted = text_wanted(body)
        check_model(body.model, self._model)
        shape = TextShape(self._tokenizer.table, wanted)
        asked = _Asked(body=body, wanted=wanted, shape=shape, prompt=partial(self._encoded, body.prompt))
        return await self._answer(request, asked)

    async def _rendered(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return await asyncio.to_thread(self._tokenizer.render, messages, window=self._completer.window())

    async def _encoded(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(self._tokenizer.encode, prompt, window=self._completer.window())

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        if asked.wanted.stream:
            return StreamedReply(partial(self._streamed, asked), SSE)
        reply = await until_disconnect(request.receive, self._whole(asked))
        return Response(status_code=CLIENT_GONE) if reply is None else json_reply(reply)

    async def _streamed(self, asked: _Asked, outlet: Outlet) -> None:
        async with self._under_way(asked) as exchange:
            await stream(exchange, outlet)

    async def _whole(self, asked: _Asked) -> Reply:
        async with self._under_way(asked) as exchange:
            return await whole(exchange)

    @asynccontextmanager
    async def _under_way(self, asked: _Asked) -> AsyncGenerator[Exchange]:
        body, wanted, fresh = asked.body, asked.wanted, uuid.uuid4().hex
        name = body.request_id or fresh
        # Callers of several gateways may choose one name; what replicas and logs see is unique.
        unique = f"{body.request_id}:{fresh}" if body.request_id else fresh
        with self._live.entered(name, self._completer, choices=body.n or 1) as completer:
            ids = await asked.prompt()
            asks = requests(body, wanted, ids, window=completer.window(), request_id=unique, model=self._model)
            yield Exchange(
                completer=completer,
                readings=[Reading(index, ask, self._tokenizer.stream(wanted.stops)) for index, ask in enumerate(asks)],
                shape=asked.shape,
                wanted=wanted,
                reply_id=f"{asked.shape.prefix}-{name}",
                created=int(self._clock.wall()),
                model=self._model,
            )

    async def generate(self, request: Request) -> Response:
        """``POST /v1/generate``."""
        ask = decode_request(await read_body(request))
        check_model(ask.model, self._model)
        return StreamedReply(partial(self._generate, ask), NDJSON)

    async def _generate(self, ask: CompletionRequest, outlet: Outlet) -> None:
        # A router asks again while the connection that it lost may still be open here: the name is shared.
        with self._live.entered(ask.request_id, self._completer, shared=True) as completer:
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
