"""Grammars of one engine: tried and compiled beside its threads, and where each answer stands in its own."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from slackwater.engine.torch.grammar import compiled, refused
from slackwater.engine.torch.grammar_trial import tried
from slackwater.errors import InvalidInputError, UnavailableError, UnsupportedError
from slackwater.rollout.grammar import Grammar

KEPT_VERDICTS: Final = 256
"""Grammars whose trial isn't held again."""
_THREADS: Final = 2
"""For trials, and as many for compiling: a grammar that is known waits for no trial."""
_Value = TypeVar("_Value")


class Matching:
    """Where one answer stands in its grammar. For one thread at a time.

    Args:
        grammar: The answer's.
        matcher: Before the first token.
        ends: The model's own end tokens.
        vocabulary: Ids that logits have.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, ends: Sequence[int], vocabulary: int) -> None:
        self._grammar: Final = grammar
        self._matcher: Final = matcher
        self._ends: Final = list(ends)
        self._vocabulary: Final = vocabulary

    def allowed(self, stops: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, ``[vocabulary]``; none, where the grammar can't be followed any further.

        Args:
            stops: Tokens that end the answer: they may come where the grammar may end.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        found = np.zeros(self._vocabulary, dtype=np.bool_)
        found[: len(known)] = known
        # The library lets the model's end come after a grammar that admits nothing.
        found[self._ends] = False
        if self._matcher.is_accepting():
            found[[token_id for token_id in stops if token_id < self._vocabulary]] = True
        return found

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on over tokens of the answer; whether the grammar admits them. Where not, no token may come next."""
        return self._matcher.consume_tokens(list(token_ids))

    def failure(self) -> InvalidInputError:
        """Why no token may come next."""
        return refused(self._grammar, self._matcher.get_error() or "no token of this model goes on with it")


class Grammars:
    """Makes matchings. For one event loop.

    Args:
        folder: Has ``tokenizer.json``, or no grammar can be followed.
        ends: The model's own end tokens.
        vocabulary: Ids that logits have.
    """

    def __init__(self, folder: Path, *, ends: Sequence[int], vocabulary: int) -> None:
        self._ends: Final = ends
        self._vocabulary: Final = vocabulary
        self._tokenizer: Final = _tokenizer(folder, ends)
        self._verdicts: Final[OrderedDict[Grammar, asyncio.Future[InvalidInputError | None]]] = OrderedDict()
        self._closed = False
        self._trials: Final = ThreadPoolExecutor(_THREADS, thread_name_prefix="slackwater-trial")
        self._compiling: Final = ThreadPoolExecutor(_THREADS, thread_name_prefix="slackwater-grammar")

    async def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Matching:
        """Where an answer stands in ``grammar`` after its tokens so far.

        Raises:
            InternalError: It couldn't be tried.
            InvalidInputError: It can't be followed, or admits no such tokens.
            UnavailableError: The machine has no time for it, or the engine is closed.
            UnsupportedError: This model has no tokenizer that tells what its tokens say.
        """
        if isinstance(self._tokenizer, UnsupportedError):
            raise self._tokenizer
        if (verdict := await self._done(self._verdict(grammar))) is not None:
            raise InvalidInputError(verdict.message, hint=verdict.hint)
        made = self._started(self._compiling, lambda: _begun(self._matching(grammar), token_ids))
        return await self._done(made)

    def close(self) -> None:
        """Begin no more; those who wait learn of it."""
        self._closed = True
        for pool in (self._trials, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    def _verdict(self, grammar: Grammar) -> asyncio.Future[InvalidInputError | None]:
        """Of its one trial, under way or over."""
        known = self._verdicts.get(grammar)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            self._verdicts[grammar] = self._started(self._trials, lambda: tried(grammar))
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        return self._verdicts[grammar]

    def _matching(self, grammar: Grammar) -> Matching:
        if isinstance(self._tokenizer, UnsupportedError):
            raise self._tokenizer
        return Matching(grammar, compiled(grammar, self._tokenizer), self._ends, self._vocabulary)

    def _started(self, pool: ThreadPoolExecutor, work: Callable[[], _Value]) -> asyncio.Future[_Value]:
        if self._closed:
            raise _closed()
        return asyncio.get_running_loop().run_in_executor(pool, work)

    async def _done(self, work: asyncio.Future[_Value]) -> _Value:
        """Wait; who gives up waiting leaves the others theirs."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._closed and work.cancelled():
                raise _closed() from None
            raise


def _begun(matching: Matching, token_ids: Sequence[int]) -> Matching:
    if token_ids and not matching.take(token_ids):
        raise InvalidInputError("grammar doesn't admit the tokens that the answer has so far")
    matching.allowed(())  # the first time is the longest one: not in a step
    return matching


def _closed() -> UnavailableError:
    return UnavailableError("the engine is closed", hint="ask another replica")


def _tokenizer(folder: Path, ends: Sequence[int]) -> LLTokenizer | UnsupportedError:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return UnsupportedError(
            "grammar can't be followed: this model has no tokenizer", hint="it needs tokenizer.json"
        )
    if not ends:
        return UnsupportedError("grammar can't be followed: this model has no end token")
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(ends))
    except ValueError as error:
        return UnsupportedError(f"grammar can't be followed: this model's tokenizer isn't supported: {error}")
