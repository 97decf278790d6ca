"""Drives one engine through exchanges: prepare, stage, drain, commit, verify, undo. `swap` says what is legal."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.clock import Clock
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import CommitReport, Proof, Staged
from slackwater.errors import CanaryError, SlackwaterError, SpoiltError, SwapError, UnavailableError
from slackwater.ids import StateDigest, Version
from slackwater.replica.boot import Booted
from slackwater.replica.canary import HINT, canary_off
from slackwater.replica.laying import Laid, Laying
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.prepare import Check, checks_of, first_difference, read_state
from slackwater.replica.race import Stop, first, joined
from slackwater.replica.source import VersionSource
from slackwater.replica.status import SwapReport
from slackwater.replica.swap import Event, Stage, Swap, keeps

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Commit:
    """The last commit, with what undoing it needs."""

    staged: Staged
    before: tuple[Check, ...]
    table: StateTable
    """The state before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """Staged writes and what they make. The writes themselves are not held on: staging them was their end."""

    staged: Staged
    before: tuple[Check, ...]
    after: tuple[Check, ...]
    table: StateTable
    chain: Sequence[Manifest]
    """The versions on the way; the last is the one that is made."""
    fetch_s: float
    decode_s: float
    stage_s: float
    prepare_s: float

    @property
    def made(self) -> Manifest:
        return self.chain[-1]


class Exchange:
    """Owns an engine's weights: the one place that stages, commits and undoes.

    One of `move_to` and `roll_back` at a time; the rest at any time, from the same event loop.
    """

    def __init__(
        self,
        booted: Booted,
        source: VersionSource,
        clock: Clock,
        limits: ExchangeLimits,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> None:
        self.swap = Swap(version=booted.version)
        self.table = booted.table
        self.spoilt = False
        """The engine's memory was found to be other than the version in place has it."""
        self._engine = booted.engine
        self._laying = Laying(booted.engine, booted.side_files, source, clock, limits.threads)
        self._clock = clock
        self._limits = limits
        self._last: _Commit | None = None
        self._proven: Version | None = None
        self._taken_back: list[Version] = []
        self._stop = Stop()
        self._in_flight = in_flight
        self._hurried = asyncio.Event()  # nobody wants answers to end by themselves any more
        self._recalled = asyncio.Event()  # the version in place is to be rolled back, whatever its canary says
        self._memory = asyncio.Lock()

    def doubts(self) -> Callable[[Version], bool]:
        """What tells, for an answer that begins now, whether tokens of a version may be of other bits than it has.

        So they may until everything that will be looked at has been, and where the version was taken back since.
        """
        begin = len(self._taken_back)
        return lambda version: self.spoilt or version in self._unproven or version in self._taken_back[begin:]

    @property
    def _unproven(self) -> frozenset[Version]:
        return self.swap.unproven - {self._proven}

    def steer(self, target: Version, in_flight: InFlight) -> None:
        """End the exchange under way, at its next safe point, if it doesn't lead to ``target``.

        Until its commit, it and all later ones do with answers in flight what is said here.
        """
        self._in_flight = in_flight
        if in_flight is not InFlight.DRAIN:
            self._hurried.set()
        elif not self._stop.is_set():
            self._hurried.clear()
        if self.swap.stage is Stage.VERIFYING and target == self.swap.previous:
            self._recalled.set()
        if not keeps(self.swap, target):
            self.stop()

    def stop(self) -> None:
        """End the exchange under way at its next safe point."""
        self._stop.set()
        self._hurried.set()

    async def move_to(self, chain: Sequence[Manifest]) -> SwapReport | None:
        """Go to an anchor, or along deltas on the version in place, in one swap. None: it was ended from outside.

        A delta after the first that can't be prepared ends the way before it: its error is that of the next call, which
        begins with it.

        Args:
            chain: One anchor, or deltas, each on the one before.

        Raises:
            ConflictError: The version doesn't fit the engine or, as WrongBaseError, the state in place.
            CorruptError: The bytes don't verify.
            SpoiltError: The engine doesn't hold the version in place; ``swap.serves`` is false now.
            CanaryError: The engine doesn't compute with it as its trainer does, and was put back.
            SwapError: Staging, committing or undoing failed, or the engine didn't hold what was committed and was put
                back; ``swap.serves`` says what is left.
            UnavailableError: The bucket doesn't answer; or the engine died. Where that was in its commit or undo,
                ``swap.serves`` is false now.
        """
        self._stop = Stop()
        self._on(Event.BEGIN, chain[-1].version)
        ready = await self._or_fail(self._prepare(chain))
        if ready is None:
            self._on(Event.SUPERSEDE)
            return None
        self._on(Event.PREPARED)
        async with self._drained() as drain_s:
            if self._stop.is_set():
                self._on(Event.SUPERSEDE)
                return None
            self._on(Event.COMMIT)
            before, mode = self.swap.version, self._in_flight
            report = await self._commit(ready, mode)
        verify_s = await self._verify(ready)
        return SwapReport(
            version=ready.made.version,
            from_version=before,
            kind=ready.made.kind,
            deltas=0 if ready.made.kind == "anchor" else len(ready.chain),
            fetch_s=ready.fetch_s,
            decode_s=ready.decode_s,
            stage_s=ready.stage_s,
            prepare_s=ready.prepare_s,
            drain_s=drain_s,
            pause_s=report.pause_s,
            verify_s=verify_s,
            bytes_fetched=sum(manifest.num_bytes for manifest in ready.chain),
            bytes_written=report.bytes_written,
            tiles=len(ready.after),
            mode=mode,
            in_flight=report.in_flight,
            ended=report.ended,
        )

    async def roll_back(self) -> SwapReport:
        """Undo the last commit. It isn't drained for: nobody rolls back to wait.

        Raises:
            SwapError: It failed, and the replica is retired.
        """
        began, before, last, mode = self._clock.monotonic(), self.swap.version, self._last, self._in_flight
        self._stop = Stop()
        self._on(Event.ROLL_BACK)
        report = await self._undo(mode)
        return SwapReport(
            version=self.swap.version,
            from_version=before,
            kind="rollback",
            pause_s=report.pause_s,
            verify_s=self._clock.monotonic() - began - report.pause_s,
            bytes_written=report.bytes_written,
            tiles=len(last.before) if last else 0,
            mode=mode,
            in_flight=report.in_flight,
            ended=report.ended,
        )

    async def digest(self) -> tuple[Version, StateDigest]:
        """The version in place and the digest of all tensors, read from the engine's memory.

        No exchange commits meanwhile; tokens flow.
        """
        async with self._memory:
            version = self.swap.version
            state = await joined(partial(read_state, self._engine), Stop())
            return version, state.digest

    async def look_at(self, tiles: range) -> str | None:
        """Compare tiles, by number, with what the version in place has. What differs, in words; None: nothing.

        What has just been committed is left to its own verification.
        """
        async with self._memory:
            wrong = await self._difference(checks_of(self.table, tiles))
            if wrong is None or self.swap.provisional:
                return None
            self.spoilt = True
            return wrong

    def _on(self, event: Event, goal: Version | None = None) -> None:
        self.swap = self.swap.after(event, goal)

    async def _or_fail(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except SpoiltError:
            self.spoilt = True
            self._on(Event.SPOILT)
            raise
        except SlackwaterError:
            self._on(Event.FAILED)
            raise

    async def _prepare(self, chain: Sequence[Manifest]) -> _Ready | None:
        began = self._clock.monotonic()
        laid = await self._laying.lay(chain, self.table, self._stop, self._shortened)
        if laid is None:
            return None
        return await self._stage(laid, began)

    async def _stage(self, laid: Laid, began: float) -> _Ready | None:
        laid_at = self._clock.monotonic()
        staged = await self._in_time(self._engine.stage(laid.prepared.writes))
        if staged is None:
            last = laid.chain[-1].version
            raise SwapError(f"version {last} was not staged within {self._limits.lease_s:g} s")
        if self._stop.is_set():
            return None
        staged_at = self._clock.monotonic()
        return _Ready(
            staged=staged,
            before=laid.prepared.before,
            after=laid.prepared.after,
            table=laid.table,
            chain=laid.chain,
            fetch_s=laid.fetch_s,
            decode_s=laid.decode_s,
            stage_s=staged_at - laid_at,
            prepare_s=staged_at - began,
        )

    def _shortened(self, reached: Manifest, error: SlackwaterError) -> None:
        _log.warning("going to version %d only, as the next one can't be prepared: %s", reached.version, error)
        self._on(Event.SHORTENED, reached.version)

    @asynccontextmanager
    async def _drained(self) -> AsyncGenerator[float]:
        """Let answers end first, if that is the mode; the seconds that it took. Later ones wait while this is open."""
        if self._in_flight is not InFlight.DRAIN:
            yield 0.0
            return
        self._hurried.clear()
        self._on(Event.DRAIN)
        began, limit = self._clock.monotonic(), self._limits.drain_s
        drain = asyncio.ensure_future(self._engine.drain())
        try:
            out_of_time = first(self._hurried.wait(), self._clock.sleep(limit))
            await first(asyncio.wait((drain,)), out_of_time)
            if drain.done():
                await self._or_fail(drain)
            elif not self._hurried.is_set():
                _log.warning("answers that have not ended within %g s are cut", limit)
            yield self._clock.monotonic() - began
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            self._engine.proceed()  # one that had ended holds answers back too, and perhaps there was no commit

    async def _commit(self, ready: _Ready, in_flight: InFlight) -> CommitReport:
        version, strict = ready.made.version, self._limits.strict
        self._proven = version if strict and ready.made.canary is None else None
        proof = self._proof(ready) if strict else None
        async with self._memory:
            commit = self._engine.commit(ready.staged, version, in_flight=in_flight, proof=proof)
            report = await self._answered(commit, version)
            self._on(Event.COMMITTED)
            self._last = _Commit(staged=ready.staged, before=ready.before, table=self.table)
            self.table = ready.table
        return report

    async def _answered(self, commit: Coroutine[Any, Any, CommitReport], version: Version) -> CommitReport:
        """What a commit reports. An engine that is silent, or died, hasn't said that it put the old bits back."""
        try:
            report = await self._in_time(commit)
        except UnavailableError:
            self._lost(version)
            raise
        except SlackwaterError:
            self._on(Event.FAILED)
            raise
        if report is None:
            self._lost(version)
            late = f"the commit of version {version} did not end within {self._limits.lease_s:g} s"
            raise SwapError(late, hint="restart the replica")
        return report

    def _lost(self, version: Version) -> None:
        self._on(Event.HUNG)
        self._taken_back.append(version)

    def _proof(self, ready: _Ready) -> Proof:
        """Compares what was written with the manifest's digests; for the engine to call in its pause."""
        return lambda: _told(first_difference(self._engine, ready.after, self._limits.threads, Stop()))

    async def _verify(self, ready: _Ready) -> float:
        began, version = self._clock.monotonic(), self.swap.version
        self._recalled.clear()
        wrong = None if self._limits.strict else await self._difference(ready.after)
        patience = self._limits.canary_s
        off = None if wrong else await canary_off(self._engine, ready.made, self._clock, patience, self._recalled)
        if wrong is None and off is None:
            self._on(Event.AGREED)
            return self._clock.monotonic() - began
        self._on(Event.DIFFERED)
        self._taken_back.append(version)
        await self._undo(InFlight.CONTINUE, spoilt=True)
        if wrong is None:
            raise CanaryError(f"version {version} was undone: {off}", hint=HINT)
        raise SwapError(
            f"version {version} was undone: {wrong}", hint="if it happens again, look at this machine's memory"
        )

    async def _difference(self, checks: Sequence[Check]) -> str | None:
        """What differs, in words; a failure to read counts."""
        stop = Stop()
        try:
            return _told(
                await joined(partial(first_difference, self._engine, checks, self._limits.threads, stop), stop)
            )
        except SlackwaterError as error:
            return str(error)

    async def _undo(self, in_flight: InFlight, *, spoilt: bool = False) -> CommitReport:
        last, version = self._last, self.swap.previous
        if last is None or version is None:
            raise SwapError("there is no commit to undo")
        async with self._memory:
            undo = self._engine.undo(last.staged, version, in_flight=in_flight, spoilt=spoilt)
            report = await self._or_fail(self._in_time(undo))
            if report is None:
                self._on(Event.HUNG)
                raise SwapError(f"undoing to version {version} did not end in time", hint="restart the replica")
            wrong = await self._difference(last.before)
            if wrong is not None:
                self._on(Event.FAILED)
                raise SwapError(f"undoing to version {version}: {wrong}", hint="restart the replica")
            self._on(Event.UNDONE)
            self.table, self._last = last.table, None
        return report

    async def _in_time(self, call: Coroutine[Any, Any, T]) -> T | None:
        return await first(call, self._clock.sleep(self._limits.lease_s))


def _told(check: Check | None) -> str | None:
    return None if check is None else f"{check.place} in the engine's memory is not as it should be"
