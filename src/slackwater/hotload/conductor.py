"""Hot-loads over a fleet: takes orders, decides by the machines who is meant and what gives way, and starts drives."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slackwater.clock import Clock
from slackwater.errors import ConflictError, NotFoundError, SlackwaterError, UnavailableError
from slackwater.hotload.book import Book
from slackwater.hotload.drive import DriveLimits, Driver
from slackwater.hotload.groups import DEFAULT_GROUP, Group, Mode, arrange, as_ordered, find_group, meant
from slackwater.hotload.ledger import Ledger, SqliteLedger
from slackwater.hotload.operation import Operation, OperationEvent, Order, ReplicaProgress
from slackwater.hotload.recovery import apart, take_up, under_way
from slackwater.hotload.rollout import Canary, first_phase
from slackwater.hotload.snapshots import Snapshot, SnapshotLookup
from slackwater.hotload.target import Goal, Target, TargetError, TargetStatus
from slackwater.hotload.witness import FleetEvent
from slackwater.ids import ReplicaId, RunId, Version, parse_snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorLimits:
    """Bounds of the conductor."""

    deadline_s: float = 600.0
    """Seconds for those replicas of an operation that are told together."""
    poll_s: float = 0.1
    """Seconds between two looks at a replica that is under way."""
    standing_poll_s: float = 2.0
    """Seconds between two looks at a replica that follows the head or is pinned."""
    lookup_s: float = 30.0
    """Seconds that a call waits for the bucket."""
    history: int = 256
    """Operations that are listed; the oldest ended one leaves first, and stays in the ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMember:
    """One replica as it was heard just now."""

    replica: ReplicaId
    status: TargetStatus | None
    """None where it didn't answer; ``error`` says why."""
    error: TargetError | None


class Conductor:
    """Hot-load operations over ``targets``. All calls from one event loop; `start` first, `close` last.

    Args:
        targets: The fleet.
        snapshots: The lineage that it serves.
        clock: The machine's.
        limits: Bounds.
        new_id: Names operations.
        ledger: Keeps them; owned. In memory by default: then a new conductor begins a new history.
        groups: Those named by the configuration; who is in none is in the default group, which is manual.

    Raises:
        InvalidInputError: The groups don't fit the fleet.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        snapshots: SnapshotLookup,
        clock: Clock,
        limits: ConductorLimits | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        *,
        ledger: Ledger | None = None,
        groups: Sequence[Group] = (),
    ) -> None:
        self._targets = {target.replica: target for target in targets}
        self._configured = arrange(groups, tuple(self._targets))
        self._snapshots = snapshots
        self._clock = clock
        self._limits = bounds = limits or ConductorLimits()
        self._new_id = new_id
        self._book = Book(ledger or SqliteLedger(None, snapshots.run), clock, bounds.history)
        drive = DriveLimits(deadline_s=bounds.deadline_s, poll_s=bounds.poll_s, standing_poll_s=bounds.standing_poll_s)
        self._driver = Driver(self._targets, self._book, clock, drive)
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Take up what the ledger says is running, and give groups their configured modes where these are new.

        Without any operation in the ledger, what replicas were told and haven't reached becomes one: that is looked
        for behind the back of the first calls, which go first.
        """
        async with self._turn:
            known = await self._book.load()
            taken = [take_up(each, self._configured) for each in self._book.newest() if not each.ended]
            self._book.put(*apart(taken))
            modes = {group.name: group.words for group in self._configured}
            changed = [group for group in self._configured if known.get(group.name, _unnamed(group)) != group.words]
            for group in changed:
                self._order_mode(group)
            self._book.configure(modes)
            for operation in self._book.newest():
                if not operation.ended and operation.id not in self._drives:
                    self._drive(operation)
        manual = [name for group in changed if group.mode is Mode.MANUAL for name in group.replicas]
        self._looking = asyncio.get_running_loop().create_task(self._look_around(manual), name="hot-load-look")

    async def submit(
        self,
        snapshot: str,
        idempotency_key: str | None = None,
        *,
        group: str | None = None,
        replicas: Sequence[str] | None = None,
        canary: Canary | None = None,
    ) -> Operation:
        """Begin to load ``<run>/<version>`` on the replicas meant; returns at once.

        The same key gives the same operation, and so does the same order while it is carried out.
        Any other order supersedes what runs on those replicas.

        Raises:
            InvalidInputError: ``snapshot`` is no snapshot's name, or the replicas or the canary don't fit.
                No replica and no store was asked.
            NotFoundError: There is no such snapshot, group or replica. No replica was told.
            ConflictError: The key was used for another order, or a group's mode is in the way.
            UnavailableError: The bucket, or the ledger's disk, didn't answer in time. No replica was told.
        """
        version = self._of_run(snapshot)
        chosen = None if replicas is None else tuple(ReplicaId(name) for name in replicas)
        order = Order(run=self._snapshots.run, version=version, group=group, replicas=chosen, canary=canary)
        return await self._whole(self._submit(order, version, idempotency_key))

    def get(self, operation_id: str) -> Operation:
        """One operation, as it stands.

        Raises:
            NotFoundError: There is none of that id, or it was forgotten.
        """
        return self._book.get(operation_id)

    async def find(self, idempotency_key: str) -> Operation | None:
        """The operation that was asked for with this key, also a forgotten one; None where there is none."""
        return await self._book.by_key(idempotency_key)

    @property
    def run(self) -> RunId:
        """The lineage that the fleet serves."""
        return self._snapshots.run

    def list(self) -> tuple[Operation, ...]:
        """The remembered operations, newest first; standing ones among them."""
        return tuple(self._book.newest())

    async def cancel(self, operation_id: str) -> Operation:
        """End an operation. Replicas that are still under way, or follow, are told to stay where they are.

        Raises:
            NotFoundError: There is no such operation.
            ConflictError: It has ended already.
        """
        return await self._whole(self._cancel(operation_id))

    def groups(self) -> tuple[Group, ...]:
        """The groups in their present modes."""
        return tuple(as_ordered(group, self.list())[0] for group in self._configured)

    def standing(self, group: str) -> Operation | None:
        """The operation that moves a group; None where it is manual."""
        return as_ordered(find_group(self._configured, group), self.list())[1]

    async def set_mode(self, group: str, mode: Mode, snapshot: str | None = None) -> Group:
        """Change who moves a group. A manual one stays where it is; the other modes are standing operations.

        Raises:
            InvalidInputError: ``snapshot`` is missing for a pin, stands with another mode, or is no snapshot's name.
            NotFoundError: There is no such group or snapshot.
            UnavailableError: The bucket didn't answer in time.
        """
        version = None if snapshot is None else self._of_run(snapshot)
        return await self._whole(self._set_mode(group, mode, version))

    async def follow(self) -> tuple[FleetMember, ...]:
        """Let every group that isn't pinned follow the head from now on; supersedes what runs there."""
        free = [group for group in self.groups() if group.mode is not Mode.PINNED]
        for group in free:
            await self.set_mode(group.name, Mode.FOLLOW)
        names = [name for group in free for name in group.replicas]
        return tuple(await asyncio.gather(*(self._ask(name, "head") for name in names)))

    async def fleet(self) -> tuple[FleetMember, ...]:
        """Every replica as it is now; a silent one is listed with its error."""
        return tuple(await asyncio.gather(*(self._ask(name, None) for name in self._targets)))

    async def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """What has become of replicas and groups, newest first."""
        return await self._book.events(limit)

    async def snapshots(self) -> tuple[Snapshot, ...]:
        """The lineage from its first snapshot to the newest.

        Raises:
            UnavailableError: The bucket didn't answer in time.
        """
        return await self._in_time(self._snapshots.chain)

    async def close(self) -> None:
        """Stop driving. Operations stay open: replicas go on by themselves, and a new conductor takes up the rest."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*self._calls, return_exceptions=True)
        async with self._turn:
            await self._halt(list(self._drives))
            await self._book.close()

    async def _whole(self, call: Coroutine[Any, Any, T]) -> T:
        """Carry a call out to its end, also where its caller goes away in the middle."""
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _submit(self, order: Order, version: Version, key: str | None) -> Operation:
        async with self._turn:
            known = await self._known(order, key)
            if known is not None:
                return known
            names = meant(order, self.groups())
            await self._in_time(lambda: self._snapshots.find(version))
            operation = self._made(order, names, key)
            await self._replace(names, operation)
            await self._book.written()
            return operation

    async def _cancel(self, operation_id: str) -> Operation:
        async with self._turn:
            operation = self.get(operation_id)
            if operation.ended:
                raise ConflictError(f"hot-load {operation_id} has ended: {operation.state}")
            await self._stop([operation], OperationEvent.CANCEL)
            operation = self.get(operation_id)
            if operation.order.standing:
                await asyncio.gather(*(self._stay(name) for name in operation.names))
            else:
                left = [part for part in operation.replicas if not part.settled and part.replica in operation.told]
                await asyncio.gather(*(self._hold(part.replica, part.version) for part in left))
            await self._book.written()
            return operation

    async def _set_mode(self, group: str, mode: Mode, version: Version | None) -> Group:
        async with self._turn:
            known = find_group(self.groups(), group)
            wanted = replace(known, mode=mode, version=version)
            if version is not None:
                await self._in_time(lambda: self._snapshots.find(version))
            if mode is Mode.MANUAL:
                standing = [each for each in self._sharing(known.replicas) if each.order.standing]
                await self._stop(standing, OperationEvent.SUPERSEDE)
                await asyncio.gather(*(self._stay(name) for name in known.replicas))
            elif wanted != known:
                operation = self._standing(wanted)
                await self._replace(known.replicas, operation)
            self._note_mode(wanted)
            await self._book.written()
            return wanted

    def _of_run(self, snapshot: str) -> Version:
        run, version = parse_snapshot(snapshot)
        if run != self._snapshots.run:
            raise NotFoundError(f"there is no run {run!r} here", hint=f"this fleet serves {self._snapshots.run!r}")
        return version

    async def _known(self, order: Order, key: str | None) -> Operation | None:
        if key is None:
            running = (each for each in self.list() if each.order == order and not each.ended)
            return next(running, None)
        operation = await self._book.by_key(key)
        if operation is not None and operation.order != order:
            raise ConflictError(
                f"idempotency key {key[:80]!r} was used for another hot-load, {operation.id}",
                hint="take a new key for a new hot-load",
            )
        return operation

    def _made(self, order: Order, names: Sequence[ReplicaId], key: str | None = None) -> Operation:
        name = self._new_id()
        return Operation(
            id=name,
            idempotency_key=key or name,
            order=order,
            created_at=self._clock.wall(),
            phase=first_phase(order.canary),
            replicas=tuple(ReplicaProgress(replica=replica) for replica in names),
        )

    def _standing(self, group: Group) -> Operation:
        order = Order(run=self._snapshots.run, version=group.version, group=group.name, standing=True)
        return self._made(order, group.replicas)

    def _order_mode(self, group: Group) -> None:
        """At the start, before anything is driven: what stands in the way ends, and the group's order begins."""
        ended = [each.after(OperationEvent.SUPERSEDE) for each in self._sharing(group.replicas)]
        begun = [] if group.mode is Mode.MANUAL else [self._standing(group)]
        self._book.put(*ended, *begun)
        self._note_mode(group)

    def _note_mode(self, group: Group) -> None:
        event = FleetEvent(
            at=self._clock.wall(), kind="group", version=group.version, detail=f"{group.name} {group.mode}"
        )
        self._book.note(event)

    def _sharing(self, names: Sequence[ReplicaId]) -> tuple[Operation, ...]:
        """The open operations that are about any of these replicas."""
        return tuple(each for each in self.list() if not each.ended and set(each.names) & set(names))

    async def _replace(self, names: Sequence[ReplicaId], operation: Operation) -> None:
        """End what runs on these replicas and begin ``operation``: the ledger gets both or neither."""
        giving_way = self._sharing(names)
        await self._halt([each.id for each in giving_way])
        ended = [
            self.get(each.id).after(OperationEvent.SUPERSEDE) for each in giving_way if not self.get(each.id).ended
        ]
        self._book.put(*ended, operation)
        self._drive(operation)

    def _drive(self, operation: Operation) -> None:
        drive = asyncio.get_running_loop().create_task(self._driver.run(operation.id), name=f"hot-load-{operation.id}")
        self._drives[operation.id] = drive
        drive.add_done_callback(lambda done: self._driven(operation.id, done))

    def _driven(self, operation_id: str, drive: asyncio.Task[None]) -> None:
        if self._drives.get(operation_id) is drive:
            del self._drives[operation_id]
        if not drive.cancelled() and (error := drive.exception()) is not None:
            _log.error("hot-load %s is not driven any more", operation_id, exc_info=error)

    async def _stop(self, operations: Sequence[Operation], event: OperationEvent) -> None:
        await self._halt([each.id for each in operations])
        left = [self.get(each.id) for each in operations]
        self._book.put(*(each.after(event) for each in left if not each.ended))

    async def _halt(self, names: Sequence[str]) -> None:
        """Wait until nothing is told any more in the name of these operations."""
        drives = [self._drives.pop(name) for name in names if name in self._drives]
        for drive in drives:
            drive.cancel()
        await asyncio.gather(*drives, return_exceptions=True)

    async def _look_around(self, manual: Sequence[ReplicaId]) -> None:
        """Once, after the start: groups that have become manual stay where they are, and what is under way is kept."""
        async with self._turn:
            await asyncio.gather(*(self._stay(name) for name in manual))
        heard = [member.status for member in await self.fleet()]
        async with self._turn:
            if self._book.newest():  # a call came first
                return
            for version, names in under_way([status for status in heard if status is not None]):
                order = Order(run=self._snapshots.run, version=version, replicas=names)
                await self._replace(names, self._made(order, names))

    async def _stay(self, name: ReplicaId) -> None:
        """Tell a replica that follows the head to stay where it is."""
        status = (await self._ask(name, None)).status if name in self._targets else None
        if status is not None and status.mode == "follow":
            await self._hold(name, status.version)

    async def _hold(self, name: ReplicaId, version: Version | None) -> None:
        if version is None or name not in self._targets:
            return
        if (member := await self._ask(name, version)).error is not None:
            _log.warning("replica %s could not be told to stay: %s", name, member.error.message)

    async def _ask(self, name: ReplicaId, goal: Goal | None) -> FleetMember:
        target = self._targets[name]
        try:
            status = await (target.status() if goal is None else target.set_target(goal))
        except SlackwaterError as error:
            told = TargetError(kind=error.kind, message=str(error))
            return FleetMember(replica=name, status=None, error=told)
        self._book.saw(status)
        return FleetMember(replica=name, status=status, error=None)

    async def _in_time(self, look: Callable[[], T]) -> T:
        """What a look at the bucket finds; a bucket that hangs holds no call for longer than the limit."""
        found = asyncio.ensure_future(asyncio.to_thread(look))
        timer = asyncio.ensure_future(self._clock.sleep(self._limits.lookup_s))
        try:
            await asyncio.wait((found, timer), return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                return found.result()
        finally:
            timer.cancel()
            found.cancel()
        raise UnavailableError(f"the bucket didn't answer within {self._limits.lookup_s:g} s", hint="ask again")


def _unnamed(group: Group) -> str:
    """The mode that a group has which the ledger doesn't know: the default one isn't ordered to do anything."""
    return Mode.MANUAL.value if group.name == DEFAULT_GROUP else ""
