"""One routed answer: it moves to another replica until the caller has seen a token, and always gives its place back."""

from collections.abc import AsyncIterator
from typing import Final, Protocol

from slackwater.errors import (
    InternalError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.ids import ReplicaId
from slackwater.rollout.completer import Answer, Completer
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest
from slackwater.router.pool import Reservation

ATTEMPTS: Final = 3
"""Most replicas that one request is given to, one after another."""


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
    """See `slackwater.rollout.completer.Answer`. It holds at most one place, and one replica's answer, at a time."""

    def __init__(self, places: Places, request: CompletionRequest) -> None:
        self._places = places
        self._request = request
        self._excluded: frozenset[ReplicaId] = frozenset()
        self._failure: SlackwaterError | None = None
        self._reservation: Reservation | None = None
        self._live: Answer | None = None
        self._last: Answer | None = None
        self._closed = False

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        if self._last is None:
            raise InternalError("an answer was asked for its origin before it was admitted")
        return self._last.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        ended = self._last.finish if self._last else None
        return ended or (Finish.ABORT if self._closed else None)

    async def begin(self) -> None:
        """Find a replica that admits the request; nothing to do where one has.

        Raises:
            SlackwaterError: None does, or the request itself is at fault. No place is held then.
        """
        while self._live is None:
            replica = self._reserve()
            try:
                self._live = self._last = await replica.complete(self._request)
            except (UnavailableError, PolicyUnmetError) as error:
                await self._leave(error)
            finally:
                if self._live is None:
                    await self._let_go()

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        held_back: list[TokenStep] = []
        shown = ended = False
        while not (ended or self._closed):
            await self.begin()
            try:
                async for step in self._steps():
                    if self._request.streamed:
                        shown = True
                        yield step
                    else:
                        held_back.append(step)
                ended = True
            except (UnavailableError, PolicyUnmetError) as error:
                held_back.clear()
                await self._leave(error)
                if shown:
                    raise
        for step in held_back:
            yield step

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        self._closed = True
        await self._let_go()

    def _steps(self) -> Answer:
        if self._live is None:
            raise InternalError("an answer was read before it was admitted")
        return self._live

    def _reserve(self) -> Completer:
        try:
            self._reservation, replica = self._places.reserve(self._request, self._excluded)
        except SlackwaterError as refusal:
            # What a replica said of this request tells more than that no other is left.
            raise self._failure or refusal from refusal
        return replica

    async def _leave(self, error: SlackwaterError) -> None:
        """The replica failed this request: give it up; raise ``error`` where that was the last attempt."""
        if self._reservation is not None:
            name = self._reservation.replica
            if isinstance(error, ReplicaLostError):
                self._places.lost(name)
            self._excluded |= {name}
        self._failure = error
        await self._let_go()
        if len(self._excluded) >= ATTEMPTS:
            raise error

    async def _let_go(self) -> None:
        # The place first: it is given back even where the wait below is cancelled.
        reservation, self._reservation = self._reservation, None
        live, self._live = self._live, None
        if reservation is not None:
            self._places.release(reservation)
        if live is not None:
            await live.aclose()
