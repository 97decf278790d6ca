"""One replica: an engine that follows its target version while it serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slackwater.clock import Clock
from slackwater.config.head import is_stale
from slackwater.config.in_flight import InFlight
from slackwater.errors import (
    CanaryError,
    ConflictError,
    CorruptError,
    NotFoundError,
    PolicyUnmetError,
    SlackwaterError,
    SwapError,
    UnavailableError,
    WrongBaseError,
)
from slackwater.ids import BootId, ReplicaId, RunId, StateDigest, Version
from slackwater.replica.boot import OpenEngine, await_head, boot, check_committed
from slackwater.replica.ceiling import Ceiling
from slackwater.replica.exchange import Exchange
from slackwater.replica.journey import Journey
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.marked import MarkedAnswer
from slackwater.replica.race import first
from slackwater.replica.route import Route
from slackwater.replica.scrub import scrub
from slackwater.replica.source import HeadWatch, VersionSource
from slackwater.replica.status import LastError, Mode, ReplicaStatus, State
from slackwater.replica.swap import Stage
from slackwater.rollout.completer import Answer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing

if TYPE_CHECKING:
    from slackwater.engine.base import Engine

T = TypeVar("T")

Goal = Version | Literal["head", "stay"]
"""A version; whatever is newest; or the one in place, which is the one that is being committed while one is."""

_HEALS = (UnavailableError, CorruptError, WrongBaseError, SwapError)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """Who a replica is, and its bounds."""

    replica: ReplicaId
    boot: BootId
    run: RunId
    exchange: ExchangeLimits = field(default_factory=ExchangeLimits)
    in_flight: InFlight = InFlight.CONTINUE
    """What swaps do with answers in flight, unless whoever sets a target says otherwise."""
    scrub_s: float = 0.0
    """Seconds in which all weights that serve are compared with their manifest once again, over and over; 0: never."""
    poll_s: float = 0.2
    """Seconds between looks for a lineage's first anchor."""
    retry_s: float = 0.5
    """Seconds before the first retry; doubles up to ``max_retry_s``."""
    max_retry_s: float = 30.0
    reports: int = 32
    """How many swaps the status remembers."""


class Replica:
    """A `slackwater.rollout.completer.Completer` over one engine, whose weights follow a target.

    ``start`` once, then anything, then ``close``; all from one event loop.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        source: VersionSource,
        watch: HeadWatch,
        open_engine: OpenEngine,
        clock: Clock,
        absent: Callable[[], NotFoundError] | None = None,
    ) -> None:
        """Of these parts.

        Args:
            options: Who it is, and its bounds.
            source: Its lineage's versions.
            watch: Tells of new ones.
            open_engine: Loads its anchor.
            clock: What waits.
            absent: Says what there is in place of a lineage that has no version, for people; may block.
        """
        self._options = options
        self._absent = absent or self._no_version
        self._source = source
        self._watch = watch
        self._open_engine = open_engine
        self._clock = clock
        self._route = Route(source)
        self._ceiling = Ceiling()
        self._mode = Mode.FOLLOW
        self._in_flight = options.in_flight
        self._engine: Engine | None = None
        self._exchange: Exchange | None = None
        self._journey: Journey | None = None
        self._head: Version | None = None
        self._looked_at: float | None = None
        self._target: Version | None = None
        self._error: LastError | None = None
        self._failures = 0
        self._calls = 0
        self._waiting = False
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False
        self._broken = False
        self._closed = False

    @property
    def state(self) -> State:
        """What a router needs to know."""
        if self._closed:
            return State.CLOSED
        if self._broken or (self._exchange is not None and not self._exchange.swap.serves):
            return State.RETIRED
        if self._engine_failure():
            return State.RETIRED
        return State.SERVING if self._started else State.STARTING

    async def start(self, goal: Version | Literal["head"] = "head") -> None:
        """Load an anchor and catch up with ``goal``; returns once that version serves.

        Waits for a lineage that is still empty, and goes on trying while the bucket doesn't answer or holds
        broken bytes (see ``status``). A head whose canary is off is left out: the newest version below it that passes
        is served, as by those who had that one when the head came.

        If it raises, or is cancelled, the replica is closed.

        Raises:
            NotFoundError: No such bucket, or ``goal`` isn't committed.
            AuthError: The store refused the credentials.
            ConflictError: The engine can't hold this lineage's tensors.
            UnsupportedError: The engine can't run this model.
        """
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            self._mode = Mode.FOLLOW if goal == "head" else Mode.MANUAL
            exchange = await self._until_done(lambda: self._boot(goal))
            await self._until_done(lambda: self._catch_up(goal))
            self._reached()
            self._started = True
            _log.info("version %d serves: requests are taken", exchange.swap.version)
            self._spawn(self._drive(), "drive")
            self._spawn(self._follow(), "follow")
            if self._options.scrub_s:
                self._spawn(scrub(exchange, self._clock, self._options.scrub_s), "scrub")
            undo.pop_all()

    async def set_target(self, goal: Goal, in_flight: InFlight | None = None) -> ReplicaStatus:
        """Go to ``goal``, or follow the head. Returns at once; the newest call wins.

        The same target again is no new work, but tries anew what failed.

        Args:
            goal: Where to.
            in_flight: What the swaps there do with answers in flight; None: the replica's own mode.

        Raises:
            NotFoundError: The version isn't committed; nothing has changed.
            ConflictError: The replica isn't serving; the message has its state.
        """
        self._check_serving()
        self._calls += 1
        call = self._calls
        target = None if goal == "stay" else await self._resolve(goal)
        exchange = self._check_serving()
        if call != self._calls:  # a newer call was made meanwhile: an older one never overtakes it
            return self.status()
        self._mode = Mode.FOLLOW if goal == "head" else Mode.MANUAL
        self._in_flight = in_flight or self._options.in_flight
        self._aim(exchange.swap.settles_at if target is None else target)
        return self.status()

    async def roll_back(self, in_flight: InFlight | None = None) -> ReplicaStatus:
        """Undo the last commit and stay there: the mode becomes manual. Returns once that is settled.

        Raises:
            ConflictError: The replica isn't serving, or nothing is left to undo.
        """
        back = self._check_serving().swap.undo_version
        if back is None:
            raise ConflictError("there is no commit to undo", hint="set an older version as the target")
        self._calls += 1
        self._mode = Mode.MANUAL
        self._in_flight = in_flight or self._options.in_flight
        self._aim(back)
        return await self.settled()

    async def settled(self) -> ReplicaStatus:
        """The status, once the target is reached, an attempt has failed and waits, or the replica is gone."""
        await self._settled.wait()
        return self.status()

    def status(self) -> ReplicaStatus:
        """This moment."""
        swap = None if self._exchange is None else self._exchange.swap
        table = None if self._exchange is None else self._exchange.table
        stats = None if self._engine is None else self._engine.stats()
        return ReplicaStatus(
            replica=self._options.replica,
            boot_id=self._options.boot,
            run=self._options.run,
            state=self.state,
            stage=Stage.IDLE if swap is None else swap.stage,
            version=None if swap is None else swap.version,
            target=self._target,
            head=self._head,
            receded=self._watch.receded,
            trouble="" if self._watch.trouble is None else str(self._watch.trouble),
            mode=self._mode,
            swap_mode=self._in_flight,
            provisional=swap is not None and swap.provisional,
            state_digest=None if table is None else table.digest,
            in_flight=self._under_way(),
            kv_tokens=None if self._engine is None else self._engine.describe().kv_tokens,
            kv_used=0 if stats is None else stats.kv_used,
            preemptions=0 if stats is None else stats.preemptions,
            waiting=self._waiting,
            last_error=self._last_error(),
            swaps=() if self._journey is None else self._journey.swaps,
        )

    async def weights_digest(self) -> tuple[Version, StateDigest]:
        """The version in place and the digest of every tensor, recomputed from the engine's own memory.

        Raises:
            ConflictError: The replica isn't serving.
        """
        return await self._check_serving().digest()

    async def complete(self, request: CompletionRequest) -> Answer:
        """See `Completer.complete`."""
        exchange = self._exchange
        if self._engine is None or exchange is None or self.state is not State.SERVING:
            raise UnavailableError(
                f"replica {self._options.replica} is {self.state}", hint="ask again, or ask another replica"
            )
        policy = request.policy.counted_from(self._newest())
        if policy.max_lag is not None:
            raise PolicyUnmetError(
                f"the request admits {policy}", hint="retry in a moment", versions=(exchange.swap.version,)
            )
        doubtful = exchange.doubts()
        answer = await self._engine.generate(replace(request, policy=policy))
        return MarkedAnswer(answer, request.request_id, doubtful, lambda: exchange.spoilt)

    def window(self) -> int:
        """See `Completer.window`; UnavailableError before the engine is open."""
        if self._engine is None:
            raise UnavailableError(f"replica {self._options.replica} is {self.state}", hint="ask again later")
        return self._engine.describe().window

    def routing(self) -> Routing | None:
        """See `Completer.routing`; None before the engine is open."""
        return self._engine.describe().routing if self._engine else None

    async def close(self) -> None:
        """End every task, then the engine. Idempotent."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._settled.set()
        if self._engine is not None:
            await self._engine.close()

    def _newest(self) -> Version | None:
        """The newest committed version; None where the bucket was asked too long ago to tell."""
        looks = [at for at in (self._looked_at, self._watch.looked_at) if at is not None]
        stale = is_stale(max(looks, default=None), self._clock.monotonic(), self._options.poll_s)
        return None if stale else self._head

    def _engine_failure(self) -> str:
        return "" if self._engine is None else self._engine.stats().failure

    def _last_error(self) -> LastError | None:
        """Of the attempts, or why the engine no longer answers, where that was in none."""
        failure = "" if self._closed else self._engine_failure()
        if self._error is not None or not failure:
            return self._error
        return LastError(kind=UnavailableError.kind, message=f"the engine failed: {failure}", version=self._target)

    def _under_way(self) -> int:
        if self._engine is None or self._closed:
            return 0
        stats = self._engine.stats()
        return stats.active + stats.waiting

    def _check_serving(self) -> Exchange:
        if self._exchange is None or self.state is not State.SERVING:
            raise ConflictError(
                f"replica {self._options.replica} is {self.state}", hint="wait until it serves, or restart it"
            )
        return self._exchange

    async def _boot(self, goal: Version | Literal["head"]) -> Exchange:
        head = await await_head(self._source, self._clock, self._options.poll_s, self._tell_absent)
        self._error = self._error if self._target is not None else None  # what kept the head is over
        self._target = target = self._ceiling.under(head) if goal == "head" else check_committed(goal, head)
        limits = self._options.exchange
        try:
            (anchor,) = await asyncio.to_thread(self._route.next, None, target)
        except NotFoundError:
            if target == head:
                raise
            (anchor,) = await asyncio.to_thread(self._route.next, None, head)  # no other way up: it is told again why
        try:
            booted = await boot(self._source, self._route, anchor, self._open_engine, self._clock, limits)
        except CanaryError:
            if anchor.version:
                self._ceiling = self._ceiling.without(anchor.version, target)
            raise
        self._engine = booted.engine
        self._exchange = exchange = Exchange(booted, self._source, self._clock, limits, self._in_flight)
        self._journey = Journey(exchange, self._route, limits, self._options.reports)
        _log.info("version %d is loaded from its anchor, on the way to version %d", anchor.version, target)
        return exchange

    async def _tell_absent(self) -> None:
        """A name that is mistyped looks like a lineage that is still empty."""
        error = await asyncio.to_thread(self._absent)
        self._error = LastError(kind=error.kind, message=str(error), version=None)
        _log.warning("waiting for a first version: %s", error)

    def _no_version(self) -> NotFoundError:
        return NotFoundError(f"run {self._options.run} has no version yet", hint="publish one, or check the name")

    async def _resolve(self, goal: Version | Literal["head"]) -> Version:
        began = self._clock.monotonic()
        self._head = await asyncio.to_thread(self._source.head, self._head)
        self._looked_at = began
        head = Version(-1) if self._head is None else self._head
        return head if goal == "head" else check_committed(goal, head)

    async def _until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Try until it works, while nobody can be told to ask again; what doesn't heal is raised."""
        while True:
            try:
                return await work()
            except _HEALS as error:
                self._failed(error)
                if self.state is State.RETIRED:
                    raise
                await self._clock.sleep(self._delay())

    def _aim(self, target: Version) -> None:
        """Take a target that someone asked for: what failed before is forgotten."""
        self._error, self._failures = None, 0
        self._move_target(target)

    def _move_target(self, target: Version) -> None:
        self._target = target
        exchange = _needed(self._exchange)
        exchange.steer(target, self._in_flight)
        if exchange.swap.version != target or exchange.swap.stage is not Stage.IDLE:
            self._settled.clear()
        self._changed.set()

    def _aimed(self) -> Version:
        return _needed(self._target)

    async def _drive(self) -> None:
        """Step towards the target for as long as the replica can serve."""
        while self.state is State.SERVING:
            self._changed.clear()
            if _needed(self._exchange).swap.version == self._target:
                self._reached()
                await self._changed.wait()
                continue
            try:
                await _needed(self._journey).step(self._aimed)
            except SlackwaterError as error:
                self._failed(error)
                await self._pause(error)
        self._settled.set()
        await self._abandon()

    async def _catch_up(self, goal: Version | Literal["head"]) -> None:
        """Go to the goal before anybody is served. Where it is the head, one that is refused is the one below."""
        head = await self._resolve(goal)
        self._move_target(self._ceiling.under(head) if goal == "head" else head)
        exchange, journey = _needed(self._exchange), _needed(self._journey)
        while exchange.swap.version != self._target:
            try:
                await journey.step(self._aimed)
            except CanaryError as error:
                if goal != "head":
                    raise
                # What lies above can be reached through the refused one alone, or else it would have been passed over.
                self._ceiling = self._ceiling.without(_needed(journey.refused), self._aimed())
                self._failed(error)
                self._move_target(self._ceiling.under(head))

    def _reached(self) -> None:
        _needed(self._journey).arrived()
        self._error, self._failures = None, 0
        self._settled.set()

    def _failed(self, error: SlackwaterError) -> None:
        self._failures += 1
        self._error = LastError(kind=error.kind, message=str(error), version=self._target)
        _log.warning("version %s is not reached, attempt %d: %s", self._target, self._failures, error)

    async def _pause(self, error: SlackwaterError) -> None:
        """Wait before the next attempt; a first way around broken bytes or a wrong base is tried at once."""
        if self.state is not State.SERVING:
            return
        if self._failures == 1 and isinstance(error, (CorruptError, WrongBaseError)):
            return
        self._waiting = True
        self._settled.set()
        # A canary costs the answers in flight: it is not tried again before somebody, or a newer version, asks for it.
        if self._mode is Mode.MANUAL or isinstance(error, CanaryError):
            await self._changed.wait()
        else:
            await first(self._changed.wait(), self._clock.sleep(self._delay()))
        self._waiting = False
        self._settled.clear()

    def _delay(self) -> float:
        return min(self._options.max_retry_s, self._options.retry_s * 2 ** min(self._failures, 20) / 2)

    async def _follow(self) -> None:
        """Move the target with the head, in follow mode."""
        while True:
            try:
                async for head in self._watch.versions(self._head):
                    self._head = head
                    if self._mode is Mode.FOLLOW:
                        self._move_target(head)
            except SlackwaterError as error:  # a bucket that refuses us now may admit us again; serve on meanwhile
                self._failed(error)
            await self._clock.sleep(self._delay())

    async def _abandon(self) -> None:
        """Retired: no further token of unknown weights may leave."""
        engine, limit = _needed(self._engine), self._options.exchange.lease_s
        with suppress(UnavailableError):  # an engine that died has ended its answers by itself
            await first(engine.abort_all(), self._clock.sleep(limit))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"replica-{name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that fails is a bug, or a bucket that refuses us: don't serve unsupervised."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._broken = True
        kind = error.kind if isinstance(error, SlackwaterError) else "internal"
        message = f"{task.get_name()} ended: {error!r}"
        self._error = LastError(kind=kind, message=message, version=self._target)
        _log.error("%s ended", task.get_name(), exc_info=error)
        if self._exchange is not None:
            self._exchange.stop()
        self._settled.set()
        self._changed.set()


def _needed(value: T | None) -> T:
    if value is None:
        raise ConflictError("the replica has not started", hint="await Replica.start first")
    return value
