"""Loads that an engine is asked to carry, and what its readers see. Standard library alone: peers' interpreters run it.

A reader asks, reads the whole answer, and asks again; as many readers as the load has streams. An episode is one
request, or several turns, each of which has the whole before it as its prompt.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

_TAIL: Final = 100
_WARM_TOKENS: Final = 4
_WARM_SEED: Final = 1 << 20
_IDS: Final = (3, 250)
"""Token ids of prompts: every model here has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked for, at temperature 1, with the log-probability of each sampled token, end tokens ignored."""

    name: str
    streams: int
    """Readers at once."""
    episodes: int
    """Of all readers together; a multiple of ``streams``, so that batches are full to the end."""
    new_tokens: int
    """Of each answer."""
    prompt_tokens: int = 64
    """Of an episode's first prompt."""
    turns: int = 1
    turn_tokens: int = 32
    """What each later prompt has beyond the turn before it and its answer."""
    slots: int = 0
    """Of our engine; 0 takes ``streams``."""
    seed: int = 0
    """Of the prompts: loads of other seeds share no prefix."""
    greedy: bool = False
    all_evidence: bool = False
    """Raw log-probabilities and the likeliest token are asked for as well; of our engine alone."""
    keep: bool = False
    """Whether prompts and answers are told too."""

    @property
    def window(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.prompt_tokens + self.turns * self.new_tokens + (self.turns - 1) * self.turn_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer, as its reader got it."""

    token_ids: list[int]
    logprobs: list[float]
    at: list[float]
    """Of each token, seconds of `time.perf_counter`."""


class Driver(Protocol):
    """An engine that answers. Made by a function ``driver(folder, settings)`` of a module ``engine_NAME``."""

    async def begin(self, load: Load) -> None:
        """Make ready for a load, outside of its time."""
        ...

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        """Answer one prompt; called by all readers at once."""
        ...

    async def end(self) -> None:
        """Stop for good."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A prompt and its answer."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the readers of one load saw."""

    load: str
    tokens_per_s: float
    """New tokens of all readers, over the time from the first question to the last token."""
    first_p50_s: float
    """From the question to the first token."""
    first_p99_s: float
    gap_p50_s: float
    """From one token of an answer to the next."""
    gap_p99_s: float
    wrong: int
    """Answers that lack tokens, or whose log-probabilities aren't all finite and at most 0."""
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    asked: float
    prompt: list[int]
    reply: Reply


async def run(driver: Driver, load: Load) -> Figures:
    """Carry a load, once a little of the same kind has been carried."""
    await driver.begin(load)
    warm = replace(load, new_tokens=_WARM_TOKENS, episodes=load.streams, seed=load.seed + _WARM_SEED)
    await _carry(driver, warm)
    begun = time.perf_counter()
    return _figures(load, await _carry(driver, load), begun)


async def _carry(driver: Driver, load: Load) -> list[_Read]:
    episodes = iter(range(load.episodes))
    reads: list[_Read] = []
    await asyncio.gather(*(_reader(driver, load, episodes, reads) for _ in range(load.streams)))
    return reads


async def _reader(driver: Driver, load: Load, episodes: Iterator[int], reads: list[_Read]) -> None:
    for episode in episodes:
        draw = random.Random(f"{load.seed} {episode}")
        prompt = _ids(draw, load.prompt_tokens)
        for _ in range(load.turns):
            asked = time.perf_counter()
            reply = await driver.answer(prompt, load)
            reads.append(_Read(asked=asked, prompt=prompt, reply=reply))
            prompt = [*prompt, *reply.token_ids, *_ids(draw, load.turn_tokens)]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*_IDS) for _ in range(count)]


def _figures(load: Load, reads: Sequence[_Read], begun: float) -> Figures:
    firsts = [read.reply.at[0] - read.asked for read in reads if read.reply.at]
    gaps = [after - before for read in reads for before, after in pairwise(read.reply.at)]
    tokens = sum(len(read.reply.token_ids) for read in reads)
    ended = max(read.reply.at[-1] for read in reads)
    return Figures(
        load=load.name,
        tokens_per_s=tokens / (ended - begun),
        first_p50_s=statistics.median(firsts),
        first_p99_s=tail(firsts),
        gap_p50_s=statistics.median(gaps),
        gap_p99_s=tail(gaps),
        wrong=sum(not sound(read.reply, load.new_tokens) for read in reads),
        kept=tuple(_kept(read) for read in reads) if load.keep else (),
    )


def _kept(read: _Read) -> Kept:
    return Kept(prompt=read.prompt, token_ids=read.reply.token_ids, logprobs=read.reply.logprobs)


def sound(reply: Reply, new_tokens: int) -> bool:
    """Whether all tokens came, each with a log-probability."""
    told = all(math.isfinite(value) and value <= _ROUNDING for value in reply.logprobs)
    return len(reply.token_ids) == len(reply.logprobs) == len(reply.at) == new_tokens and told


def tail(seconds: Sequence[float]) -> float:
    """The 99th percentile: the least number that at most one in a hundred is above."""
    ordered = sorted(seconds)
    return ordered[len(ordered) - 1 - len(ordered) // _TAIL]


_ROUNDING: Final = 1e-4
"""How far above 0 a log-probability may be: float32 sums of a vocabulary end a little beside 1."""
