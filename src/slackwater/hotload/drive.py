"""Drives one operation: tells its replicas, watches them, and goes from phase to phase as the machines say."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slackwater.clock import Clock
from slackwater.errors import ConflictError, SlackwaterError, UnavailableError
from slackwater.hotload.book import Book
from slackwater.hotload.operation import (
    Operation,
    OperationEvent,
    OperationState,
    ReplicaProgress,
    ReplicaStage,
    judge,
    news,
    obeys,
    outcome,
    still_well,
)
from slackwater.hotload.rollout import MOVES, Phase
from slackwater.hotload.target import Target, TargetError, TargetStatus
from slackwater.ids import ReplicaId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveLimits:
    """Bounds of a drive."""

    deadline_s: float
    """Seconds for those who are told together."""
    poll_s: float
    """Seconds between two looks at a replica that is under way."""
    standing_poll_s: float
    """Seconds between two looks of a standing operation."""


class Driver:
    """Drives operations of one `Book` over ``targets``; each `run` is one task."""

    def __init__(self, targets: Mapping[ReplicaId, Target], book: Book, clock: Clock, limits: DriveLimits) -> None:
        self._targets = targets
        self._book = book
        self._clock = clock
        self._limits = limits
        self._warned: dict[ReplicaId, tuple[str, TargetError | None]] = {}

    async def run(self, operation_id: str) -> None:
        """Drive an operation from where it stands to its end; a standing one for ever."""
        operation = self._book.get(operation_id)
        if operation.state is OperationState.QUEUED:
            operation = operation.after(OperationEvent.START)
            self._book.put(operation)
        if operation.order.standing:
            await _together(self._stand(operation_id, name) for name in operation.names)
            return
        while operation.phase in (Phase.CANARY, Phase.HOLDING):
            well = await self._go_first(operation)
            operation = self._book.get(operation_id)
            operation = replace(operation, phase=MOVES[operation.phase, well])
            self._book.put(operation)
        if operation.phase is Phase.FLEET:
            await self._settle(operation_id, operation.names)
        self._end(operation_id)

    async def _go_first(self, operation: Operation) -> bool:
        """One phase of the canary; whether all of it did well."""
        canary = operation.order.canary
        if operation.phase is Phase.CANARY:
            await self._settle(operation.id, operation.told)
        elif canary is not None:
            await self._clock.sleep(canary.hold_s)
            await _together(self._check(operation.id, name) for name in operation.told)
        now = self._book.get(operation.id)
        return all(now.part(name).stage is ReplicaStage.DONE for name in now.told)

    async def _settle(self, operation_id: str, names: Sequence[ReplicaId]) -> None:
        """Tell these replicas and watch them until each has settled, or time is up."""
        left = [name for name in names if not self._book.get(operation_id).part(name).settled]
        everyone = asyncio.ensure_future(_together(self._bring(operation_id, name) for name in left))
        timer = asyncio.ensure_future(self._clock.sleep(self._limits.deadline_s))
        try:
            await asyncio.wait((everyone, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            everyone.cancel()
            timer.cancel()
            await asyncio.gather(everyone, timer, return_exceptions=True)
        if not everyone.cancelled() and (error := everyone.exception()) is not None:
            _log.error("hot-load %s was not driven to its end", operation_id, exc_info=error)

    async def _bring(self, operation_id: str, name: ReplicaId) -> None:
        """Tell one replica, then look until it has settled; tell it again if its target is another."""
        obeying = False
        while True:
            status = await self._look(operation_id, name, tell=not obeying)
            obeying = status is not None and obeys(self._book.get(operation_id).order, status)
            if self._book.get(operation_id).part(name).settled:
                return
            await self._clock.sleep(self._limits.poll_s)

    async def _stand(self, operation_id: str, name: ReplicaId) -> None:
        """Look at one replica for ever; tell it once, and whenever it doesn't do what the standing order says."""
        owed = self._book.get(operation_id).part(name).told_at is None
        while True:
            status = await self._look(operation_id, name, tell=owed)
            if status is not None:
                strays = not owed and not obeys(self._book.get(operation_id).order, status)
                # One that refuses is told again, not asked how it is: its refusal stays to be seen.
                owed = strays and await self._look(operation_id, name, tell=True) is None
            await self._clock.sleep(self._limits.standing_poll_s)

    async def _look(self, operation_id: str, name: ReplicaId, *, tell: bool) -> TargetStatus | None:
        """Ask one replica, or tell it, and keep what it says; None where it doesn't answer, or refuses."""
        operation = self._book.get(operation_id)
        target = self._targets.get(name)
        status: TargetStatus | None = None
        if target is None:
            seen = _failed(name, ConflictError(f"replica {name} is no longer in this fleet"), ReplicaStage.FAILED)
        else:
            try:
                order = operation.order
                status = await (target.set_target(order.goal, order.in_flight) if tell else target.status())
            except SlackwaterError as error:
                seen = _failed(name, error, _stage_of(error))
            else:
                seen = judge(operation.order, status)
                self._book.saw(status, operation_id)
        operation = self._book.get(operation_id)
        self._put(operation, news(operation.part(name), seen, self._clock.wall()))
        return status

    def _put(self, operation: Operation, part: ReplicaProgress) -> None:
        """Keep a replica's news; a failure is a warning, once until it is another, or mended."""
        self._book.put(operation.with_progress(part))
        if part.stage is ReplicaStage.DONE:
            self._warned.pop(part.replica, None)
        failure = (operation.id, part.error)
        if part.stage is ReplicaStage.FAILED and self._warned.get(part.replica) != failure:
            self._warned[part.replica] = failure
            _warn(operation, part)

    async def _check(self, operation_id: str, name: ReplicaId) -> None:
        """Ask a canary at the end of its hold."""
        before = self._book.get(operation_id).part(name)
        try:
            seen = judge(self._book.get(operation_id).order, await self._targets[name].status())
        except (SlackwaterError, KeyError) as error:
            told = error if isinstance(error, SlackwaterError) else ConflictError(f"{name} left this fleet")
            seen = _failed(name, told, _stage_of(told))
        operation = self._book.get(operation_id)
        self._put(operation, still_well(before, seen))

    def _end(self, operation_id: str) -> None:
        operation = self._book.get(operation_id)
        told = set(operation.told)
        parts = tuple(self._last_word(part, told=part.replica in told) for part in operation.replicas)
        ended = replace(operation, replicas=parts).after(outcome(parts))
        self._book.put(ended)
        _log.info("hot-load %s of version %s: %s", ended.id, ended.order.version, ended.state)

    def _last_word(self, part: ReplicaProgress, *, told: bool) -> ReplicaProgress:
        if part.settled:
            return part
        if not told:
            return replace(part, stage=ReplicaStage.SKIPPED)
        late = TargetError(kind="unavailable", message=f"not settled within {self._limits.deadline_s:g} s")
        if part.stage is ReplicaStage.UNDER_WAY and (last := self._book.last(part.replica)) is not None:
            where = f"{last.stage}, {last.in_flight} answers in flight"
            late = TargetError(kind=late.kind, message=f"{late.message}: {where}")
        return replace(part, stage=ReplicaStage.UNKNOWN, error=part.error or late)


def _warn(operation: Operation, part: ReplicaProgress) -> None:
    goal = "the head" if operation.order.version is None else f"version {operation.order.version}"
    words = "it doesn't say why" if part.error is None else f"{part.error.kind}: {part.error.message}"
    _log.warning("replica %s failed to reach %s (hot-load %s): %s", part.replica, goal, operation.id, words)


def _failed(name: ReplicaId, error: SlackwaterError, stage: ReplicaStage) -> ReplicaProgress:
    return ReplicaProgress(replica=name, stage=stage, error=TargetError(kind=error.kind, message=str(error)))


def _stage_of(error: SlackwaterError) -> ReplicaStage:
    """Silence and a state that passes are waited for; any other refusal stands."""
    if isinstance(error, UnavailableError):
        return ReplicaStage.UNKNOWN
    return ReplicaStage.PENDING if isinstance(error, ConflictError) else ReplicaStage.FAILED


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)
