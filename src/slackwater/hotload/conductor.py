"""Hot-loads over a fleet: takes orders, decides by the machines who is meant and what gives way, and starts drives."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, TypeVar

from slackwater.clock import Clock
from slackwater.config.head import is_stale
from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, InvalidInputError, NotFoundError, SlackwaterError
from slackwater.hotload.book import Book
from slackwater.hotload.drive import DriveLimits, Driver
from slackwater.hotload.groups import DEFAULT_GROUP, Group, Mode, arrange, as_ordered, find_group, meant
from slackwater.hotload.keep import kept, strays
from slackwater.hotload.ledger import Ledger, SqliteLedger
from slackwater.hotload.lookup import Lookup
from slackwater.hotload.operation import Operation, OperationEvent, Order, ReplicaProgress, ReplicaStage, stayed
from slackwater.hotload.recovery import apart, take_up, under_way
from slackwater.hotload.roll import FleetMember, Roll
from slackwater.hotload.rollout import Canary, first_phase
from slackwater.hotload.snapshots import Snapshot, SnapshotLookup
from slackwater.hotload.target import Target, TargetStatus
from slackwater.hotload.watch import Watch
from slackwater.hotload.witness import FleetEvent
from slackwater.ids import ReplicaId, RunId, Version, parse_snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorLimits:
    """Bounds of the conductor.

    Raises:
        InvalidInputError: One isn't above 0, or isn't finite.
    """

    deadline_s: float = 600.0
    """Seconds for those replicas of an operation that are told together."""
    poll_s: float = 0.1
    """Seconds between two looks at a replica that is under way."""
    standing_poll_s: float = 2.0
    """Seconds between two looks at a replica that follows the head or is pinned, and at the whole fleet."""
    lookup_s: float = 30.0
    """Seconds that a call waits for the bucket."""
    history: int = 256
    """Operations that are listed; the oldest ended one leaves first, and stays in the ledger."""
    lag_limit_s: float = 60.0
    """Seconds that a replica which follows the head may be behind before that is an alarm."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isfinite(value) and value > 0):
                raise InvalidInputError(f"{field.name} is {value}", hint="it is a number above 0")


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
        self._clock = clock
        bounds = limits or ConductorLimits()
        self._lookup = Lookup(snapshots, clock, bounds.lookup_s)
        self._new_id = new_id
        self._book = Book(ledger or SqliteLedger(None, snapshots.run), clock, bounds.history)
        drive = DriveLimits(deadline_s=bounds.deadline_s, poll_s=bounds.poll_s, standing_poll_s=bounds.standing_poll_s)
        self._driver = Driver(self._targets, self._book, clock, drive)
        self._roll = Roll(self._targets, self._book, clock, bounds.lag_limit_s)
        self._standing_poll_s = bounds.standing_poll_s
        self._watch = Watch(self._roll, self._lookup, clock, bounds.standing_poll_s, self._bring_back)
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._behind: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Take up what the ledger says is running, and give groups their configured modes where these are new.

        Without any operation in the ledger, what replicas were told and haven't reached becomes one: that is looked
        for behind the back of the first calls, which go first. From now on the whole fleet is watched.
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
        loop = asyncio.get_running_loop()
        self._behind = [
            loop.create_task(self._look_around(manual), name="hot-load-look"),
            loop.create_task(self._warn_of_pins(), name="hot-load-pins"),
            loop.create_task(self._watch.run(), name="hot-load-watch"),
        ]
        for task in self._behind:
            task.add_done_callback(lambda done: _tell_end(done, f"{done.get_name()} has ended"))

    async def submit(
        self,
        snapshot: str,
        idempotency_key: str | None = None,
        *,
        group: str | None = None,
        replicas: Sequence[str] | None = None,
        canary: Canary | None = None,
        in_flight: InFlight | None = None,
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
        order = Order(run=self.run, version=version, group=group, replicas=chosen, canary=canary, in_flight=in_flight)
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
        return self._lookup.run

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

    async def set_mode(
        self, group: str, mode: Mode, snapshot: str | None = None, in_flight: InFlight | None = None
    ) -> Group:
        """Change who moves a group. A manual one stays where it is; the other modes are standing operations.

        The same mode again is no news, but a new try for replicas on which it has failed.

        Raises:
            InvalidInputError: ``snapshot`` is missing for a pin, stands with another mode, or is no snapshot's name;
                or ``in_flight`` stands with the manual mode.
            NotFoundError: There is no such group or snapshot.
            UnavailableError: The bucket didn't answer in time.
        """
        version = None if snapshot is None else self._of_run(snapshot)
        return await self._whole(self._set_mode(group, mode, version, in_flight))

    async def follow(self) -> tuple[FleetMember, ...]:
        """Let every group that isn't pinned follow the head from now on; supersedes what runs there.

        What groups that follow already do with answers in flight stays.
        """
        free = [group for group in self.groups() if group.mode is not Mode.PINNED]
        for group in free:
            await self.set_mode(group.name, Mode.FOLLOW, in_flight=group.in_flight)
        told = (self._roll.some(group.replicas, "head", group.in_flight) for group in free)
        return tuple(member for members in await asyncio.gather(*told) for member in members)

    async def fleet(self) -> tuple[FleetMember, ...]:
        """Every replica as it is now; a silent one is listed with its error."""
        return await self._roll.everyone()

    def newest(self) -> Version | None:
        """The newest committed version; None where the bucket hasn't told it, or only too long ago."""
        stale = is_stale(self._roll.looked_at, self._clock.monotonic(), self._standing_poll_s)
        return None if stale else self._roll.head

    async def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """What has become of replicas and groups, newest first."""
        return await self._book.events(limit)

    async def snapshots(self) -> tuple[Snapshot, ...]:
        """The lineage from its first snapshot to the newest.

        Raises:
            UnavailableError: The bucket didn't answer in time.
        """
        return await self._lookup.chain()

    async def close(self) -> None:
        """Stop driving. Operations stay open: replicas go on by themselves, and a new conductor takes up the rest."""
        for task in self._behind:
            task.cancel()
        await asyncio.gather(*self._behind, return_exceptions=True)
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
            await self._lookup.find(version)
            operation = self._made(order, names, key)
            await self._replace(self._sharing(names), operation)
            await self._book.written()
            return operation

    async def _cancel(self, operation_id: str) -> Operation:
        async with self._turn:
            operation = self.get(operation_id)
            if operation.ended:
                raise ConflictError(f"hot-load {operation_id} has ended: {operation.state}")
            await self._halt([operation_id])
            if operation.order.standing:
                stays = await self._stays(operation.names, [operation])
            else:
                stays = ()
                await self._leave(operation_id)
            await self._replace([operation], *stays, event=OperationEvent.CANCEL)
            await self._book.written()
            return self.get(operation_id)

    async def _leave(self, operation_id: str) -> None:
        """Tell those under way to stay, and note where they do: what one has committed by now is where it is left."""
        operation = self.get(operation_id)
        left = [part.replica for part in operation.replicas if not part.settled and part.replica in operation.told]
        for status in await self._roll.hold(left):
            part = stayed(operation.part(status.replica), operation.order, status, self._clock.wall())
            operation = operation.with_progress(part)
        self._book.put(operation)

    async def _set_mode(self, group: str, mode: Mode, version: Version | None, in_flight: InFlight | None) -> Group:
        async with self._turn:
            known = find_group(self.groups(), group)
            wanted = replace(known, mode=mode, version=version, in_flight=in_flight)
            if version is not None:
                await self._lookup.find(version)
            if mode is Mode.MANUAL:
                standing = [each for each in self._sharing(known.replicas) if each.order.standing]
                await self._halt([each.id for each in standing])
                await self._replace(standing, *await self._stays(known.replicas, standing))
            elif wanted != known or self._failing(group):
                await self._replace(self._sharing(known.replicas), self._standing(wanted))
            self._note_mode(wanted)
            await self._book.written()
            return wanted

    def _failing(self, group: str) -> bool:
        """Whether its mode failed on a replica: to ask for it again is to ask for a new try."""
        standing = self.standing(group)
        return standing is not None and any(part.stage is ReplicaStage.FAILED for part in standing.replicas)

    def _of_run(self, snapshot: str) -> Version:
        run, version = parse_snapshot(snapshot)
        if run != self.run:
            raise NotFoundError(f"there is no run {run!r} here", hint=f"this fleet serves {self.run!r}")
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
        starts = {replica: last.boot_id for replica in names if (last := self._book.last(replica)) is not None}
        return Operation(
            id=name,
            idempotency_key=key or name,
            order=order,
            created_at=self._clock.wall(),
            phase=first_phase(order.canary),
            # With its start known, one that refuses, so that its status isn't heard, is no stray before it restarts.
            replicas=tuple(ReplicaProgress(replica=replica, boot_id=starts.get(replica)) for replica in names),
        )

    def _standing(self, group: Group) -> Operation:
        order = Order(run=self.run, version=group.version, group=group.name, standing=True, in_flight=group.in_flight)
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

    async def _replace(
        self,
        giving_way: Sequence[Operation],
        *operations: Operation,
        event: OperationEvent = OperationEvent.SUPERSEDE,
    ) -> None:
        """End what gives way and begin the others: the ledger gets all of it or nothing."""
        await self._halt([each.id for each in giving_way])
        left = [self.get(each.id) for each in giving_way]
        self._book.put(*(each.after(event) for each in left if not each.ended), *operations)
        for operation in operations:
            self._drive(operation)

    def _drive(self, operation: Operation) -> None:
        drive = asyncio.get_running_loop().create_task(self._driver.run(operation.id), name=f"hot-load-{operation.id}")
        self._drives[operation.id] = drive
        drive.add_done_callback(lambda done: self._driven(operation.id, done))

    def _driven(self, operation_id: str, drive: asyncio.Task[None]) -> None:
        if self._drives.get(operation_id) is drive:
            del self._drives[operation_id]
        _tell_end(drive, f"hot-load {operation_id} is not driven any more")

    async def _halt(self, names: Sequence[str]) -> None:
        """Wait until nothing is told any more in the name of these operations."""
        drives = [self._drives.pop(name) for name in names if name in self._drives]
        for drive in drives:
            drive.cancel()
        await asyncio.gather(*drives, return_exceptions=True)

    async def _look_around(self, manual: Sequence[ReplicaId]) -> None:
        """Once, after the start: what is under way is kept, and groups that have become manual stay where they are."""
        heard = [member.status for member in await self.fleet()]
        async with self._turn:
            if not self._book.newest():  # else a call came first
                orders = under_way([status for status in heard if status is not None], self.run)
                await self._replace((), *(self._made(order, order.replicas or ()) for order in orders))
            await self._replace((), *await self._stays(manual, ()))

    async def _warn_of_pins(self) -> None:
        """Once, after the start: a pin of what isn't committed is a warning, and so is a bucket that is away."""
        for group in self.groups():
            try:
                if group.version is not None:
                    await self._lookup.find(group.version)
            except NotFoundError as error:
                _log.warning("group %s is pinned to what isn't there: %s", group.name, error)
            except SlackwaterError as error:
                _log.warning("what group %s is pinned to can't be looked up now: %s", group.name, error)

    async def _stays(self, names: Sequence[ReplicaId], giving_way: Sequence[Operation]) -> tuple[Operation, ...]:
        """Hot-loads that keep the followers among ``names`` at the versions that they are at, to be begun.

        Those that a hot-load is about already are told to stay until it comes to them.
        """
        going = {each.id for each in giving_way}
        staying = [each for each in self._sharing(names) if each.id not in going]
        busy = {name for each in staying for name in each.names}
        loaded = {name for each in staying if not each.order.standing for name in each.names}
        heard = [member.status for member in await self._roll.some(names)]
        following = [status for status in heard if status is not None and status.mode == "follow"]
        followers = {status.replica for status in following}
        held = await self._roll.hold(followers & loaded | followers - busy)
        found: dict[Version, list[ReplicaId]] = {}
        for status in held:
            if status.target is not None and status.replica not in busy:
                found.setdefault(status.target, []).append(status.replica)
        orders = [Order(run=self.run, version=version, replicas=tuple(each)) for version, each in found.items()]
        return tuple(self._made(order, order.replicas or ()) for order in orders)

    async def _bring_back(self, heard: Sequence[TargetStatus]) -> None:
        """Load those that a restart has taken from where their manual group was left."""
        async with self._turn:
            where = kept(self._book.newest(), [status.replica for status in heard])
            for (version, in_flight), strayed in strays(heard, where).items():
                names = tuple(status.replica for status in strayed)
                order = Order(run=self.run, version=version, replicas=names, in_flight=in_flight)
                operation = self._made(order, names)
                _log.warning("restarted, and back to version %s by %s: %s", version, operation.id, ", ".join(names))
                await self._replace((), operation)


def _tell_end(task: asyncio.Task[None], words: str) -> None:
    """An end that nobody asked for is told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error(words, exc_info=error)


def _unnamed(group: Group) -> str:
    """The mode that a group has which the ledger doesn't know: the default one isn't ordered to do anything."""
    return Mode.MANUAL.value if group.name == DEFAULT_GROUP else ""
