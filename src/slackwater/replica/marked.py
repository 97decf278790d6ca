"""An answer as a replica gives it on: tokens say whether their version is proven, and who is cut is told of."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from slackwater.errors import UnavailableError
from slackwater.ids import RequestId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, Origin, TokenStep

_log = logging.getLogger(__name__)


class MarkedAnswer:
    """See `slackwater.rollout.completer.Answer`.

    Args:
        answer: The engine's.
        request: Its name.
        doubtful: Whether a version's bits are in doubt, asked for each token as it is received.
        spoilt: Whether the engine's memory has turned out to be spoilt. Since when isn't known: nothing it says stands.
    """

    def __init__(
        self,
        answer: Answer,
        request: RequestId,
        doubtful: Callable[[Version], bool],
        spoilt: Callable[[], bool],
    ) -> None:
        self._answer = answer
        self._request = request
        self._doubtful = doubtful
        self._spoilt = spoilt

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        return self._answer.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        return self._answer.finish

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        """See `Answer.__aiter__`."""
        made = 0
        async for step in self._answer:
            made += 1
            yield replace(step, provisional=True) if self._doubtful(step.version) else step
        if self._spoilt():
            raise UnavailableError("the weights that made this answer had changed by themselves", hint="ask again")
        if self._answer.finish is Finish.SWAPPED:
            _log.info("a swap ended request %s after %d tokens", self._request, made)

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        await self._answer.aclose()
