"""The requests that an app has under way, by name: what an abort finds."""

from collections.abc import Generator
from contextlib import contextmanager

from slackwater.errors import ConflictError, NotFoundError
from slackwater.rollout.completer import Answer, Completer
from slackwater.rollout.request import CompletionRequest


class LiveRequest:
    """Begins the answers of one request, and can end them all from outside.

    Args:
        completer: Answers.
        choices: How many answers will be asked for.
    """

    def __init__(self, completer: Completer, choices: int) -> None:
        self._completer = completer
        self._unbegun = choices
        self._answers: list[Answer] = []
        self._aborted = False

    async def complete(self, request: CompletionRequest) -> Answer:
        """See `Completer.complete`. After an abort the answer has ended, without a token, as soon as it is admitted."""
        try:
            answer = await self._completer.complete(request)
        finally:
            self._unbegun -= 1
        self._answers.append(answer)
        if self._aborted:
            await answer.aclose()
        return answer

    def window(self) -> int:
        """See `Completer.window`."""
        return self._completer.window()

    async def abort(self) -> int:
        """End every answer that hasn't; what came of it by now stands. Returns how many this call ends."""
        open_answers = sum(answer.finish is None for answer in self._answers) + self._unbegun
        ends = 0 if self._aborted else open_answers
        self._aborted = True
        for answer in tuple(self._answers):
            await answer.aclose()
        return ends


class Live:
    """The requests of one app that haven't been answered in full. For one event loop."""

    def __init__(self) -> None:
        self._named: dict[str, list[LiveRequest]] = {}

    def __len__(self) -> int:
        return len(self._named)

    @contextmanager
    def entered(
        self, name: str, completer: Completer, *, choices: int = 1, shared: bool = False
    ) -> Generator[LiveRequest]:
        """Know a request by its name until the exit.

        Args:
            name: Any; equal ones are the same.
            completer: Answers it.
            choices: How many answers it has.
            shared: Others may have the name too.

        Raises:
            ConflictError: Another request has the name now.
        """
        others = self._named.get(name, [])
        if others and not shared:
            raise ConflictError(f"request_id {name!r} is in use", hint="take another, or wait for its end")
        request = LiveRequest(completer, choices)
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
