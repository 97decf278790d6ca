"""One request's choices under way: n answers at once, whole or as a stream of server-sent events."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET

from slackwater.api.appending import kept
from slackwater.api.arrays import PIECE_BYTES
from slackwater.api.asking import Wanted
from slackwater.api.faults import Envelope, fault
from slackwater.api.reading import Reading
from slackwater.api.replies import ChatChoice, ChatDelta, Reply, TextChoice, Usage
from slackwater.api.shapes import Shape, usage
from slackwater.api.stream import DONE, Outlet, event, made, together
from slackwater.errors import SlackwaterError
from slackwater.rollout.completer import Completer


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One request and what its reply is made of."""

    completer: Completer
    readings: Sequence[Reading]
    """One per choice; all have the same prompt."""
    shape: Shape
    wanted: Wanted
    reply_id: str
    created: int
    """Seconds since the epoch."""
    model: str

    def reply(
        self,
        kind: str,
        choices: Sequence[ChatChoice | ChatDelta | TextChoice],
        *,
        counted: Usage | None = None,
        shows_prompt: bool = False,
    ) -> Reply:
        """Fill in what all replies and chunks of this exchange share."""
        prompt = self.readings[0].request.prompt_ids
        prior = self.wanted.prior_ids
        counts = not self.wanted.stream or self.wanted.usage
        return Reply(
            id=self.reply_id,
            object=kind,
            created=self.created,
            model=self.model,
            choices=tuple(choices),
            usage=counted if counts else UNSET,
            prompt_token_ids=prompt if self.wanted.token_ids and shows_prompt else UNSET,
            prior_kept=kept(prior, prompt) if prior and shows_prompt else UNSET,
        )


async def whole(exchange: Exchange) -> Reply:
    """Answer all choices, then reply.

    Raises:
        SlackwaterError: A choice failed; the others were aborted.
    """
    await together(reading.read(exchange.completer) for reading in exchange.readings)
    return await made(partial(_ended, exchange), heavy=exchange.wanted.routes_from is not None)


def _ended(exchange: Exchange) -> Reply:
    choices = [exchange.shape.choice(reading) for reading in exchange.readings]
    return exchange.reply(exchange.shape.whole, choices, counted=usage(exchange.readings), shows_prompt=True)


async def stream(exchange: Exchange, outlet: Outlet) -> None:
    """Answer all choices and write each piece as it comes.

    An error after the first chunk is the stream's last event.

    Raises:
        SlackwaterError: A choice failed before the first chunk.
    """
    try:
        await together(_stream_choice(exchange, reading, outlet) for reading in exchange.readings)
    except SlackwaterError as error:
        if not outlet.started:
            raise
        await outlet.write(event(Envelope(fault(error))))
        return
    if exchange.wanted.usage:
        await outlet.write(event(exchange.reply(exchange.shape.chunk, (), counted=usage(exchange.readings))))
    await outlet.write(DONE)


async def _stream_choice(exchange: Exchange, reading: Reading, outlet: Outlet) -> None:
    async with aclosing(reading.pieces(exchange.completer)) as pieces:
        async for piece in pieces:
            heavy = piece.routes is not None and len(piece.routes.data) > PIECE_BYTES
            for part in await made(partial(exchange.shape.parts, reading, piece), heavy=heavy):
                await outlet.make(partial(_chunk, exchange, part, outlet), heavy=heavy)


def _chunk(exchange: Exchange, part: ChatDelta | TextChoice, outlet: Outlet) -> bytes:
    return event(exchange.reply(exchange.shape.chunk, (part,), shows_prompt=not outlet.started))
