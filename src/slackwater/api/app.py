"""The HTTP API over any Completer: OpenAI's routes, and tokens in, tokens out. Replica and gateway both serve it."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from slackwater.api.asking import Wanted, chat_wanted, check_model, requests, text_wanted
from slackwater.api.auth import KeyGate, Keys
from slackwater.api.choices import Exchange, stream, whole
from slackwater.api.reading import Reading
from slackwater.api.replies import ModelCard, ModelList
from slackwater.api.respond import CLIENT_GONE, HANDLERS, json_reply, read_body
from slackwater.api.schema import Sampled, read_chat, read_text
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
        Route("/v1/models", service.models),
        Route("/health", service.health),
    ]
    return Starlette(
        routes=[*extra_routes, *routes],
        middleware=[Middleware(KeyGate, keys)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )


class _Service:
    def __init__(self, completer: Completer, tokenizer: "ChatTokenizer", model: str, clock: Clock) -> None:
        self._completer = completer
        self._tokenizer = tokenizer
        self._model = model
        self._clock = clock
        self._since = int(clock.wall())

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = read_chat(await read_body(request))
        wanted = chat_wanted(body)
        messages = [message.plain() for message in body.messages]
        check_model(body.model, self._model)
        prompt_ids = await asyncio.to_thread(self._tokenizer.render, messages, window=self._completer.window())
        return await self._answer(request, body, wanted, prompt_ids, ChatShape(self._tokenizer.table, wanted))

    async def text(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = read_text(await read_body(request))
        wanted = text_wanted(body)
        check_model(body.model, self._model)
        ids = await self._prompt_ids(body.prompt)
        return await self._answer(request, body, wanted, ids, TextShape(self._tokenizer.table, wanted))

    async def _prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(self._tokenizer.encode, prompt, window=self._completer.window())

    async def _answer(
        self, request: Request, body: Sampled, wanted: Wanted, prompt_ids: tuple[int, ...], shape: Shape
    ) -> Response:
        name = uuid.uuid4().hex
        window = self._completer.window()
        asks = requests(body, wanted, prompt_ids, window=window, request_id=name, model=self._model)
        exchange = Exchange(
            completer=self._completer,
            readings=[Reading(index, ask, self._tokenizer.stream(wanted.stops)) for index, ask in enumerate(asks)],
            shape=shape,
            wanted=wanted,
            reply_id=f"{shape.prefix}-{name}",
            created=int(self._clock.wall()),
            model=self._model,
        )
        if wanted.stream:
            return StreamedReply(partial(stream, exchange), SSE)
        reply = await until_disconnect(request.receive, whole(exchange))
        return Response(status_code=CLIENT_GONE) if reply is None else json_reply(reply)

    async def generate(self, request: Request) -> Response:
        """``POST /v1/generate``."""
        ask = decode_request(await read_body(request))
        check_model(ask.model, self._model)
        return StreamedReply(partial(self._generate, ask), NDJSON)

    async def _generate(self, ask: CompletionRequest, outlet: Outlet) -> None:
        answer = await self._completer.complete(ask)
        try:
            async for item in lines(answer):
                await outlet.write(line(item))
        finally:
            await answer.aclose()

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        del request
        return json_reply(ModelList(data=(ModelCard(id=self._model, created=self._since),)))

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        del request
        return json_reply({"status": "serving", "window": self._completer.window()})
