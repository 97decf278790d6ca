"""From readings to OpenAI's shapes. Pure: a chat and a text shape behind one protocol."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, Literal, Protocol

from msgspec import UNSET, UnsetType

from slackwater.api.asking import Wanted
from slackwater.api.conversation import Parsing
from slackwater.api.engine_data import EngineData, engine_data
from slackwater.api.reading import Piece, Reading
from slackwater.api.replies import (
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
from slackwater.api.routed import RoutedExperts
from slackwater.api.text import TokenTable
from slackwater.api.voice import Voice
from slackwater.rollout.evidence import Finish, TokenStep

IMPOSSIBLE: Final = -9999.0
"""Stands for minus infinity in OpenAI's ``logprobs``, as in OpenAI's own API. ``engine_data`` is exact."""
_PROMPT_END: Final = 32
"""Tokens at a prompt's end that tell whether it opens the answer's reasoning."""


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

    def parts(self, reading: Reading, piece: Piece) -> Sequence[ChatDelta | TextChoice]:
        """What ``piece``, the newest of ``reading``, adds to a stream: a chunk each, none where nothing is to see."""
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
        asked, top = reading.request, wanted.top_logprobs
        prompt_tokens = len(asked.prompt_ids)
        routed = reading.routed(shows=not wanted.stream)
        return engine_data(
            reading.completion(), top, prompt_tokens=prompt_tokens, sampling=asked.sampling, routed=routed
        )

    def _rows(self, reading: Reading, piece: Piece) -> RoutedExperts | UnsetType:
        shown = reading.routes.shown(piece.routes) if reading.routes and piece.routes else None
        return UNSET if shown is None else shown

    def _is_silent(self, reading: Reading, piece: Piece, *, shows: bool) -> bool:
        shows_tokens = self._wanted.logprobs or self._wanted.token_ids or piece.routes
        return not (shows or piece.finish or shows_tokens or len(reading.steps) == 1)

    def _name(self, token_id: int) -> str:
        return self._table.piece(token_id).decode("utf-8", "backslashreplace")


class ChatShape(_Common):
    """``chat.completion`` and ``chat.completion.chunk``.

    Args:
        table: Bytes of the tokens.
        wanted: What the reply shows.
        parsing: How answers are taken apart; by default their text is the content.
    """

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, table: TokenTable, wanted: Wanted, parsing: Parsing | None = None) -> None:
        super().__init__(table, wanted)
        self._parsing = parsing or Parsing()
        self._voices: dict[int, Voice] = {}
        """By choice."""

    def choice(self, reading: Reading) -> ChatChoice:
        """See `Shape.choice`."""
        voice = self._voice(reading)
        message = voice.message(reading.text)
        return ChatChoice(
            index=reading.index,
            message=message,
            logprobs=self._logprobs(reading.steps),
            finish_reason=_chat_finish(reading.completion().finish, voice),
            token_ids=self._ids(reading.steps),
            engine_data=self._evidence(reading),
        )

    def parts(self, reading: Reading, piece: Piece) -> list[ChatDelta]:
        """See `Shape.parts`."""
        steps = (piece.step,) if piece.step else ()
        opens = len(reading.steps) == len(steps)
        voice = self._voices.setdefault(reading.index, self._voice(reading)) if opens else self._voices[reading.index]
        deltas = voice.deltas(piece.text, opens=opens, ends=piece.finish is not None)
        if not deltas and self._is_silent(reading, piece, shows=False):
            return []
        deltas = deltas or [Delta()]
        last = len(deltas) - 1 if piece.finish else -1
        finish = _chat_finish(piece.finish, voice)
        return [
            ChatDelta(
                index=reading.index,
                delta=delta,
                logprobs=self._logprobs(() if place else steps),
                finish_reason=finish if place == last else None,
                token_ids=self._ids(() if place else steps),
                engine_data=self._evidence(reading) if place == last else UNSET,
                routed_experts=UNSET if place else self._rows(reading, piece),
            )
            for place, delta in enumerate(deltas)
        ]

    def _voice(self, reading: Reading) -> Voice:
        ends = reading.request.prompt_ids[-_PROMPT_END:]
        prompt_end = b"".join(map(self._table.piece, ends)).decode("utf-8", "replace")
        return Voice(self._parsing.reader(prompt_end), reading.request.request_id)

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

    def parts(self, reading: Reading, piece: Piece) -> list[TextChoice]:
        """See `Shape.parts`."""
        if self._is_silent(reading, piece, shows=bool(piece.text)):
            return []
        steps = (piece.step,) if piece.step else ()
        part = TextChoice(
            index=reading.index,
            text=piece.text,
            logprobs=self._logprobs(reading.index, steps),
            finish_reason=finish_reason(piece.finish),
            token_ids=self._ids(steps),
            engine_data=self._evidence(reading) if piece.finish else UNSET,
            routed_experts=self._rows(reading, piece),
        )
        return [part]

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


def _chat_finish(finish: Finish | None, voice: Voice) -> Finish | Literal["tool_calls"] | None:
    return "tool_calls" if finish is Finish.STOP and voice.calls else finish_reason(finish)


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
