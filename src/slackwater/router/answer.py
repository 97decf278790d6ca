"""One routed answer: it goes on elsewhere where its replica is lost, and always gives its place back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final, Protocol

from slackwater.errors import (
    InternalError,
    InvalidInputError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.ids import ReplicaId
from slackwater.rollout.completer import Answer, Completer
from slackwater.rollout.evidence import Finish, Origin, TokenStep, taken_over
from slackwater.rollout.request import CompletionRequest
from slackwater.router.pool import Reservation
from slackwater.router.resume import Ask, Over, after_failure

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""Most replicas that one request is given to, one after another."""
_AT_ONCE: Final = 0.0
"""A time of the event loop that has passed."""


class Places(Protocol):
    """Where an answer finds its replicas: the router."""

    def reserve(self, request: CompletionRequest, excluded: frozenset[ReplicaId]) -> tuple[Reservation, Completer]:
        """Take a place on the best replica that isn't ``excluded``; raises where there is none."""
        ...

    def release(self, reservation: Reservation) -> None:
        """Give a place back."""
        ...

    def lost(self, name: ReplicaId) -> None:
        """Note that a replica's connection broke."""
        ...


class RoutedAnswer:
    """See `slackwater.rollout.completer.Answer`. It holds at most one place, and one replica's answer, at a time.

    `slackwater.router.resume` decides how it goes on after a failure.
    """

    def __init__(self, places: Places, request: CompletionRequest) -> None:
        self._places = places
        self._request = request
        self._ask = Ask(request=request, kept=0)
        self._steps: list[TokenStep] = []
        self._begun: Origin | None = None
        """Who sampled the first of ``_steps``."""
        self._excluded: frozenset[ReplicaId] = frozenset()
        self._failure: SlackwaterError | None = None
        self._reservation: Reservation | None = None
        self._live: Answer | None = None
        self._last: Answer | None = None
        self._wait: asyncio.Timeout | None = None
        """For a replica to admit it; ended by `aclose` alone."""
        self._ended = False
        self._closed = False

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        if self._last is None:
            raise InternalError("an answer was asked for its origin before it was admitted")
        return self._begun or self._last.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        told = self._steps[-1].finish if self._steps else None
        if told is None and self._ended and self._last is not None:
            told = self._last.finish
        return told or (Finish.ABORT if self._closed else None)

    async def begin(self) -> None:
        """Find a replica that admits what is to be asked; nothing to do where one has, or once it is closed.

        Raises:
            SlackwaterError: None does, or the request itself is at fault. No place is held then.
        """
        while self._live is None and not self._closed:
            replica = self._reserve()
            try:
                async with asyncio.timeout(None) as self._wait:
                    self._live = self._last = await self._admitted(replica)
            except TimeoutError:
                if not self._closed:
                    raise
            except (UnavailableError, PolicyUnmetError) as error:
                await self._leave(error)
            finally:
                self._wait = None
                if self._live is None:
                    await self._let_go()

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        while not (self._ended or self._closed):
            await self.begin()
            if self._closed:  # while a replica was looked for
                await self._let_go()
                break
            live = self._reading()
            try:
                async for given in live:
                    step = self._accept(given, live.origin)
                    if self._request.streamed:
                        yield step
                self._ended = True
            except (UnavailableError, PolicyUnmetError) as error:
                await self._turn(error)
        if not self._request.streamed:
            for step in self._steps:
                yield step

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        self._closed = True
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.reschedule(_AT_ONCE)
        await self._let_go()

    def _reading(self) -> Answer:
        if self._live is None:
            raise InternalError("an answer was read before it was admitted")
        return self._live

    async def _admitted(self, replica: Completer) -> Answer:
        """Ask one replica.

        Raises:
            UnavailableError: It can't. An answer that it was to go on with was right elsewhere, so its refusal of the
                prompt is its own matter.
        """
        try:
            answer = await replica.complete(self._ask.request)
        except InvalidInputError as error:
            if not self._ask.kept:
                raise
            raise UnavailableError(f"a replica can't go on with an answer: {error}") from error
        if self._begun is not None and answer.origin.run != self._begun.run:
            await answer.aclose()
            raise UnavailableError(f"a replica of the run {answer.origin.run} can't go on with {self._begun.run}'s")
        return answer

    def _accept(self, step: TokenStep, by: Origin) -> TokenStep:
        """Take the next token, with its evidence where it is the first one of another replica."""
        if not self._steps:
            self._begun = by
        elif len(self._steps) == self._ask.kept:
            step = taken_over(step, by, len(self._ask.request.prompt_ids))
        self._steps.append(step)
        return step

    async def _turn(self, error: UnavailableError | PolicyUnmetError) -> None:
        """The replica failed within the answer: have it go on, or end it; raises ``error`` where it fails."""
        if self._closed:
            return
        lost = isinstance(error, ReplicaLostError)
        seed = self._begun.seed if self._begun else None
        after = after_failure(self._request, self._steps, seed, kept=self._ask.kept, lost=lost)
        if isinstance(after, Over):
            await self._quit(error)
            if not after.complete:
                _log.warning("an answer of %s ends: %s", self.origin.replica, after.reason)
                raise error
            self._ended = True
            return
        await self._leave(error)
        self._go_on(after)

    def _go_on(self, ask: Ask) -> None:
        self._ask = ask
        del self._steps[ask.kept :]
        if not ask.kept:
            self._begun = None

    def _reserve(self) -> Completer:
        while True:
            try:
                self._reservation, replica = self._places.reserve(self._ask.request, self._excluded)
            except SlackwaterError as refusal:
                if self._ask.kept and not self._request.streamed:
                    # Nobody can go on with it. Nobody has seen it either, so it may as well begin again.
                    self._go_on(Ask(request=self._request, kept=0))
                    continue
                # What a replica said of this request tells more than that no other is left.
                raise self._failure or refusal from refusal
            return replica

    async def _leave(self, error: SlackwaterError) -> None:
        """The replica failed this request: give it up; raises where that was the last attempt."""
        await self._quit(error)
        # An answer under way is lost by who lost it, not by who then can't go on with it.
        if self._failure is None or not self._ask.kept or isinstance(error, ReplicaLostError):
            self._failure = error
        if len(self._excluded) >= ATTEMPTS and not self._closed:
            raise self._failure

    async def _quit(self, error: SlackwaterError) -> None:
        """Give the replica's place back, and don't ask it again."""
        if self._reservation is not None:
            name = self._reservation.replica
            if isinstance(error, ReplicaLostError):
                self._places.lost(name)
            self._excluded |= {name}
        await self._let_go()

    async def _let_go(self) -> None:
        # The place first: it is given back even where the wait below is cancelled.
        reservation, self._reservation = self._reservation, None
        live, self._live = self._live, None
        if reservation is not None:
            self._places.release(reservation)
        if live is not None:
            await live.aclose()
