"""What the API's routes share: the model that is served, and its requests from their admission to their end."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from slackwater.api.admission import Admission, Places
from slackwater.api.arrays import Array
from slackwater.api.asking import Wanted, check_route_bytes, requests
from slackwater.api.conversation import Conversation
from slackwater.api.live import Live, LiveRequest
from slackwater.api.mask_budget import MAX_REPLY_MASK_IDS
from slackwater.api.reading import Reading
from slackwater.api.respond import CLIENT_GONE, json_reply
from slackwater.api.routed import forced_rows
from slackwater.api.schema import Sampled
from slackwater.api.stream import made, until_disconnect
from slackwater.api.text import TextStream
from slackwater.clock import Clock
from slackwater.rollout.completer import Completer

if TYPE_CHECKING:
    from slackwater.api.tokens import ChatTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A request under way, findable for aborts."""

    name: str
    """The caller's, or one that the server picked."""
    unique: str
    """What replicas and logs see: callers of several gateways may choose one name."""
    places: Places
    completer: LiveRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A request whose answers can be read."""

    name: str
    completer: LiveRequest
    readings: Sequence[Reading]
    """One per choice; all have the same prompt."""
    created: int
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """One model and what answers for it."""

    completer: Completer
    tokenizer: "ChatTokenizer"
    model: str
    clock: Clock
    live: Live
    admission: Admission

    async def encoded(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Ids of a prompt; ids are kept as they are.

        Raises:
            ContextLengthError: The text can't fit into the window.
        """
        if not isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(self.tokenizer.encode, prompt, window=self.completer.window())

    async def rendered(self, told: Conversation) -> tuple[int, ...]:
        """Ids of a conversation, by the model's own template.

        Raises:
            ForkError: The prior ids can't all be kept.
            ContextLengthError: Its text can't fit into the window.
            InvalidInputError: The template refuses it.
            UnsupportedError: The model has no template, or not for this.
        """
        return await asyncio.to_thread(self._rendered, told, self.completer.window())

    def _rendered(self, told: Conversation, window: int) -> tuple[int, ...]:
        if not told.prior_ids:
            return self.tokenizer.render(told.messages, style=told.style, window=window)
        return self.tokenizer.extend(told.prior_ids, told.messages, style=told.style, forks=told.forks, window=window)

    async def forced(self, routes: Array | None, *, positions: int) -> bytes:
        """Rows of ``forced_routes`` of a request whose prompt and forced tokens have so many positions.

        Raises:
            InvalidInputError: They don't fit the model, or the request.
            UnsupportedError: The model has no routers.
        """
        if routes is None:
            return b""
        return await asyncio.to_thread(forced_rows, routes, self.completer.routing(), most=positions)

    @contextmanager
    def named(
        self, request_id: str | None, *, choices: int, taking: AbstractContextManager[Places] | None = None
    ) -> Generator[Named]:
        """Know a request by its name, and hold its places, until the exit.

        Args:
            request_id: The caller's name for it, checked; None: it gets one.
            choices: How many answers will be asked for.
            taking: Takes its places; one for each choice by default.

        Raises:
            ConflictError: Another request has the name now.
            InvalidInputError: It needs more places than there are.
            OverloadedError: They aren't free.
        """
        fresh = uuid.uuid4().hex
        name = request_id or fresh
        unique = f"{request_id}:{fresh}" if request_id else fresh
        with (
            taking or self.admission.taking(choices) as places,
            self.live.entered(name, self.completer, places, choices=choices) as completer,
        ):
            yield Named(name=name, unique=unique, places=places, completer=completer)

    @asynccontextmanager
    async def begun(
        self,
        body: Sampled,
        wanted: Wanted,
        prompt: Callable[[], Awaitable[tuple[int, ...]]],
        text: Callable[[], TextStream] | None = None,
        *,
        others: int = 0,
        beside: int = 0,
        taking: AbstractContextManager[Places] | None = None,
    ) -> AsyncGenerator[Begun]:
        """Everything that a sampled request needs, until the exit.

        Args:
            body: Decoded.
            wanted: Of the same body.
            prompt: Makes the prompt's ids.
            text: Makes a decoder for each choice; the tokenizer's own, with the body's stop strings, by default.
            others: How many answers will be asked for besides the choices.
            beside: How many other requests the same reply answers: its bounds are shared.
            taking: As for `named`.

        Raises:
            ConflictError: Another request has the name now.
            ContextLengthError: Nothing of the window is left.
            InvalidInputError: A bound is exceeded.
            OverloadedError: There is no place for it, and its prompt isn't made; or that has too many tokens.
        """
        with self.named(body.request_id, choices=(body.n or 1) + others, taking=taking) as known:
            ids = await prompt()
            window = self.completer.window()
            forced = await self.forced(body.forced_routes, positions=len(ids) + len(body.forced_token_ids or ()))
            asks = requests(
                body, wanted, ids, window=window, request_id=known.unique, model=self.model, forced_routes=forced
            )
            routing = None if wanted.routes_from is None else self.completer.routing()
            check_route_bytes(asks, window, routing.row_bytes if routing else 0)
            fresh = text or (lambda: self.tokenizer.stream(wanted.stops))
            with known.places.prompting(len(ids)):
                yield Begun(
                    name=known.name,
                    completer=known.completer,
                    readings=[
                        Reading(
                            index,
                            ask,
                            fresh(),
                            mask_ids=MAX_REPLY_MASK_IDS // (len(asks) * (1 + beside)),
                            routing=routing,
                            prefills=wanted.prefills,
                        )
                        for index, ask in enumerate(asks)
                    ],
                    created=int(self.clock.wall()),
                )


async def answered(request: Request, work: Coroutine[object, object, object], *, heavy: bool = False) -> Response:
    """The reply that ``work`` makes, or none where the client goes away first, which ends the work.

    Args:
        request: Whose body was read.
        work: Makes the reply.
        heavy: Whether it may be so long that it is encoded in a thread.
    """
    reply = await until_disconnect(request.receive, work)
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    return await made(partial(json_reply, reply), heavy=heavy)
