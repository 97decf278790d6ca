"""An engine under load, opened so that its parameters and its still moments can be reached, and the answers of it."""

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final

import numpy as np

from slackwater.clock import SystemClock
from slackwater.engine.base import EngineDescription
from slackwater.engine.scatter import warm
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.grammars import Grammars
from slackwater.engine.torch.model import load
from slackwater.errors import SlackwaterError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, Origin, spans
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from swap_peers import Live

RUN: Final = RunId("bench-swap")
STREAMS: Final = 16
"""Requests that stream."""
SLOTS: Final = STREAMS + 1
"""Of the engine: one is left for a probe."""
WINDOW: Final = 1024
PROMPT: Final = 48
"""Tokens of a prompt."""

_CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_CACHE: Final = 32 << 20
_LINE_BYTES: Final = 64

Ask = Callable[[CompletionRequest], Awaitable[Answer]]


class StillClock(SystemClock):
    """A clock that the engine alone reads, once at the beginning of each pause: the place to do something before."""

    def __init__(self) -> None:
        self._work: Callable[[], object] | None = None

    def before_pause(self, work: Callable[[], object]) -> None:
        """Have ``work`` done in the engine's thread just before the next pause begins, outside its time."""
        self._work = work

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        work, self._work = self._work, None
        if work is not None:
            work()
        return time.perf_counter()


class Eviction:
    """Walks memory of twice the size of the last cache, so that nothing else is left in any."""

    def __init__(self) -> None:
        self._memory = np.zeros(2 * cache_bytes(), dtype=np.uint8)

    def __call__(self) -> None:
        """Walk it."""
        self._memory[::_LINE_BYTES] += 1


def cache_bytes() -> int:
    """Size of the last-level cache; 32 MiB where the system doesn't tell or has less."""
    told = [path.read_text().strip() for path in _CACHE.glob("index*/size")]
    sizes = [int(size[:-1]) << {"K": 10, "M": 20}.get(size[-1], 0) for size in told if size[:-1].isdigit()]
    return max([_LEAST_CACHE, *sizes])


async def open_engine(folder: Path, version: Version, clock: StillClock) -> tuple[TorchEngine, Live]:
    """As `TorchEngine.open` does, with the parameters in hand."""
    model = await asyncio.to_thread(load, folder)
    await asyncio.to_thread(warm, {spec.bits_dtype for spec in model.specs.values()})
    window = min(WINDOW, model.window)
    # Probes are compared to the bit with a fresh engine's, which serves nobody else.
    shaping = Shaping(slots=SLOTS, invariant=True)
    description = EngineDescription(
        model=model.architecture,
        window=window,
        vocab_size=model.vocab_size,
        slots=SLOTS,
        numerics=model.numerics(f"{shaping}, 1 threads"),
        eos_token_ids=model.eos_token_ids,
    )
    core = Core(model, shaping, window=window, version=version)
    origin = Origin(replica=ReplicaId("replica-0"), boot=BootId("boot-0"), run=RUN, seed=0)
    grammars = Grammars(folder, ends=model.eos_token_ids, vocabulary=model.vocab_size)
    engine = TorchEngine(model, core, grammars=grammars, description=description, origin=origin, threads=1, clock=clock)
    return engine, Live(tensors=model.parameters)


def prompt(number: int) -> tuple[int, ...]:
    """Tokens of one of the prompts."""
    return tuple(int(token) for token in np.random.default_rng(number).integers(3, 250, PROMPT))


def request(number: int, *, max_tokens: int, top_logprobs: int = 0) -> CompletionRequest:
    """A request for one of the prompts."""
    sampling = SamplingSpec(max_tokens=max_tokens, seed=number, top_logprobs=top_logprobs)
    return CompletionRequest(request_id=RequestId(f"r{number}"), prompt_ids=prompt(number), sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token, as its reader saw it."""

    at: float
    """Seconds of `time.perf_counter`."""
    version: Version


@dataclass(kw_only=True, slots=True)
class Streams:
    """Readers that ask again when an answer ends, and what they saw."""

    ask: Ask
    in_place: Callable[[], Version]
    """The label of the weights in place."""
    max_tokens: int
    tokens: list[list[Token]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    """Of each reader, in order."""
    aborted: int = 0
    """Answers that ended otherwise than by their length."""
    false_labels: int = 0
    """Tokens labelled older than the one before, or newer than the weights in place; spans that don't add up."""
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def first_of(self, version: Version) -> float:
        """When the first token of a version was read, by whomever; waits for it."""
        while True:
            found = [
                token.at for tokens in self.tokens for token in _newest(tokens, version) if token.version == version
            ]
            if found:
                return min(found)
            await self.next_token()

    async def next_token(self) -> None:
        """Wait until any reader reads one."""
        async with self._news:
            await self._news.wait()

    async def all_have(self, more: int) -> None:
        """Wait until every reader has read so many tokens more."""
        wanted = [len(tokens) + more for tokens in self.tokens]
        while any(len(tokens) < least for tokens, least in zip(self.tokens, wanted, strict=True)):
            await self.next_token()

    async def read(self, number: int) -> None:
        """One reader, until it is cancelled."""
        while True:
            versions: list[Version] = []
            finish: Finish | None = None
            with suppress(SlackwaterError):
                answer = await self.ask(request(number, max_tokens=self.max_tokens))
                async with aclosing(answer):
                    async for step in answer:
                        await self._note(number, versions, step.version)
                finish = answer.finish
            found = spans(versions)
            self.false_labels += sum(span.end - span.start for span in found) != len(versions)
            self.false_labels += any(one.version >= other.version for one, other in pairwise(found))
            self.aborted += finish is not Finish.LENGTH

    async def _note(self, number: int, versions: list[Version], version: Version) -> None:
        self.false_labels += version > self.in_place()
        versions.append(version)
        self.tokens[number].append(Token(at=time.perf_counter(), version=version))
        async with self._news:
            self._news.notify_all()

    def gap(self, version: Version) -> float:
        """The longest wait, in seconds, for a reader's first token of a version after one of another."""
        gaps = [
            other.at - one.at
            for tokens in self.tokens
            for one, other in pairwise(tokens)
            if one.version != version == other.version
        ]
        return max(gaps)

    def step(self, begin: float, end: float) -> float:
        """The median wait for a token between two moments, in seconds."""
        gaps = [
            other.at - one.at
            for tokens in self.tokens
            for one, other in pairwise(tokens)
            if begin <= one.at and other.at <= end
        ]
        return statistics.median(gaps)

    def last(self, begin: float, end: float) -> float:
        """The longest, in seconds, of the readers' last waits that lie between two moments, one of each reader."""
        whole = (
            [other.at - one.at for one, other in pairwise(tokens) if begin <= one.at and other.at <= end]
            for tokens in self.tokens
        )
        return max(waits[-1] for waits in whole if waits)

    def longest(self, begin: float, end: float) -> float:
        """The longest wait that overlaps two moments, in seconds."""
        return max(
            other.at - one.at
            for tokens in self.tokens
            for one, other in pairwise(tokens)
            if one.at <= end and begin <= other.at
        )


def _newest(tokens: Sequence[Token], version: Version) -> Iterator[Token]:
    """Those from a version on, the last first: all that is looked at while the engine is measured."""
    return takewhile(lambda token: token.version >= version, reversed(tokens))


@asynccontextmanager
async def streaming(ask: Ask, in_place: Callable[[], Version], max_tokens: int) -> AsyncGenerator[Streams]:
    """Readers at work; they have all begun, and are cancelled in the end."""
    streams = Streams(ask=ask, in_place=in_place, max_tokens=max_tokens)
    readers = [asyncio.create_task(streams.read(number)) for number in range(STREAMS)]
    try:
        await streams.all_have(2)
        yield streams
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
