"""The answers of a table engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from slackwater.errors import SlackwaterError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, Origin, PolicySpan, TokenStep
from slackwater.rollout.request import CompletionRequest


@dataclass(eq=False, kw_only=True)
class TableRun:
    """One answer inside the engine."""

    request: CompletionRequest
    origin: Origin
    limit: int
    chain: bytes
    """Stands for the KV so far."""
    kv: tuple[PolicySpan, ...] = ()
    """What the next token has to say of the KV before it; empty where its reader assumes right."""
    tokens: list[int] = field(default_factory=list[int])
    version: Version | None = None
    """Of the newest token."""
    finish: Finish | None = None
    steps: "asyncio.Queue[TokenStep | SlackwaterError | None]" = field(
        default_factory=asyncio.Queue[TokenStep | SlackwaterError | None]
    )
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def made(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether no more tokens come."""
        return self.over.is_set()

    def give(self, step: TokenStep) -> None:
        """Give its reader a token; one with ``finish`` is the last."""
        self.tokens.append(step.token_id)
        self.version, self.kv = step.version, ()
        self.steps.put_nowait(step)
        if step.finish is not None:
            self.finish = step.finish
            self.over.set()

    def end(self, finish: Finish | None, last: SlackwaterError | None = None) -> None:
        """End it, once: with a finish, or with an error that its reader is given."""
        if not self.ended:
            self.over.set()
            self.finish = finish
            self.steps.put_nowait(last)

    def finish_with(self, token: int) -> Finish | None:
        """How ``token`` ends it, as its next one."""
        forced = self.request.forced_ids
        if forced and self.made + 1 == len(forced):
            return Finish.STOP
        sampling = self.request.sampling
        if token in sampling.stop_token_ids and self.made >= sampling.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if self.made + 1 >= self.limit else None


class TableAnswer:
    """See `slackwater.rollout.completer.Answer`."""

    def __init__(self, run: TableRun) -> None:
        self._run = run

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        return self._run.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        return self._run.finish

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        """See `Answer.__aiter__`."""
        steps = self._run.steps
        while not (self._run.ended and steps.empty()) and (item := await steps.get()) is not None:
            if isinstance(item, SlackwaterError):
                raise item
            yield item
            if item.finish is not None:
                return

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        self._run.end(Finish.ABORT)
