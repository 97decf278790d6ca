"""Drives one engine through exchanges: prepare, stage, commit, verify, undo. `swap` says what is legal."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.clock import Clock
from slackwater.engine.base import CommitReport, Staged, TileReader
from slackwater.errors import ConflictError, CorruptError, SlackwaterError, SwapError
from slackwater.ids import StateDigest, Version
from slackwater.replica.boot import Booted
from slackwater.replica.overlay import Overlay
from slackwater.replica.prepare import (
    Check,
    Prepared,
    first_difference,
    prepare_anchor,
    prepare_delta,
    read_state,
    state_after,
)
from slackwater.replica.race import Stop, first, joined
from slackwater.replica.source import VersionSource
from slackwater.replica.status import SwapReport
from slackwater.replica.swap import Event, Swap, keeps

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLimits:
    """Bounds of one exchange."""

    lease_s: float = 30.0
    """Seconds for each call that asks the engine to stage, commit or undo. The pause is a lease: one that
    isn't over by then retires the replica."""
    threads: int = 2
    """Threads that decode and read back."""
    max_deltas: int = 32
    """Deltas that are put together into one swap at most."""
    max_bytes: int = 2 * 1024**3
    """Host memory that the writes of a swap of several deltas hold at most; a single delta takes what it needs. While
    the next delta is prepared its own writes come on top, at most as much again, and its packs."""


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
    began: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Laid:
    """Versions prepared one on top of the other."""

    overlay: Overlay
    table: StateTable
    """The state of the last."""
    chain: Sequence[Manifest]


class Exchange:
    """Owns an engine's weights: the one place that stages, commits and undoes.

    One of `move_to` and `roll_back` at a time; `digest` and `steer` at any time, from the same event loop.
    """

    def __init__(self, booted: Booted, source: VersionSource, clock: Clock, limits: ExchangeLimits) -> None:
        self.swap = Swap(version=booted.version)
        self.table = booted.table
        self._engine = booted.engine
        self._side_files = booted.side_files
        self._source = source
        self._clock = clock
        self._limits = limits
        self._last: _Commit | None = None
        self._stop = Stop()
        self._memory = asyncio.Lock()

    def steer(self, target: Version) -> None:
        """End the exchange under way, at its next safe point, if it doesn't lead to ``target``."""
        if not keeps(self.swap, target):
            self._stop.set()

    async def move_to(self, chain: Sequence[Manifest]) -> SwapReport | None:
        """Go to an anchor, or along deltas on the version in place, in one swap. None: `steer` ended it.

        A delta after the first that can't be prepared ends the way before it: its error is that of the next call, which
        begins with it.

        Args:
            chain: One anchor, or deltas, each on the one before.

        Raises:
            ConflictError: The version doesn't fit the engine or, as WrongBaseError, the state in place.
            CorruptError: Bytes don't verify, or the engine didn't hold what was committed and was put back.
            SwapError: Staging, committing or undoing failed; ``swap.serves`` says what is left.
            UnavailableError: The bucket doesn't answer.
        """
        self._stop = Stop()
        self._on(Event.BEGIN, chain[-1].version)
        ready = await self._or_fail(self._prepare(chain))
        if ready is None:
            self._on(Event.SUPERSEDE)
            return None
        self._on(Event.PREPARED)
        self._on(Event.COMMIT)
        prepare_s = self._clock.monotonic() - ready.began
        before, made = self.swap.version, ready.chain[-1]
        report = await self._commit(ready, made.version)
        verify_s = await self._verify(ready)
        return SwapReport(
            version=made.version,
            from_version=before,
            kind=made.kind,
            deltas=0 if made.kind == "anchor" else len(ready.chain),
            prepare_s=prepare_s,
            pause_s=report.pause_s,
            verify_s=verify_s,
            bytes_fetched=sum(manifest.num_bytes for manifest in ready.chain),
            bytes_written=report.bytes_written,
            tiles=len(ready.after),
            in_flight=report.in_flight,
        )

    async def roll_back(self) -> SwapReport:
        """Undo the last commit.

        Raises:
            SwapError: It failed, and the replica is retired.
        """
        began, before, last = self._clock.monotonic(), self.swap.version, self._last
        self._stop = Stop()
        self._on(Event.ROLL_BACK)
        report = await self._undo()
        return SwapReport(
            version=self.swap.version,
            from_version=before,
            kind="rollback",
            deltas=0,
            prepare_s=0.0,
            pause_s=report.pause_s,
            verify_s=self._clock.monotonic() - began - report.pause_s,
            bytes_fetched=0,
            bytes_written=report.bytes_written,
            tiles=len(last.before) if last else 0,
            in_flight=report.in_flight,
        )

    async def digest(self) -> tuple[Version, StateDigest]:
        """The version in place and the digest of all tensors, read from the engine's memory.

        No exchange commits meanwhile; tokens flow.
        """
        async with self._memory:
            version = self.swap.version
            state = await joined(partial(read_state, self._engine), Stop())
            return version, state.digest

    def _on(self, event: Event, goal: Version | None = None) -> None:
        self.swap = self.swap.after(event, goal)

    async def _or_fail(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except SlackwaterError:
            self._on(Event.FAILED)
            raise

    async def _prepare(self, chain: Sequence[Manifest]) -> _Ready | None:
        began = self._clock.monotonic()
        laid = await self._lay(chain)
        prepared = None if laid is None else await joined(laid.overlay.prepared, self._stop)
        if laid is None or prepared is None:
            return None
        staged = await self._in_time(self._engine.stage(prepared.writes))
        if staged is None:
            last = laid.chain[-1].version
            raise SwapError(f"version {last} was not staged within {self._limits.lease_s:g} s")
        if self._stop.is_set():
            return None
        return _Ready(
            staged=staged,
            before=prepared.before,
            after=prepared.after,
            table=laid.table,
            chain=laid.chain,
            began=began,
        )

    async def _lay(self, chain: Sequence[Manifest]) -> _Laid | None:
        """Prepare one version after the other, each on the bits that those before it make."""
        overlay, table = Overlay(self._engine, self._limits.threads), self.table
        for index, manifest in enumerate(chain):
            try:
                after = self._state_after(table, manifest)
                prepared = await self._decoded(manifest, after, overlay)
            except SlackwaterError as error:
                if not index:
                    raise
                return self._shortened(_Laid(overlay=overlay, table=table, chain=chain[:index]), error)
            if prepared is None:
                return None
            await joined(partial(overlay.add, prepared, last=manifest is chain[-1]), self._stop)
            del prepared  # the overlay has it: not held on while the next is fetched
            table = after
        return _Laid(overlay=overlay, table=table, chain=chain)

    def _shortened(self, laid: _Laid, error: SlackwaterError) -> _Laid:
        reached = laid.chain[-1].version
        _log.warning("going to version %d only, as the next one can't be prepared: %s", reached, error)
        self._on(Event.SHORTENED, reached)
        return laid

    def _state_after(self, table: StateTable, manifest: Manifest) -> StateTable:
        if manifest.kind == "anchor" and manifest.side_files != self._side_files:
            raise ConflictError(
                f"version {manifest.version} comes with another config or tokenizer than the engine was opened with",
                hint="another model needs another run",
            )
        return state_after(self._engine, table, manifest)

    async def _decoded(self, manifest: Manifest, after: StateTable, overlay: Overlay) -> Prepared | None:
        decode = await first(asyncio.to_thread(self._fetch, manifest, after, overlay), self._stop.wait())
        return None if decode is None else await joined(decode, self._stop)

    def _fetch(self, manifest: Manifest, after: StateTable, held: TileReader) -> Callable[[], Prepared | None]:
        """Get a version's bytes; what it gives decodes them against ``held``. In a thread."""
        threads, stop = self._limits.threads, self._stop
        if manifest.kind == "anchor":
            folder = self._source.anchor(manifest)
            return lambda: prepare_anchor(held, after, folder, threads, stop)
        bodies = self._source.bodies(manifest)
        return lambda: prepare_delta(held, after.outline, manifest, bodies, threads, stop)

    async def _commit(self, ready: _Ready, version: Version) -> CommitReport:
        async with self._memory:
            report = await self._or_fail(self._in_time(self._engine.commit(ready.staged, version)))
            if report is None:
                self._on(Event.HUNG)
                raise SwapError(
                    f"the commit of version {version} did not end within {self._limits.lease_s:g} s",
                    hint="restart the replica",
                )
            self._on(Event.COMMITTED)
            self._last = _Commit(staged=ready.staged, before=ready.before, table=self.table)
            self.table = ready.table
        return report

    async def _verify(self, ready: _Ready) -> float:
        began, version = self._clock.monotonic(), self.swap.version
        wrong = await self._difference(ready.after)
        if wrong is None:
            self._on(Event.AGREED)
            return self._clock.monotonic() - began
        self._on(Event.DIFFERED)
        await self._undo()
        raise CorruptError(
            f"version {version} was undone: {wrong} in the engine's memory was not the manifest's",
            hint="if it happens again, look at this machine's memory",
        )

    async def _difference(self, checks: tuple[Check, ...]) -> str | None:
        """What differs, in words; a failure to read counts."""
        stop = Stop()
        try:
            check = await joined(partial(first_difference, self._engine, checks, self._limits.threads, stop), stop)
        except SlackwaterError as error:
            return str(error)
        return None if check is None else f"{check.name}, tile {check.tile.index},"

    async def _undo(self) -> CommitReport:
        last, version = self._last, self.swap.previous
        if last is None or version is None:
            raise SwapError("there is no commit to undo")
        async with self._memory:
            report = await self._or_fail(self._in_time(self._engine.undo(last.staged, version)))
            if report is None:
                self._on(Event.HUNG)
                raise SwapError(f"undoing to version {version} did not end in time", hint="restart the replica")
            wrong = await self._difference(last.before)
            if wrong is not None:
                self._on(Event.FAILED)
                raise SwapError(f"undoing to version {version} left {wrong} wrong", hint="restart the replica")
            self._on(Event.UNDONE)
            self.table, self._last = last.table, None
        return report

    async def _in_time(self, call: Coroutine[Any, Any, T]) -> T | None:
        return await first(call, self._clock.sleep(self._limits.lease_s))
