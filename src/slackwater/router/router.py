"""The router: one Completer over many replicas. It decides nothing: `policy` chooses, `pool` remembers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Protocol, Self

from slackwater.clock import Clock, SystemClock
from slackwater.errors import (
    NotFoundError,
    PolicyUnmetError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.ids import ReplicaId, Version
from slackwater.rollout.completer import Completer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing
from slackwater.router.answer import RoutedAnswer
from slackwater.router.policy import Health, Refusal, RoutingContext
from slackwater.router.pool import Member, Pool, ProbeReport, Reservation, Transition

_log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 0.5
"""Seconds between the end of one probe of a replica and the next."""
PROBE_TIMEOUT_S: Final = 2.0
"""A probe that takes longer has failed."""


class Replica(Completer, Protocol):
    """What the router needs of a replica: `slackwater.router.remote.RemoteReplica` is one."""

    async def probe(self) -> ProbeReport:
        """How it is.

        Raises:
            SlackwaterError: It doesn't say.
        """
        ...

    def sever(self) -> None:
        """Wait for it no longer: its calls of `complete` and its live answers raise ReplicaLostError now.

        Later calls reach it as before. Idempotent.
        """
        ...

    async def aclose(self) -> None:
        """Free what it holds. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStatistics:
    """Counts since the start."""

    requests: int
    refused: int
    """Times that no replica could take a request."""
    retries: int
    """Attempts after a request's first."""
    losses: int
    """Connections that broke while a replica served."""
    in_flight: int
    """Reservations held now."""


class Router:
    """Gives each request to one replica; when that one is lost, another goes on from the tokens so far.

    The answer to a request that isn't ``streamed`` is held back until it is whole, so it can also be begun again where
    its tokens aren't to be trusted, or where nobody can go on from them.

    Args:
        replicas: By the name under which the pool knows them; each is closed with the router.
        window: Context window in tokens; None: the smallest that the replicas report.
        clock: Times the probes; the machine's own by default.
        probe_interval_s: Seconds between two probes of one replica.
        probe_timeout_s: Seconds after which a probe has failed.
        head: Tells the newest committed version, from which ``max_lag`` counts; None where that isn't known, as by
            default.
    """

    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        *,
        window: int | None = None,
        clock: Clock | None = None,
        probe_interval_s: float = PROBE_INTERVAL_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        head: Callable[[], Version | None] | None = None,
    ) -> None:
        self._replicas: dict[ReplicaId, Replica] = {}
        self._pool = Pool()
        self._window = window
        self._head = head or (lambda: None)
        self._clock = clock or SystemClock()
        self._probe_times = (probe_interval_s, probe_timeout_s)
        self._probers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._counts: Counter[str] = Counter()
        self._started = False
        for name, replica in replicas.items():
            self.add(name, replica)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {member.health}" for name, member in self._pool.members.items())
        return f"Router({{{shown}}})"

    async def __aenter__(self) -> Self:
        """Probe each replica once, then go on probing until the exit."""
        self._started = True
        await asyncio.gather(*(self.probe(name) for name in self._replicas))
        for name in self._replicas:
            self._watch(name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop probing and close every replica. Answers under way end as their replicas' connections do."""
        del kind, error, trace
        for name in list(self._replicas):
            await self.remove(name)

    def add(self, name: ReplicaId, replica: Replica) -> None:
        """Add a replica; it gets requests once it answers a probe with the status ``serving``.

        Raises:
            ConflictError: The name is taken.
        """
        self._pool.add(name)
        self._replicas[name] = replica
        if self._started:
            self._watch(name)

    async def remove(self, name: ReplicaId) -> None:
        """Take a replica out and close it.

        Raises:
            NotFoundError: There is none of this name.
        """
        self._pool.remove(name)
        prober = self._probers.pop(name, None)
        if prober is not None:
            await _stop(prober)
        await self._replicas.pop(name).aclose()

    def members(self) -> Mapping[ReplicaId, Member]:
        """The table of replicas."""
        return self._pool.members

    def in_flight(self, name: ReplicaId) -> int:
        """Requests that this router has given to a replica and that haven't ended."""
        return self._pool.in_flight(name)

    def statistics(self) -> RouterStatistics:
        """Counts since the start."""
        counts = self._counts
        return RouterStatistics(
            requests=counts["requests"],
            refused=counts["refused"],
            retries=counts["retries"],
            losses=counts["losses"],
            in_flight=self._pool.total_in_flight,
        )

    def window(self) -> int:
        """See `Completer.window`.

        Raises:
            UnavailableError: No replica has told its window yet.
        """
        told = [member.report.window for member in self._pool.members.values() if member.report]
        window = self._window or min((size for size in told if size), default=None)
        if window is None:
            raise UnavailableError("no replica has told its window yet", hint="wait for a replica to start")
        return window

    def routing(self) -> Routing | None:
        """See `Completer.routing`: what the replicas tell, where they agree."""
        told = {member.report.routing for member in self._pool.members.values() if member.report} - {None}
        return told.pop() if len(told) == 1 else None

    async def complete(self, request: CompletionRequest) -> RoutedAnswer:
        """See `Completer.complete`."""
        self._counts["requests"] += 1
        # Counted once: a head that moves while the request is under way makes nobody too old for it.
        policy = request.policy.counted_from(self._head())
        answer = RoutedAnswer(self, replace(request, policy=policy))
        await answer.begin()
        return answer

    def reserve(self, request: CompletionRequest, excluded: frozenset[ReplicaId]) -> tuple[Reservation, Replica]:
        """Take a place for a request on the best replica that isn't ``excluded``.

        Raises:
            PolicyUnmetError: Replicas could answer, but none holds an admitted version.
            UnavailableError: None can.
            NotFoundError: None has this model.
        """
        context = RoutingContext(model=request.model, policy=request.policy, excluded=excluded)
        reservation = self._pool.reserve(context)
        if isinstance(reservation, Refusal):
            self._counts["refused"] += 1
            raise _refused(reservation, request)
        self._counts["retries"] += bool(excluded)
        return reservation, self._replicas[reservation.replica]

    def release(self, reservation: Reservation) -> None:
        """Give a place back; twice is once."""
        self._pool.release(reservation)

    def lost(self, name: ReplicaId) -> None:
        """Note that a replica's connection broke within an answer."""
        self._counts["losses"] += 1
        _tell(self._pool.lost(name))

    async def probe(self, name: ReplicaId) -> None:
        """Ask one replica now and note what it says; one that this puts out is severed."""
        try:
            report = await self._within(self._replicas[name].probe())
        except SlackwaterError as error:
            _log.debug("probe of %s failed: %s", name, error)
            report = None
        transition = self._pool.report(name, report)
        _tell(transition)
        if transition is not None and transition.after is Health.EJECTED:
            # A frozen process keeps its connections: nothing else would end the answers that wait for it.
            self._replicas[name].sever()

    def _watch(self, name: ReplicaId) -> None:
        self._probers[name] = asyncio.create_task(self._probe_forever(name), name=f"probe-{name}")

    async def _probe_forever(self, name: ReplicaId) -> None:
        while True:
            await self._clock.sleep(self._probe_times[0])
            await self.probe(name)

    async def _within(self, probe: Coroutine[Any, Any, ProbeReport]) -> ProbeReport | None:
        asked = asyncio.ensure_future(probe)
        timer = asyncio.ensure_future(self._clock.sleep(self._probe_times[1]))
        try:
            await asyncio.wait((asked, timer), return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            await _stop(asked)
            await _stop(timer)


async def _stop(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _tell(transition: Transition | None) -> None:
    if transition is not None:
        _log.warning("replica %s: %s, was %s", transition.replica, transition.after, transition.before)


def _refused(refusal: Refusal, request: CompletionRequest) -> SlackwaterError:
    match refusal.kind:
        case "policy_unmet":
            held = ", ".join(map(str, refusal.versions)) or "none"
            return PolicyUnmetError(
                f"no replica holds {request.policy}; held: {held}",
                hint=request.policy.way_out(refusal.versions),
                versions=refusal.versions,
            )
        case "not_found":
            return NotFoundError(f"no replica serves the model {request.model[:80]!r}")
        case "unavailable":
            return UnavailableError("no replica can answer now", hint="retry; GET /v1/replicas says why")
