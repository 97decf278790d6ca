"""Drives hot-loads over a fleet: tells every replica, then watches until each has settled or time is up."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slackwater.clock import Clock
from slackwater.errors import ConflictError, NotFoundError, SlackwaterError, UnavailableError
from slackwater.hotload.operation import (
    Operation,
    OperationEvent,
    ReplicaProgress,
    ReplicaStage,
    judge,
    outcome,
)
from slackwater.hotload.snapshots import Snapshot, SnapshotLookup
from slackwater.hotload.target import Goal, Target, TargetError, TargetStatus
from slackwater.ids import ReplicaId, parse_snapshot

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorLimits:
    """Bounds of the conductor."""

    deadline_s: float = 600.0
    """Seconds for a whole operation."""
    poll_s: float = 0.1
    """Seconds between two looks at a replica that is under way."""
    history: int = 256
    """Operations that are remembered; the oldest ended one is forgotten first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMember:
    """One replica as it was heard just now."""

    replica: ReplicaId
    status: TargetStatus | None
    """None where it didn't answer; ``error`` says why."""
    error: TargetError | None


class Conductor:
    """Hot-load operations over ``targets``.

    Kept in memory: after a restart the replicas still know their targets, and the history begins anew.
    All calls from one event loop; `close` ends what runs.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        snapshots: SnapshotLookup,
        clock: Clock,
        limits: ConductorLimits | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._targets = tuple(targets)
        self._snapshots = snapshots
        self._clock = clock
        self._limits = limits or ConductorLimits()
        self._new_id = new_id
        self._operations: dict[str, Operation] = {}
        self._driver: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def submit(self, snapshot: str, idempotency_key: str | None = None) -> Operation:
        """Begin to load ``<run>/<version>`` everywhere; returns at once.

        The same key gives the same operation, and so does the snapshot that is being loaded right now.
        Any other snapshot supersedes what runs.

        Raises:
            InvalidInputError: ``snapshot`` is no snapshot's name. No replica and no store was asked.
            NotFoundError: There is no such snapshot in this lineage. No replica was told.
            ConflictError: The key was used for another snapshot.
        """
        run, version = parse_snapshot(snapshot)
        if run != self._snapshots.run:
            raise NotFoundError(f"there is no run {run!r} here", hint=f"this fleet serves {self._snapshots.run!r}")
        async with self._turn:
            known = self._known(snapshot, idempotency_key)
            if known is not None:
                return known
            await asyncio.to_thread(self._snapshots.find, version)
            await self._stop(OperationEvent.SUPERSEDE)
            name = self._new_id()
            operation = Operation(
                id=name,
                idempotency_key=idempotency_key or name,
                run=run,
                version=version,
                created_at=self._clock.wall(),
                replicas=tuple(ReplicaProgress(replica=target.replica) for target in self._targets),
            )
            self._remember(operation)
            self._driver = asyncio.get_running_loop().create_task(self._drive(name), name=f"hot-load-{name}")
            return operation

    def get(self, operation_id: str) -> Operation:
        """One operation, as it stands.

        Raises:
            NotFoundError: There is none of that id, or it was forgotten.
        """
        if operation_id not in self._operations:
            raise NotFoundError(f"there is no hot-load {operation_id[:80]!r}", hint="list them")
        return self._operations[operation_id]

    def list(self) -> tuple[Operation, ...]:
        """The remembered operations, newest first."""
        return tuple(reversed(self._operations.values()))

    async def cancel(self, operation_id: str) -> Operation:
        """End an operation. Replicas that are still under way are told to stay where they are.

        Raises:
            NotFoundError: There is no such operation.
            ConflictError: It has ended already.
        """
        async with self._turn:
            operation = self.get(operation_id)
            if operation.ended:
                raise ConflictError(f"hot-load {operation_id} has ended: {operation.state}")
            await self._stop(OperationEvent.CANCEL)
            left = {part.replica: part for part in operation.replicas if not part.settled}
            await asyncio.gather(*(self._hold(target, left) for target in self._targets))
            return self.get(operation_id)

    async def follow(self) -> tuple[FleetMember, ...]:
        """Let every replica follow the head from now on; supersedes what runs."""
        async with self._turn:
            await self._stop(OperationEvent.SUPERSEDE)
            return await self._ask_all("head")

    async def fleet(self) -> tuple[FleetMember, ...]:
        """Every replica as it is now; a silent one is listed with its error."""
        return await self._ask_all(None)

    async def snapshots(self) -> tuple[Snapshot, ...]:
        """The lineage from its first snapshot to the newest."""
        return await asyncio.to_thread(self._snapshots.chain)

    async def close(self) -> None:
        """End what runs, as cancelled; replicas go on by themselves."""
        async with self._turn:
            await self._stop(OperationEvent.CANCEL)

    def _known(self, snapshot: str, key: str | None) -> Operation | None:
        for operation in self._operations.values():
            same = (operation.run, operation.version) == parse_snapshot(snapshot)
            if key is not None and operation.idempotency_key == key:
                if not same:
                    raise ConflictError(
                        f"idempotency key {key[:80]!r} was used for version {operation.version}",
                        hint="take a new key for a new hot-load",
                    )
                return operation
            if key is None and same and not operation.ended:
                return operation
        return None

    def _remember(self, operation: Operation) -> None:
        self._operations[operation.id] = operation
        ended = [known.id for known in self._operations.values() if known.ended]
        for old in ended[: max(0, len(self._operations) - self._limits.history)]:
            del self._operations[old]

    async def _stop(self, event: OperationEvent) -> None:
        """End the running operation with ``event``, and wait until nothing is told any more in its name."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
        for operation in self._operations.values():
            if not operation.ended:
                self._operations[operation.id] = operation.after(event)

    async def _drive(self, operation_id: str) -> None:
        self._operations[operation_id] = self.get(operation_id).after(OperationEvent.START)
        everyone = asyncio.ensure_future(self._drive_all(operation_id))
        timer = asyncio.ensure_future(self._clock.sleep(self._limits.deadline_s))
        try:
            await asyncio.wait((everyone, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            everyone.cancel()
            timer.cancel()
            await asyncio.gather(everyone, timer, return_exceptions=True)
        if not everyone.cancelled() and (error := everyone.exception()) is not None:
            _log.error("hot-load %s was not driven to its end", operation_id, exc_info=error)
        self._end(operation_id)

    async def _drive_all(self, operation_id: str) -> None:
        async with asyncio.TaskGroup() as group:
            for target in self._targets:
                group.create_task(self._drive_one(operation_id, target))

    def _end(self, operation_id: str) -> None:
        operation = self.get(operation_id)
        parts = tuple(self._settle(part) for part in operation.replicas)
        ended = replace(operation, replicas=parts).after(outcome(parts))
        self._operations[operation_id] = ended
        _log.info("hot-load %s of version %d: %s", ended.id, ended.version, ended.state)

    def _settle(self, part: ReplicaProgress) -> ReplicaProgress:
        if part.settled:
            return part
        late = TargetError(kind="unavailable", message=f"not settled within {self._limits.deadline_s:g} s")
        return replace(part, stage=ReplicaStage.UNKNOWN, error=part.error or late)

    async def _drive_one(self, operation_id: str, target: Target) -> None:
        """Tell one replica, then look until it has settled; tell it again if its target is another."""
        version, told = self.get(operation_id).version, False
        while True:
            try:
                status = await (target.status() if told else target.set_target(version))
            except SlackwaterError as error:
                progress = _refused(target.replica, error)
            else:
                progress = judge(version, status)
                told = status.target == version and status.state == "serving"
            self._operations[operation_id] = self.get(operation_id).with_progress(progress)
            if progress.settled:
                return
            await self._clock.sleep(self._limits.poll_s)

    async def _hold(self, target: Target, left: dict[ReplicaId, ReplicaProgress]) -> None:
        part = left.get(target.replica)
        if part is None or part.version is None:
            return
        try:
            await target.set_target(part.version)
        except SlackwaterError as error:
            _log.warning("replica %s could not be told to stay: %s", target.replica, error)

    async def _ask_all(self, goal: Goal | None) -> tuple[FleetMember, ...]:
        return tuple(await asyncio.gather(*(_ask(target, goal) for target in self._targets)))


async def _ask(target: Target, goal: Goal | None) -> FleetMember:
    try:
        status = await (target.status() if goal is None else target.set_target(goal))
    except SlackwaterError as error:
        return FleetMember(replica=target.replica, status=None, error=_told(error))
    return FleetMember(replica=target.replica, status=status, error=None)


def _told(error: SlackwaterError) -> TargetError:
    return TargetError(kind=error.kind, message=str(error))


def _refused(replica: ReplicaId, error: SlackwaterError) -> ReplicaProgress:
    """Silence and a state that passes are waited for; any other refusal stands."""
    if isinstance(error, UnavailableError):
        stage = ReplicaStage.UNKNOWN
    elif isinstance(error, ConflictError):
        stage = ReplicaStage.PENDING
    else:
        stage = ReplicaStage.FAILED
    return ReplicaProgress(replica=replica, stage=stage, error=_told(error))
