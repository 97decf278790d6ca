"""Reads one answer: tokens become text, a stop string ends it, and its evidence is kept whole."""

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from slackwater.api.mask_budget import MAX_REPLY_MASK_IDS, MaskBudget
from slackwater.api.routed import NOT_ROUTED, Routed, RouteLog
from slackwater.api.text import TextStream
from slackwater.errors import InternalError
from slackwater.rollout.completer import Completer
from slackwater.rollout.evidence import Completion, Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import RouteRows, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one step of an answer adds. A character that spans tokens comes with the last of them."""

    text: str
    step: TokenStep | None
    """None at the end of an aborted answer, or of one that is to have no token, alone."""
    finish: Finish | None = None
    """Set on the last piece, which every answer has."""
    routes: RouteRows | None = None
    """What it tells of the positions before it."""


class Reading:
    """One choice as it grows.

    A stop string ends the answer: the text is cut before it, and the tokens that made it stay, so ids and
    log-probabilities always cover exactly what was sampled.

    Args:
        index: Which of the ``n`` choices.
        request: What it answers.
        text: Makes text of its tokens.
        mask_ids: Most ids that its masks have together; later ones aren't told, as those that are too wide.
        routing: What its routes are chosen from, where the request asks for them.
        prefills: It is to have no token: the one that every engine samples is dropped.
    """

    def __init__(
        self,
        index: int,
        request: CompletionRequest,
        text: TextStream,
        *,
        mask_ids: int = MAX_REPLY_MASK_IDS,
        routing: Routing | None = None,
        prefills: bool = False,
    ) -> None:
        self.index = index
        self.request = request
        self.routes = None if request.routes_from is None else RouteLog(routing, request.routes_from)
        """None: they aren't asked for."""
        self.steps: list[TokenStep] = []
        self._text = text
        self._prefills = prefills
        self._prefilled = False
        self._masks = MaskBudget(mask_ids)
        self._shown: list[str] = []
        self._finish: Finish | None = None
        self._origin: Origin | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._shown)

    @property
    def rows_end(self) -> int:
        """The position after the last one that went through the model; 0 before the first token."""
        made = len(self.steps) + self._prefilled
        return len(self.request.prompt_ids) + made - 1 if made else 0

    def routed(self, *, shows: bool = True) -> Routed:
        """Evidence of the routes so far, with the rows themselves if it ``shows`` them."""
        return self.routes.evidence(self.rows_end, shows=shows) if self.routes else NOT_ROUTED

    async def pieces(self, completer: Completer) -> AsyncGenerator[Piece, None]:
        """Ask and read to the end. Close the generator whatever happens; that frees the answer.

        Raises:
            SlackwaterError: As `Completer.complete` and `Answer.__aiter__` do.
        """
        answer = await completer.complete(self.request)
        try:
            async for step in answer:
                self._origin = answer.origin
                yield self._take(step)
                if self._finish:
                    return
            self._origin, self._finish = answer.origin, answer.finish or Finish.ABORT
            yield Piece(text=self._show(self._text.flush()), step=None, finish=self._finish)
        finally:
            await answer.aclose()

    async def read(self, completer: Completer) -> None:
        """`pieces` for who wants the whole alone."""
        async for _ in self.pieces(completer):
            pass

    def completion(self) -> Completion:
        """The whole answer.

        Raises:
            InternalError: It hasn't ended.
        """
        if self._origin is None or self._finish is None:
            raise InternalError("an answer was asked for before its end")
        return Completion(origin=self._origin, steps=tuple(self.steps), finish=self._finish)

    def _take(self, step: TokenStep) -> Piece:
        if math.isnan(step.logprob):
            raise InternalError("the engine reported a log-probability that is no number")
        told = self._masks.told(step.mask)
        step = step if told == step.mask else replace(step, mask=told)
        here = len(self.request.prompt_ids) + len(self.steps)
        routes = self.routes.take(step.routes, here) if self.routes else None
        if self._prefills:
            self._prefilled, self._finish = True, Finish.LENGTH
            return Piece(text="", step=None, finish=self._finish, routes=routes)
        self.steps.append(step)
        text = self._text.push(step.token_id)
        if step.finish:
            text += self._text.flush()
        self._finish = Finish.STOP if self._text.stopped else step.finish
        return Piece(text=self._show(text), step=step, finish=self._finish, routes=routes)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
