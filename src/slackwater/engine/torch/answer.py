"""An answer as its reader sees it: an end of a queue on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final

from slackwater.errors import SlackwaterError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, Origin, TokenStep


class TorchAnswer:
    """See `slackwater.rollout.completer.Answer`. Everything happens on one event loop.

    Args:
        origin: Who answers, as far as it is known at once.
        abandon: Called once if the reader closes the answer before it ended.
    """

    def __init__(self, origin: Origin, *, abandon: Callable[[], None]) -> None:
        self._origin = origin
        self._abandon: Final = abandon
        self._finish: Finish | None = None
        self._failure: SlackwaterError | None = None
        self._steps: Final[asyncio.Queue[TokenStep | None]] = asyncio.Queue()
        self._over: Final = asyncio.Event()

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        return self._origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        return self._finish

    @property
    def over(self) -> bool:
        """Whether no more tokens will be pushed."""
        return self._over.is_set()

    async def ended(self) -> None:
        """Return once it is over."""
        await self._over.wait()

    def began(self, *, cached_tokens: int, prompt_version: Version | None) -> None:
        """Complete the origin; before the first token."""
        self._origin = replace(self._origin, cached_tokens=cached_tokens, prompt_version=prompt_version)

    def push(self, step: TokenStep) -> None:
        """Append a token; one with ``finish`` ends the answer."""
        self._steps.put_nowait(step)
        if step.finish:
            self.end(step.finish)

    def end(self, finish: Finish) -> None:
        """No more tokens; those so far can still be read."""
        if not self.over:
            self._finish = finish
            self._over.set()
            self._steps.put_nowait(None)

    def fail(self, error: SlackwaterError) -> None:
        """No more tokens; reading past those so far raises ``error``."""
        if not self.over:
            self._failure = error
            self._over.set()
            self._steps.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[TokenStep]:
        """See `Answer.__aiter__`."""
        return self

    async def __anext__(self) -> TokenStep:
        """The next token.

        Raises:
            PolicyUnmetError: The weights in place were not what the request admits.
            CorruptError: The weights in place make logits that are no numbers.
            ReplicaLostError: The engine died.
            UnavailableError: The weights that made the last tokens were taken back.
        """
        step = None if self.over and self._steps.empty() else await self._steps.get()
        if step is not None:
            return step
        if self._failure:
            raise self._failure
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        if not self.over:
            self.end(Finish.ABORT)
            self._abandon()
