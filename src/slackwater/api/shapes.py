"""From readings to OpenAI's shapes. Pure: a chat and a text shape behind one protocol."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, Protocol

from msgspec import UNSET, UnsetType

from slackwater.api.asking import Wanted
from slackwater.api.engine_data import EngineData, engine_data
from slackwater.api.reading import Piece, Reading
from slackwater.api.replies import (
    AssistantMessage,
    CachedTokens,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    Delta,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from slackwater.api.text import TokenTable
from slackwater.rollout.evidence import Finish, TokenStep

IMPOSSIBLE: Final = -9999.0
"""Stands for minus infinity in OpenAI's ``logprobs``, as in OpenAI's own API. ``engine_data`` is exact."""


class Shape(Protocol):
    """How one route words its replies."""

    prefix: str
    """Of reply ids."""
    whole: str
    """``object`` of a whole reply."""
    chunk: str
    """``object`` of a chunk."""

    def choice(self, reading: Reading) -> ChatChoice | TextChoice:
        """A choice that has ended."""
        ...

    def part(self, reading: Reading, piece: Piece) -> ChatDelta | TextChoice | None:
        """What ``piece``, the newest of ``reading``, adds to a stream; None where that is nothing to see."""
        ...


class _Common:
    def __init__(self, table: TokenTable, wanted: Wanted) -> None:
        self._table = table
        self._wanted = wanted

    def _ids(self, steps: Iterable[TokenStep]) -> tuple[int, ...] | UnsetType:
        return tuple(step.token_id for step in steps) if self._wanted.token_ids else UNSET

    def _evidence(self, reading: Reading) -> EngineData | UnsetType:
        wanted = self._wanted
        if not wanted.engine_data:
            return UNSET
        return engine_data(reading.completion(), wanted.top_logprobs, prompt_tokens=len(reading.request.prompt_ids))

    def _is_silent(self, reading: Reading, piece: Piece) -> bool:
        shows_tokens = self._wanted.logprobs or self._wanted.token_ids
        return not (piece.text or piece.finish or shows_tokens or len(reading.steps) == 1)

    def _name(self, token_id: int) -> str:
        return self._table.piece(token_id).decode("utf-8", "backslashreplace")


class ChatShape(_Common):
    """``chat.completion`` and ``chat.completion.chunk``."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, reading: Reading) -> ChatChoice:
        """See `Shape.choice`."""
        return ChatChoice(
            index=reading.index,
            message=AssistantMessage(content=reading.text),
            logprobs=self._logprobs(reading.steps),
            finish_reason=finish_reason(reading.completion().finish),
            token_ids=self._ids(reading.steps),
            engine_data=self._evidence(reading),
        )

    def part(self, reading: Reading, piece: Piece) -> ChatDelta | None:
        """See `Shape.part`."""
        if self._is_silent(reading, piece):
            return None
        steps = (piece.step,) if piece.step else ()
        opens = len(reading.steps) == len(steps)
        shows = piece.text or opens or not piece.finish
        return ChatDelta(
            index=reading.index,
            delta=Delta(role="assistant" if opens else UNSET, content=piece.text if shows else UNSET),
            logprobs=self._logprobs(steps),
            finish_reason=finish_reason(piece.finish),
            token_ids=self._ids(steps),
            engine_data=self._evidence(reading) if piece.finish else UNSET,
        )

    def _logprobs(self, steps: Sequence[TokenStep]) -> ChatLogprobs | None:
        return ChatLogprobs(content=tuple(map(self._entry, steps))) if self._wanted.logprobs else None

    def _entry(self, step: TokenStep) -> TokenLogprob:
        return TokenLogprob(
            token=self._name(step.token_id),
            logprob=_finite(step.logprob),
            bytes=tuple(self._table.piece(step.token_id)),
            top_logprobs=tuple(
                TopLogprob(token=self._name(token_id), logprob=logprob, bytes=tuple(self._table.piece(token_id)))
                for token_id, logprob in _possible(step)
            ),
        )


class TextShape(_Common):
    """``text_completion``, whole and in chunks."""

    prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, table: TokenTable, wanted: Wanted) -> None:
        super().__init__(table, wanted)
        self._offsets: dict[int, int] = {}
        """Characters of the tokens so far, by choice."""

    def choice(self, reading: Reading) -> TextChoice:
        """See `Shape.choice`."""
        return TextChoice(
            index=reading.index,
            text=reading.text,
            logprobs=self._logprobs(reading.index, reading.steps),
            finish_reason=finish_reason(reading.completion().finish),
            token_ids=self._ids(reading.steps),
            engine_data=self._evidence(reading),
        )

    def part(self, reading: Reading, piece: Piece) -> TextChoice | None:
        """See `Shape.part`."""
        if self._is_silent(reading, piece):
            return None
        steps = (piece.step,) if piece.step else ()
        return TextChoice(
            index=reading.index,
            text=piece.text,
            logprobs=self._logprobs(reading.index, steps),
            finish_reason=finish_reason(piece.finish),
            token_ids=self._ids(steps),
            engine_data=self._evidence(reading) if piece.finish else UNSET,
        )

    def _logprobs(self, index: int, steps: Sequence[TokenStep]) -> TextLogprobs | None:
        if not self._wanted.logprobs:
            return None
        names = tuple(self._name(step.token_id) for step in steps)
        *starts, end = accumulate(map(len, names), initial=self._offsets.get(index, 0))
        self._offsets[index] = end
        alternatives = tuple({self._name(token): value for token, value in _possible(step)} for step in steps)
        return TextLogprobs(
            tokens=names,
            token_logprobs=tuple(_finite(step.logprob) for step in steps),
            top_logprobs=alternatives if self._wanted.top_logprobs else None,
            text_offset=tuple(starts),
        )


def finish_reason(finish: Finish | None) -> Finish | None:
    """How OpenAI's routes word an end: one that an exchange of weights brought is ``abort``, the word that trainers of
    partial rollouts go on from. ``engine_data`` says which it was.
    """
    return Finish.ABORT if finish is Finish.SWAPPED else finish


def usage(readings: Sequence[Reading]) -> Usage:
    """Count the tokens of all choices of one reply."""
    prompt = len(readings[0].request.prompt_ids)
    sampled = sum(len(reading.steps) for reading in readings)
    cached = max(reading.completion().origin.cached_tokens for reading in readings)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=sampled,
        total_tokens=prompt + sampled,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )


def _possible(step: TokenStep) -> list[tuple[int, float]]:
    pairs = zip(step.top_ids, step.top_logprobs, strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if math.isfinite(logprob)]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
