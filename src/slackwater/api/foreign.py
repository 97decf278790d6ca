"""What the routes in other servers' shapes share: fields taken over or refused by name, spans, ends and text. Pure."""

import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from slackwater.api.bodies import misfit
from slackwater.api.engine_data import EngineData, engine_data
from slackwater.api.reading import Reading
from slackwater.api.schema import EngineDataField, RoutesField, TextBody
from slackwater.api.shapes import IMPOSSIBLE
from slackwater.api.text import TextStream, TokenTable
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.rollout.evidence import Finish, TokenStep, mask_ids, spans
from slackwater.rollout.routes import Routing


class WeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, end)`` of an answer were sampled by ``version``."""

    version: str
    """A number, in decimals."""
    start: int
    end: int


def weight_versions(steps: Iterable[TokenStep], first: int = 0) -> tuple[WeightVersion, ...]:
    """The policy spans, as vLLM and SGLang word them; the first token has the number ``first``."""
    return tuple(
        WeightVersion(version=str(span.version), start=first + span.start, end=first + span.end)
        for span in spans(step.version for step in steps)
    )


_QUOTED_OR_NAME: Final = re.compile(r"'[^']*'|[a-z0-9_]+")


@contextmanager
def worded(words: Mapping[str, str]) -> Generator[None]:
    """Errors about a field name it as the caller did.

    Args:
        words: From our name to theirs. A name of several words is one wherever it stands, another where it comes first.
    """
    try:
        yield
    except InvalidInputError as error:
        first, space, rest = error.message.partition(" ")
        message, hint = words.get(first, _named(first, words)) + space + _named(rest, words), _named(error.hint, words)
        if (message, hint) == (error.message, error.hint):
            raise
        raise type(error)(message, hint=hint) from error


def _named(text: str, words: Mapping[str, str]) -> str:
    return _QUOTED_OR_NAME.sub(lambda found: words.get(found[0], found[0]) if "_" in found[0] else found[0], text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How another server words what `TextBody` says."""

    same: frozenset[str]
    """Names that mean the same."""
    renamed: Mapping[str, str]
    """From their name to ours."""
    neutral: Mapping[str, tuple[object, ...]]
    """Values that ask for nothing; an empty tuple: any value."""
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields beside the parameters that errors may be about, from their name to ours."""

    def fields(self, params: Mapping[str, object]) -> dict[str, object]:
        """Sampling parameters under our names.

        Raises:
            UnsupportedError: A parameter asks for something that this server doesn't do.
        """
        taken: dict[str, object] = {}
        for name, value in params.items():
            ours = self.renamed.get(name, name if name in self.same else None)
            if value is None:
                continue
            if ours is not None:
                taken[ours] = value
            elif name not in self.neutral or (self.neutral[name] and value not in self.neutral[name]):
                raise UnsupportedError(f"{name[:80]} isn't supported", hint="leave it out")
        return taken

    @property
    def names(self) -> frozenset[str]:
        """Every parameter that has a meaning here."""
        return self.same | self.renamed.keys() | self.neutral.keys()

    @property
    def taken(self) -> frozenset[str]:
        """Those of them that may ask for something, or have any value without effect."""
        return self.same | self.renamed.keys() | {name for name, values in self.neutral.items() if not values}

    def worded(self, more: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
        """See `worded`.

        Args:
            more: Names of ours that this request has in other words, and theirs.
        """
        theirs = {ours: theirs for theirs, ours in (*self.renamed.items(), *self.words.items())}
        return worded({**theirs, **(more or {})})


def text_body(fields: Mapping[str, object]) -> TextBody:
    """A body of ``/v1/completions`` that says the same.

    Raises:
        InvalidInputError: A field has the wrong type.
    """
    try:
        return msgspec.convert(fields, TextBody)
    except msgspec.ValidationError as error:
        raise misfit(error, TextBody) from error


def ended(finish: Finish | None) -> str | None:
    """The word of trainers for an end: whatever else cut an answer is ``abort``, which they go on from."""
    return None if finish is None else finish.value if finish in (Finish.STOP, Finish.LENGTH) else Finish.ABORT.value


@dataclass(frozen=True, kw_only=True, slots=True)
class TextView:
    """What an answer's text shows."""

    table: TokenTable
    stops: tuple[str, ...] = ()
    specials: bool = False
    """Special tokens are text too."""
    keeps_stop: bool = False
    """The stop string, or the token that ended the answer, is part of the text."""

    def stream(self) -> TextStream:
        """A decoder that finds the stop strings in this text."""
        return TextStream(self._table(), self.stops)

    def text(self, reading: Reading, finish: Finish | None) -> str:
        """The text so far: whole once there is a finish, before it without half a character.

        It grows at its end alone.
        """
        ids = [step.token_id for step in reading.steps]
        if not self.keeps_stop and isinstance(self.matched(reading, finish), int):
            ids.pop()
        kept = () if self.keeps_stop and finish else self.stops
        stream = TextStream(self._table(), kept)
        text = "".join([stream.push(token_id) for token_id in ids])
        return text + stream.flush() if finish else text

    def matched(self, reading: Reading, finish: Finish | None) -> int | str | None:
        """What stopped an answer: a string, or the id of a token. None where it didn't stop, or its tokens were
        forced.
        """
        if finish is not Finish.STOP or not reading.steps:
            return None
        text = self._table().decode(step.token_id for step in reading.steps)
        found = [(start + len(stop), start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            return min(found)[-1]
        return None if reading.request.forced_ids else reading.steps[-1].token_id

    def _table(self) -> TokenTable:
        return replace(self.table, special=frozenset[int]()) if self.specials else self.table


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def alternatives(step: TokenStep) -> list[tuple[int, float]]:
    """The most probable tokens of a position, falling, as far as they are possible at all."""
    pairs = zip(step.top_ids, step.top_logprobs, strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if math.isfinite(logprob)]


def evidence(reading: Reading, *, wanted: bool, top_logprobs: int) -> EngineData | UnsetType:
    """``engine_data`` of an answer that has ended, where it is wanted."""
    if not wanted:
        return UNSET
    asked = reading.request
    prompt_tokens = len(asked.prompt_ids)
    return engine_data(
        reading.completion(),
        top_logprobs,
        prompt_tokens=prompt_tokens,
        sampling=asked.sampling,
        routed=reading.routed(),
    )


def check_routed(routing: Routing | None, name: str) -> None:
    """Raises UnsupportedError where another server's field ``name`` asks for routes that can't be told: its answer has
    no place to say so.
    """
    if routing is None:
        raise UnsupportedError(f"{name} isn't supported: this model has no routers", hint="leave it out")


def with_routes(asked: bool | EngineDataField | None, start: int) -> EngineDataField:
    """``engine_data`` of a request that asks for routes in its own words as well.

    Raises:
        InvalidInputError: They begin elsewhere.
    """
    field = asked if isinstance(asked, EngineDataField) else EngineDataField()
    told = field.routed_experts
    if told and start != (told.start if isinstance(told, RoutesField) else 0):
        raise InvalidInputError("engine_data is wrong: its routed_experts begin elsewhere", hint="name one start")
    return msgspec.structs.replace(field, routed_experts=RoutesField(start=start))


def masks(steps: Sequence[TokenStep]) -> tuple[tuple[int, ...], ...] | None:
    """The supports that the tokens were drawn from, one each; None where one isn't told. ``engine_data`` says why."""
    told = [step.mask for step in steps]
    return tuple(mask_ids(mask) for mask in told if mask) if all(told) else None
