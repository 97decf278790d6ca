"""A scripted target, and snapshots that need no bucket."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Final

import msgspec

from slackwater.config.in_flight import InFlight
from slackwater.errors import NotFoundError, SlackwaterError
from slackwater.hotload.conductor import Conductor, ConductorLimits
from slackwater.hotload.groups import Group, Mode
from slackwater.hotload.ledger import Ledger
from slackwater.hotload.operation import Operation
from slackwater.hotload.snapshots import Snapshot
from slackwater.hotload.target import Goal, SwapTimings, TargetError, TargetStatus
from slackwater.ids import ReplicaId, RunId, StateDigest, Version, snapshot_name
from slackwater.testing.clock import ManualClock
from slackwater.testing.ledger import MemoryLedger

RUN = RunId("demo")
_LOOKUPS: Final = 5
"""More than a round of the watch makes, one after the other."""


def status(replica: str = "r0", version: int = 0, target: int = 0, **changes: object) -> TargetStatus:
    """A replica that serves ``version`` and is idle."""
    made = TargetStatus(
        replica=ReplicaId(replica),
        boot_id="boot",
        run=RUN,
        state="serving",
        stage="idle",
        version=Version(version),
        target=Version(target),
        mode="manual",
        provisional=False,
        waiting=False,
        in_flight=0,
        swap_mode="continue",
    )
    return msgspec.structs.replace(made, **changes)


class ScriptedTarget:
    """A replica that takes a target at once and reaches it when a test says so."""

    def __init__(self, replica: str) -> None:
        self.replica = ReplicaId(replica)
        self.now = status(replica)
        self.goals: list[Goal] = []
        self.modes: list[InFlight | None] = []
        self.refusal: SlackwaterError | None = None
        self.error: SlackwaterError | None = None
        self.silent = False

    async def set_target(self, goal: Goal, in_flight: InFlight | None = None) -> TargetStatus:
        await self._answer()
        if self.refusal is not None:
            raise self.refusal
        self.goals.append(goal)
        self.modes.append(in_flight)
        self.change(swap_mode=in_flight or InFlight.CONTINUE)
        if goal == "head":
            self.change(mode="follow")
        elif goal == "stay":
            self._stay()
        elif goal != self.now.version or self.now.stage != "idle":
            self.change(target=goal, stage="preparing", waiting=False, last_error=None, mode="manual")
        else:
            self.change(target=goal, waiting=False, last_error=None, mode="manual")
        return self.now

    async def status(self) -> TargetStatus:
        await self._answer()
        return self.now

    def _stay(self) -> None:
        """What is being committed is gone on with; what is only prepared ends."""
        committing = self.now.stage == "committing"
        self.change(target=self.now.target if committing else self.now.version, mode="manual")
        if not committing and not self.now.provisional:
            self.change(stage="idle", waiting=False, last_error=None)

    def reach(self, **more: float) -> None:
        """Swap to the target, and tell where the time went."""
        before, target = self.now.version, self.now.target
        assert target is not None
        timings = SwapTimings(version=target, from_version=before, prepare_s=2.0, pause_s=0.25, verify_s=1.0)
        timings = msgspec.structs.replace(timings, **more)
        self.change(version=target, stage="idle", swaps=(*self.now.swaps, timings))

    def restart(self) -> None:
        """Come back as the command line starts a replica: it follows the head by itself."""
        self.change(boot_id=self.now.boot_id + "'", mode="follow", swap_mode=InFlight.CONTINUE, swaps=())

    def fail(self, kind: str) -> None:
        self.change(stage="idle", waiting=True, last_error=TargetError(kind=kind, message="broken"))

    def change(self, **changes: object) -> None:
        self.now = msgspec.structs.replace(self.now, **changes)

    async def _answer(self) -> None:
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


class ListedSnapshots:
    """Versions 0 to ``count - 1``; counts how often it is asked."""

    def __init__(self, count: int) -> None:
        self.run = RUN
        self.asked = 0
        self._count = count

    def find(self, version: Version) -> Snapshot:
        self.asked += 1
        if version >= self._count:
            raise NotFoundError(f"there is no snapshot {snapshot_name(RUN, version)}")
        return Snapshot(
            name=snapshot_name(RUN, version),
            version=version,
            kind="delta" if version else "anchor",
            state=StateDigest("0" * 64),
            bytes=10,
            step=version,
            created_at="2026-01-01T00:00:00Z",
        )

    def chain(self) -> tuple[Snapshot, ...]:
        return tuple(self.find(Version(number)) for number in range(self._count))

    def newest(self) -> Version | None:
        return Version(self._count - 1) if self._count else None


LIMITS = ConductorLimits(deadline_s=60.0, poll_s=0.1, standing_poll_s=1.0, lookup_s=5.0)


class Fleet:
    """A conductor over scripted targets on a manual clock; `restart` gives it a new one, with the same ledger."""

    def __init__(
        self,
        size: int = 3,
        snapshots: int = 9,
        limits: ConductorLimits = LIMITS,
        ledger: Ledger | None = None,
        groups: Sequence[Group] = (),
    ) -> None:
        self.clock = ManualClock()
        self.targets = [ScriptedTarget(f"r{number}") for number in range(size)]
        self.snapshots = ListedSnapshots(snapshots)
        self.ledger = ledger or MemoryLedger()
        self._limits = limits
        self._one_thread = ThreadPoolExecutor(max_workers=1)
        self._numbers = count()
        self.conductor = self.conduct(groups)

    def conduct(self, groups: Sequence[Group]) -> Conductor:
        """A conductor that isn't started."""
        return Conductor(
            self.targets,
            self.snapshots,
            self.clock,
            self._limits,
            lambda: f"op{next(self._numbers)}",
            ledger=self.ledger,
            groups=groups,
        )

    async def restart(self, groups: Sequence[Group] = (), ledger: Ledger | None = None) -> None:
        await self.conductor.close()
        self.ledger = ledger or self.ledger
        self.conductor = self.conduct(groups)
        await self.conductor.start()

    async def polls(self, seconds: float = 0.2) -> None:
        await self.clock.advance(seconds)

    async def rounds(self, count: int = 1) -> None:
        """So many seconds, each with a look at the whole fleet that ends within it: it asks the bucket in a thread."""
        asyncio.get_running_loop().set_default_executor(self._one_thread)
        for _ in range(count):
            await self.polls(1.0)
            for _ in range(_LOOKUPS):
                await asyncio.to_thread(bool)
                await self.polls(0.0)

    def goals(self) -> list[list[Goal]]:
        return [target.goals for target in self.targets]


def stages(operation: Operation) -> list[str]:
    """Where each replica stands."""
    return [part.stage.value for part in operation.replicas]


def group(name: str, *replicas: str, mode: Mode = Mode.MANUAL, version: int | None = None) -> Group:
    """A group of the configuration."""
    names = tuple(ReplicaId(replica) for replica in replicas)
    return Group(name=name, replicas=names, mode=mode, version=None if version is None else Version(version))


async def until(holds: Callable[[], bool]) -> None:
    """Let everything run until ``holds``."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # what is awaited has no event of its own
            await asyncio.sleep(0)
