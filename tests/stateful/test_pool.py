"""The pool under any order of joins, probes, losses and releases: its ledger balances, and who is out gets nothing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from depth import examples
from slackwater.ids import ReplicaId, Version
from slackwater.router.policy import Health, Refusal, RoutingContext
from slackwater.router.pool import FAILURES_TO_EJECT, GOODS_TO_RETURN, Pool, ProbeReport, Reservation

NAMES = st.sampled_from([ReplicaId("a"), ReplicaId("b"), ReplicaId("c")])
REPORTS = st.builds(
    ProbeReport,
    status=st.sampled_from(["serving", "swapping"]),
    version=st.sampled_from([None, Version(1), Version(2)]),
    in_flight=st.integers(0, 3),
)


class PoolMachine(RuleBasedStateMachine):
    """Keeps a plain model beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.probes: dict[ReplicaId, list[bool]] = {}
        self.reports: dict[ReplicaId, ProbeReport] = {}
        self.held: dict[int, Reservation] = {}

    places = Bundle("places")

    @rule(name=NAMES)
    def join(self, name: ReplicaId) -> None:
        if name not in self.probes:
            self.pool.add(name)
            self.probes[name] = []

    @rule(name=NAMES)
    def leave(self, name: ReplicaId) -> None:
        if name in self.probes:
            self.pool.remove(name)
            del self.probes[name]
            self.reports.pop(name, None)

    @rule(name=NAMES, report=REPORTS | st.none())
    def probe(self, name: ReplicaId, report: ProbeReport | None) -> None:
        before = self.pool.members.get(name)
        transition = self.pool.report(name, report)
        if before is None:
            assert transition is None
            return
        self.probes[name].append(report is not None)
        if report is not None:
            self.reports[name] = report
        after = self.pool.members[name].health
        assert (transition is not None) == (before.health is not after)
        tail = self.probes[name]
        if after is Health.EJECTED and before.health is not Health.EJECTED:
            assert tail[-FAILURES_TO_EJECT:] == [False] * FAILURES_TO_EJECT
        if before.health is Health.EJECTED and after is not Health.EJECTED:
            assert tail[-GOODS_TO_RETURN:] == [True] * GOODS_TO_RETURN
        if report is not None and before.health is not Health.EJECTED:
            assert after is Health.GOOD

    @rule(name=NAMES)
    def lose(self, name: ReplicaId) -> None:
        before = self.pool.members.get(name)
        self.pool.lost(name)
        if before is not None and before.health is not Health.GOOD:
            assert self.pool.members[name].health is before.health

    @rule(target=places, excluded=st.frozensets(NAMES))
    def reserve(self, excluded: frozenset[ReplicaId]) -> object:
        place = self.pool.reserve(RoutingContext(excluded=excluded))
        if isinstance(place, Refusal):
            return multiple()
        assert place.replica not in excluded
        assert self.pool.members[place.replica].health in (Health.GOOD, Health.SUSPECT)
        assert self.reports[place.replica].status == "serving"
        self.held[place.number] = place
        return place

    @rule(place=places)
    def release(self, place: Reservation) -> None:
        assert self.pool.release(place) == (self.held.pop(place.number, None) is not None)

    @rule(place=consumes(places))
    def release_last(self, place: Reservation) -> None:
        self.release(place)

    @invariant()
    def the_ledger_balances(self) -> None:
        assert self.pool.total_in_flight == len(self.held)
        for name in self.probes:
            held = sum(place.replica == name for place in self.held.values())
            assert self.pool.in_flight(name) == held


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
