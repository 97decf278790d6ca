"""Histories of one replica over the stamp engine: a lineage that a real publisher made, shown version by version."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from replica_rig import RUN, BitsSource, weights_at

from slackwater.checkpoint.manifest import Manifest
from slackwater.config.in_flight import InFlight
from slackwater.delivery.fetcher import Bodies, Fetcher, HeadView
from slackwater.delivery.watcher import Watcher
from slackwater.engine.base import Engine
from slackwater.errors import SlackwaterError, SwapError, UnavailableError
from slackwater.ids import BootId, ReplicaId, RequestId, Version
from slackwater.publish.publisher import Publisher
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.replica import Replica, ReplicaOptions
from slackwater.replica.status import State
from slackwater.rollout.completer import Answer
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.testing.exchange import EngineFaults
from slackwater.testing.history import (
    Accepted,
    Called,
    Ended,
    Event,
    Healed,
    Labelled,
    Published,
    Sampled,
    Seen,
    Steered,
    Stopped,
)
from slackwater.testing.stamp import StampBugs, StampEngine, weights_mark
from slackwater.weights.source import FolderSource

if TYPE_CHECKING:
    from slackwater.checkpoint.tensor import Bits

REPLICA: Final = ReplicaId("replica-0")
ANCHORS: Final = (0, 4)
LEASE_S: Final = 30.0
POLL_S: Final = 2.0
WITHIN_S: Final = 60.0
"""Seconds in which a replica must reach the head once nothing fails."""
PROMPTS: Final = ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (7,))


class Lineage:
    """Versions that a publisher made, in a bucket."""

    def __init__(self, folder: Path, versions: int = 8) -> None:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        bucket = MemoryBucket()
        publisher = Publisher(bucket, RUN, threads=1)
        self.truth: list[Mapping[str, Bits]] = [weights_at(step) for step in range(versions)]
        for step, weights in enumerate(self.truth):
            publisher.publish(BitsSource(weights), step=step, folder_files=model, anchor=step in ANCHORS)
        self.fetcher = Fetcher(bucket, RUN, folder / "cache", threads=1)

    def published(self, version: Version) -> Published:
        state = self.fetcher.manifest(version).state
        return Published(version=version, state=state, mark=weights_mark(self.truth[version]))


class Shown:
    """A lineage as far as a history has published it: a version source, and what a watcher looks at."""

    def __init__(self, lineage: Lineage) -> None:
        self.newest = Version(0)
        self.away = False
        """The bucket does not answer."""
        self._fetcher = lineage.fetcher

    def head(self, known: Version | None) -> Version | None:
        self._ask()
        return max(self.newest, known or Version(0))

    def look(self, known: Version | None) -> HeadView:
        return HeadView(version=self.head(known), receded=False)

    def manifest(self, version: Version) -> Manifest:
        self._ask()
        return self._fetcher.manifest(version)

    def anchor(self, manifest: Manifest) -> Path:
        self._ask()
        return self._fetcher.anchor(manifest)

    def bodies(self, manifest: Manifest) -> Bodies:
        self._ask()
        return self._fetcher.bodies(manifest)

    def _ask(self) -> None:
        if self.away:
            raise UnavailableError("the bucket does not answer")


class World:
    """One replica, what is done to it, and the log of what happened. Every call ends; none waits for real time."""

    def __init__(
        self, lineage: Lineage, bugs: StampBugs | None = None, *, slots: int = 2, name: ReplicaId = REPLICA
    ) -> None:
        self.log: list[Event] = []
        self.clock = ManualClock()
        self.source = Shown(lineage)
        self.opened: list[StampEngine] = []
        self._lineage = lineage
        self._bugs = bugs or StampBugs()
        self._slots = slots
        self._name = name
        self._boots = 0
        self._asked = 0
        self._open: dict[RequestId, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.log.append(lineage.published(Version(0)))
        self.replica = self._made()

    @property
    def engine(self) -> StampEngine:
        return self.opened[-1]

    @property
    def boot(self) -> BootId:
        return BootId(f"{self._name}-boot-{self._boots}")

    def _made(self) -> Replica:
        self._boots += 1
        limits = ExchangeLimits(lease_s=LEASE_S, drain_s=LEASE_S, threads=1)
        options = ReplicaOptions(replica=self._name, boot=self.boot, run=RUN, exchange=limits)
        return Replica(options, self.source, Watcher(self.source, self.clock, POLL_S), self._open_engine, self.clock)

    async def _open_engine(self, folder: Path, version: Version) -> Engine:
        source, boot = FolderSource(folder), self.boot
        weights = {name: source.bits(name) for name in source.specs()}

        def labelled(taken: Version, mended: bool = False) -> None:
            at = self.clock.monotonic()
            self.log.append(Labelled(replica=self._name, boot=boot, version=taken, at=at, mended=mended))

        engine = StampEngine(
            weights,
            source.specs(),
            version,
            replica=self._name,
            boot=boot,
            slots=self._slots,
            window=64,
            labelled=labelled,
        )
        engine.bugs = replace(self._bugs)
        engine.hold()
        self.opened.append(engine)
        labelled(version)
        return engine

    async def start(self) -> "World":
        await self.replica.start()
        return self

    def publish(self) -> None:
        if self.source.newest + 1 < len(self._lineage.truth):
            self.source.newest = Version(self.source.newest + 1)
            self.log.append(self._lineage.published(self.source.newest))

    def steer(self, goal: Version | Literal["head"], in_flight: InFlight | None = None) -> None:
        self.log.append(Steered(replica=self._name, goal=None if goal == "head" else goal))
        self._spawn(self._timed("a target", lambda: self.replica.set_target(goal, in_flight)))

    def roll_back(self) -> None:
        self._spawn(self._timed("a rollback", self._rolled_back))

    async def _rolled_back(self) -> None:
        """What is undone is settled as the call begins, not when it was meant."""
        exchange = self.replica._exchange
        if exchange is not None and (back := exchange.swap.undo_version) is not None:
            self.log.append(Steered(replica=self._name, goal=back))
            await self.replica.roll_back()

    async def _timed(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        began = self.clock.monotonic()
        with suppress(SlackwaterError):
            await call()
        self.log.append(Called(what=what, seconds=self.clock.monotonic() - began, limit_s=4 * LEASE_S))

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        policy: PolicyConstraint = ANY_POLICY,
        forced: Sequence[int] = (),
    ) -> None:
        self._asked += 1
        name = RequestId(f"r{self._asked}")
        request = CompletionRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=SamplingSpec(max_tokens=max_tokens),
            policy=policy,
            forced_ids=tuple(forced),
        )
        state = self.replica.state
        try:
            answer = await self.replica.complete(request)
        except UnavailableError:
            return
        self.log.append(Accepted(replica=self._name, boot=self.boot, request=request, state=state))
        self._open[name] = answer
        self._spawn(self._read(name, answer))

    async def _read(self, name: RequestId, answer: Answer) -> None:
        try:
            async for step in answer:
                self.log.append(Sampled(request=name, origin=answer.origin, step=step))
            self._end(Ended(request=name, finish=answer.finish))
        except SlackwaterError as error:
            self._end(Ended(request=name, finish=None, error=error.kind))

    def _end(self, ended: Ended) -> None:
        self.log.append(ended)
        del self._open[ended.request]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, index: int) -> None:
        if self._open:
            await list(self._open.values())[index % len(self._open)].aclose()

    async def kill(self) -> None:
        """The process is gone: its callers are told, its memory is lost; another one boots from the bucket.

        One that was retired has told its callers by itself. Meanwhile someone goes on asking.
        """
        if self.replica.state is State.RETIRED:
            await self.clock.advance(LEASE_S + 1)
        else:
            for name in list(self._open):
                self._end(Ended(request=name, finish=None, error="replica_lost"))
        await self._drop_tasks()
        self._open.clear()
        self.log.append(Stopped(replica=self._name))
        await self.replica.close()
        self.source.away = False
        self.replica = self._made()
        starting = asyncio.ensure_future(self.replica.start())
        while not starting.done():
            await turns(10)
            await self.ask((1, 2, 3), 4)
        await starting

    async def heal(self) -> None:
        """Nothing fails any more: everything asked for ends, and the head is reached."""
        if self.engine.faults.stall:
            await self.clock.advance(LEASE_S + 1)
        self.engine.faults = EngineFaults()
        self.source.away = False
        if self.replica.state is not State.SERVING:
            await self.kill()
        self.engine.release()
        self.log.append(Healed(target=self.source.newest, at=self.clock.monotonic(), within_s=WITHIN_S))
        self.steer("head")
        for _ in range(int(2 * WITHIN_S)):
            await self.clock.advance(0.5)
            if self.replica.status().version == self.source.newest and not self._tasks:
                break
        with suppress(SlackwaterError):
            version, state = await self.replica.weights_digest()
            self.log.append(Seen(reader=self.boot, version=version, state=state))

    async def close(self) -> None:
        await self._drop_tasks()
        await self.replica.close()

    async def _drop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def played(lineage: Lineage, seed: int, *, bugs: StampBugs | None = None, acts: int = 30) -> list[Event]:
    """The log of a random history; the same seed gives the same one."""
    chance = random.Random(seed)
    world = await World(lineage, bugs).start()
    for _ in range(acts):
        await _act(world, chance)
    await world.heal()
    await world.close()
    return world.log


async def _act(world: World, chance: random.Random) -> None:
    newest = world.source.newest
    match chance.choices(range(len(_ODDS)), _ODDS)[0]:
        case 0:
            world.publish()
        case 1:
            world.steer(chance.choice(("head", Version(chance.randint(0, newest)))), chance.choice((None, *InFlight)))
        case 2:
            world.roll_back()
        case 3:
            await world.ask(*_request(newest, chance))
        case 4:
            await world.cancel(chance.randrange(4))
        case 5:
            world.engine.release(chance.randint(1, 9))
        case 6:
            await turns(chance.randint(1, 60))
        case 7:
            await world.clock.advance(chance.choice((0.5, POLL_S, LEASE_S + 1)))
        case 8:
            _spoil(world, chance)
        case _:
            await world.kill()


_ODDS: Final = (4, 4, 1, 7, 1, 7, 8, 2, 2, 0.5)
"""How often each act is chosen, relative to the others."""


def _request(newest: Version, chance: random.Random) -> tuple[tuple[int, ...], int, PolicyConstraint, tuple[int, ...]]:
    version = Version(chance.randint(0, newest))
    some = (PolicyConstraint(exact_version=version), PolicyConstraint(min_version=version))
    policy = chance.choice((ANY_POLICY, ANY_POLICY, PolicyConstraint(any_kv=True), *some))
    forced = (5, 6, 7) if chance.random() < 0.1 else ()
    return chance.choice(PROMPTS), chance.randint(1, 30), policy, forced


def _spoil(world: World, chance: random.Random) -> None:
    faults = world.engine.faults
    match chance.choices(range(7), (2, 2, 2, 2, 2, 1, 1))[0]:
        case 0:
            faults.commit_at_write = chance.randrange(4)
        case 5:
            faults.commit_dies_at_write = chance.randrange(4)
        case 6:
            faults.undo_dies_at_write = chance.randrange(4)
        case 4:
            faults.flip_bit = True
        case 1:
            faults.stage = SwapError("no memory")
        case 2:
            faults.stall = True
        case _:
            world.source.away = not world.source.away
