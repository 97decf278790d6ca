"""A replica that follows a bucket under load: what its readers wait for, and whether what they are told is true.

A publisher commits a real step and its way back, in turn, to a local folder; the replica follows. After each swap the
engine's memory is compared with the checkpoint, and a probe, whose prompt the old weights have in their cache too, is
answered. Fresh engines on both checkpoints say afterwards what the probes should have been, to the bit. At last one
more delta is taken without load, and the host memory that it takes is traced.
"""

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pairs import Pair
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.warm import warm_kernels
from slackwater.delivery.fetcher import Fetcher
from slackwater.delivery.watcher import Watcher
from slackwater.engine.base import Engine
from slackwater.ids import BootId, ReplicaId, Version
from slackwater.publish.publisher import Publisher
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.replica import Replica, ReplicaOptions
from slackwater.rollout.evidence import Completion, collect
from swap_load import PROMPT, RUN, WINDOW, Ask, StillClock, Streams, open_engine, request, streaming

if TYPE_CHECKING:
    from swap_peers import Live

POLL_S: Final = 0.2
"""Seconds between the replica's looks at the bucket: the default of `slackwater replica`."""

_PROBE_TOKENS: Final = 6
_QUIET: Final = 8
"""Tokens of each reader between swaps: what a normal step is measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One version under load. Times in seconds."""

    to_first_token: float
    """From the commit in the bucket to the first token that a reader reads of it."""
    pause: float
    gap: float
    """The longest wait of any reader for its first token of the version."""
    longest: float
    """The longest wait of any reader from the commit in the bucket to the end of the verification."""
    step: float
    """The median wait just before."""
    quiet: float
    """The longest wait of any reader for its last token there: what ``gap`` is where nothing is swapped."""

    @property
    def over_step(self) -> float:
        """What a reader waited beyond a normal step."""
        return self.gap - self.step

    @property
    def quiet_over_step(self) -> float:
        """The same without a swap: steps swing by themselves."""
        return self.quiet - self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What one set showed."""

    name: str
    swaps: tuple[Swap, ...]
    encoded: int
    """Bytes of a delta's objects."""
    extra: int
    """Host memory at the peak of an exchange, in bytes, from its beginning on."""
    mixed: int
    """Swaps after which some bit wasn't the checkpoint's."""
    stale: int
    """Probes that weren't answered as a fresh engine answers."""
    aborted: int
    false_labels: int

    def median(self, name: str) -> float:
        """Of one of `Swap`'s times."""
        return statistics.median(getattr(swap, name) for swap in self.swaps)

    def most(self, name: str) -> float:
        """Of one of `Swap`'s times."""
        return max(getattr(swap, name) for swap in self.swaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    version: Version
    answer: Completion


class _Follower:
    """A publisher, and a replica that follows it."""

    def __init__(self, work: Path, model: Path, pair: Pair) -> None:
        bucket = LocalBucket(work / "bucket", create=True)
        self._model = model
        self._states = (pair.before, pair.after)
        self._held = (pair.old, pair.new)
        self._publisher = Publisher(bucket, RUN)
        self.fetcher = Fetcher(bucket, RUN, work / "cache")
        # One thread: of two cores the engine has the other.
        limits = ExchangeLimits(threads=1)
        options = ReplicaOptions(replica=ReplicaId("replica-0"), boot=BootId("boot-0"), run=RUN, exchange=limits)
        clock = StillClock()
        self.replica = Replica(options, self.fetcher, Watcher(self.fetcher, clock, POLL_S), self._open, clock)
        self._engine: Engine | None = None
        self._live: Live | None = None

    async def _open(self, folder: Path, version: Version) -> Engine:
        self._engine, self._live = await open_engine(folder, version, StillClock())
        return self._engine

    def in_place(self) -> Version:
        """The engine's own label: the replica's status learns of it a little later than tokens may be read."""
        return Version(-1) if self._engine is None else self._engine.stats().version

    async def publish(self, number: int) -> float:
        """Commit the old state where the number is even, the new one where it is odd; when it was."""
        await asyncio.to_thread(
            self._publisher.publish, self._states[number % 2], step=number, folder_files=self._model
        )
        return time.perf_counter()

    async def confirmed(self, version: Version) -> None:
        """Wait until a version is in place and verified."""
        while (status := self.replica.status()).version != version or status.provisional:  # noqa: ASYNC110  # a replica tells nobody
            await asyncio.sleep(0.005)

    def is_whole(self, number: int) -> bool:
        """Whether the engine's memory is that state, byte for byte."""
        return self._live is not None and self._live.holds(self._held[number % 2])


async def measured(name: str, work: Path, model: Path, pair: Pair, swaps: int) -> Served:
    """Measure one set.

    Args:
        name: The set's.
        work: An empty folder on a disk.
        model: A model folder that holds ``pair.old``.
        pair: The states.
        swaps: How many versions are taken under load.
    """
    await asyncio.to_thread(warm_kernels, {spec.dtype for spec in pair.outline.specs})
    follower = _Follower(work, model, pair)
    await follower.publish(0)
    await follower.replica.start()
    try:
        found: list[Swap] = []
        probes: list[_Probe] = []
        mixed = 0
        async with streaming(follower.replica.complete, follower.in_place, WINDOW - PROMPT) as streams:
            for number in range(1, swaps + 1):
                found.append(await _swap(follower, streams, number))
                mixed += not follower.is_whole(number)
                probes.append(_Probe(version=Version(number), answer=await _probe(follower.replica.complete)))
        extra = await _extra(follower, swaps + 1)
        mixed += not follower.is_whole(swaps + 1)
        encoded = follower.fetcher.manifest(Version(swaps + 1)).num_bytes
    finally:
        await follower.replica.close()
    return Served(
        name=name,
        swaps=tuple(found),
        encoded=encoded,
        extra=extra,
        mixed=mixed,
        stale=await _stale(probes, model, pair),
        aborted=streams.aborted,
        false_labels=streams.false_labels,
    )


async def _swap(follower: _Follower, streams: Streams, number: int) -> Swap:
    version = Version(number)
    begin = time.perf_counter()
    await streams.all_have(_QUIET)
    end = time.perf_counter()
    step, quiet = streams.step(begin, end), streams.last(begin, end)
    committed = await follower.publish(number)
    first = await streams.first_of(version)
    await follower.confirmed(version)
    verified = time.perf_counter()
    await streams.all_have(2)
    return Swap(
        to_first_token=first - committed,
        pause=follower.replica.status().swaps[-1].pause_s,
        gap=streams.gap(version),
        longest=streams.longest(committed, verified),
        step=step,
        quiet=quiet,
    )


async def _probe(ask: Ask) -> Completion:
    """A seeded answer to the first reader's prompt, with log-probabilities of a few tokens."""
    answer = await ask(request(0, max_tokens=_PROBE_TOKENS, top_logprobs=5))
    steps = [step async for step in answer]
    await answer.aclose()
    return collect(answer.origin, steps, answer.finish)


async def _extra(follower: _Follower, number: int) -> int:
    """Take one more version while Python's and numpy's allocations are traced; how far they rose."""
    await follower.replica.set_target(follower.in_place())
    await follower.publish(number)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await follower.replica.set_target(Version(number))
        await follower.confirmed(Version(number))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return most - before


async def _stale(probes: Sequence[_Probe], model: Path, pair: Pair) -> int:
    """How many probes a fresh engine, whose cache is empty, answers otherwise."""
    wrong = 0
    for parity, states in enumerate((pair.old, pair.new)):
        mine = [probe for probe in probes if probe.version % 2 == parity]
        if not mine:
            continue
        engine, live = await open_engine(model, Version(0), StillClock())
        try:
            live.put(states)
            truth = await _probe(engine.generate)
        finally:
            await engine.close()
        wrong += sum(not _is_as(probe, truth) for probe in mine)
    return wrong


def _is_as(probe: _Probe, truth: Completion) -> bool:
    answer = probe.answer
    told = {step.version for step in answer.steps} == {probe.version} == {answer.origin.prompt_version}
    return told and (answer.token_ids, _tops(answer)) == (truth.token_ids, _tops(truth))


def _tops(answer: Completion) -> list[tuple[float, ...]]:
    return [step.top_logprobs for step in answer.steps]
