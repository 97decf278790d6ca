"""The requests that an app has under way, by name: what an abort finds."""

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager

from slackwater.api.admission import Places
from slackwater.errors import ConflictError, NotFoundError
from slackwater.rollout.completer import Answer, Completer
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing


class LiveRequest:
    """Begins the answers of one request, and can end them all from outside.

    Args:
        completer: Answers.
        choices: How many answers will be asked for.
        places: Taken for them; one is given back with each answer that leaves fewer answers than places.
    """

    def __init__(self, completer: Completer, choices: int, places: Places) -> None:
        self._completer = completer
        self._unbegun = choices
        self._open = choices
        self._places = places
        self._answers: list[Answer] = []
        self._aborted = False

    async def complete(self, request: CompletionRequest) -> Answer:
        """See `Completer.complete`. After an abort the answer has ended, without a token, as soon as it is admitted."""
        try:
            answer = _Placed(await self._completer.complete(request), self._ended)
        finally:
            self._unbegun -= 1
        self._answers.append(answer)
        if self._aborted:
            await answer.aclose()
        return answer

    def window(self) -> int:
        """See `Completer.window`."""
        return self._completer.window()

    def routing(self) -> Routing | None:
        """See `Completer.routing`."""
        return self._completer.routing()

    async def abort(self) -> int:
        """End every answer that hasn't; what came of it by now stands. Returns how many this call ends."""
        open_answers = sum(answer.finish is None for answer in self._answers) + self._unbegun
        ends = 0 if self._aborted else open_answers
        self._aborted = True
        for answer in tuple(self._answers):
            await answer.aclose()
        return ends

    def _ended(self) -> None:
        self._open -= 1
        self._places.keep(self._open)


class _Placed:
    """See `slackwater.rollout.completer.Answer`. Tells once that it is closed."""

    def __init__(self, answer: Answer, closed: Callable[[], None]) -> None:
        self._answer = answer
        self._tell: Callable[[], None] | None = closed

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        return self._answer.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        return self._answer.finish

    def __aiter__(self) -> AsyncIterator[TokenStep]:
        """See `Answer.__aiter__`."""
        return aiter(self._answer)

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        tell, self._tell = self._tell, None
        try:
            await self._answer.aclose()
        finally:
            if tell is not None:
                tell()


class Live:
    """The requests of one app that haven't been answered in full. For one event loop."""

    def __init__(self) -> None:
        self._named: dict[str, list[LiveRequest]] = {}

    def __len__(self) -> int:
        return len(self._named)

    @contextmanager
    def entered(
        self, name: str, completer: Completer, places: Places, *, choices: int = 1, shared: bool = False
    ) -> Generator[LiveRequest]:
        """Know a request by its name until the exit.

        Args:
            name: Any; equal ones are the same.
            completer: Answers it.
            places: Taken for it.
            choices: How many answers it has.
            shared: Others may have the name too.

        Raises:
            ConflictError: Another request has the name now.
        """
        others = self._named.get(name, [])
        if others and not shared:
            raise ConflictError(f"request_id {name!r} is in use", hint="take another, or wait for its end")
        request = LiveRequest(completer, choices, places)
        self._named[name] = [*others, request]
        try:
            yield request
        finally:
            left = [other for other in self._named.pop(name) if other is not request]
            if left:
                self._named[name] = left

    async def abort(self, name: str) -> int:
        """End what has exactly this name; returns the number of answers that this call ends.

        Raises:
            NotFoundError: Nothing has the name.
        """
        if name not in self._named:
            raise NotFoundError(f"request_id {name!r} isn't under way here", hint="it may have ended")
        return sum([await request.abort() for request in self._named[name]])
