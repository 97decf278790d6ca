"""The swap machine against a model of an engine and its publisher, under every order of events and faults."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from depth import examples
from slackwater.errors import InternalError
from slackwater.ids import Version
from slackwater.replica.swap import MOVES, Event, Stage, Swap, keeps


class ModelEngine:
    """What an engine holds, as versions: ``tensors`` are the bits in place, ``saved`` what an undo gives."""

    def __init__(self, version: int) -> None:
        self.tensors = [version] * 3
        self.saved: list[int] | None = None

    def commit(self, version: int) -> None:
        self.saved, self.tensors = self.tensors, [version] * 3

    def undo(self) -> None:
        assert self.saved is not None
        self.tensors, self.saved = self.saved, None


class SwapMachine(RuleBasedStateMachine):
    """Drives `Swap` as the driver does, with faults at every step."""

    @initialize(version=st.integers(0, 3))
    def boot(self, version: int) -> None:
        self.swap = Swap(version=Version(version))
        self.engine = ModelEngine(version)
        self.head = version
        self.target = version
        self.flipped = False
        self.confirmed = version

    def at(self, stage: Stage) -> bool:
        return self.swap.stage is stage

    def on(self, event: Event, goal: int | None = None) -> None:
        self.swap = self.swap.after(event, None if goal is None else Version(goal))

    @rule()
    def publish(self) -> None:
        self.head += 1

    @rule(data=st.data())
    def move_target(self, data: st.DataObject) -> None:
        self.target = data.draw(st.integers(0, self.head))
        if not keeps(self.swap, Version(self.target)):
            self.on(Event.SUPERSEDE)

    @precondition(lambda self: self.at(Stage.IDLE) and self.swap.version != self.target)
    @rule()
    def begin(self) -> None:
        version = self.swap.version
        self.on(Event.BEGIN, version + 1 if version < self.target else self.target)

    @precondition(lambda self: self.at(Stage.PREPARING))
    @rule(works=st.booleans())
    def prepare(self, works: bool) -> None:
        self.on(Event.PREPARED if works else Event.FAILED)

    @precondition(lambda self: self.at(Stage.STAGED))
    @rule()
    def drain(self) -> None:
        self.on(Event.DRAIN)

    @precondition(lambda self: self.at(Stage.DRAINING))
    @rule()
    def die_while_draining(self) -> None:
        self.on(Event.FAILED)

    @precondition(lambda self: self.at(Stage.STAGED) or self.at(Stage.DRAINING))
    @rule()
    def commit(self) -> None:
        self.on(Event.COMMIT)

    @precondition(lambda self: self.at(Stage.COMMITTING))
    @rule(result=st.sampled_from([Event.COMMITTED, Event.FAILED, Event.HUNG]), flips=st.booleans())
    def apply(self, result: Event, flips: bool) -> None:
        if result is Event.COMMITTED:
            assert self.swap.goal is not None
            self.engine.commit(self.swap.goal)
            self.flipped = flips
            if flips:
                self.engine.tensors[1] = -1
        if result is Event.HUNG:
            self.engine.tensors[0] = -1
        self.on(result)

    @precondition(lambda self: self.at(Stage.VERIFYING))
    @rule()
    def verify(self) -> None:
        self.on(Event.DIFFERED if self.flipped else Event.AGREED)
        if not self.flipped:
            self.confirmed = self.swap.version

    @precondition(lambda self: self.at(Stage.IDLE) and self.swap.previous is not None)
    @rule()
    def roll_back(self) -> None:
        self.on(Event.ROLL_BACK)

    @precondition(lambda self: self.at(Stage.UNDOING))
    @rule(result=st.sampled_from([Event.UNDONE, Event.UNDONE, Event.FAILED, Event.HUNG]))
    def undo(self, result: Event) -> None:
        if result is Event.UNDONE:
            self.engine.undo()
            self.flipped = False
        else:
            self.engine.tensors[0] = -1
        self.on(result)
        self.confirmed = self.swap.version

    @rule(event=st.sampled_from(Event))
    def an_illegal_event_changes_nothing(self, event: Event) -> None:
        if (self.swap.stage, event) in MOVES:
            return
        before = self.swap
        with pytest.raises(InternalError):
            self.on(event, 1)
        assert self.swap == before

    @invariant()
    def never_mixed(self) -> None:
        """What serves as verified is one version's weights, whole."""
        if self.swap.serves and not self.swap.provisional:
            assert len(set(self.engine.tensors)) == 1

    @invariant()
    def label_follows_applied(self) -> None:
        """Outside an undo, the label names the weights that the engine was last given."""
        if self.swap.serves:
            assert self.engine.tensors[0] == self.swap.version

    @invariant()
    def confirmed_is_never_provisional(self) -> None:
        """A version counts as confirmed only once its bits were compared."""
        if self.at(Stage.IDLE):
            assert not self.swap.provisional
            assert self.swap.version == self.confirmed

    @invariant()
    def a_goal_exists_exactly_while_one_is_made(self) -> None:
        """``goal`` is set from ``begin`` to the commit's end."""
        making = self.swap.stage in (Stage.PREPARING, Stage.STAGED, Stage.DRAINING, Stage.COMMITTING)
        assert (self.swap.goal is not None) == making

    @invariant()
    def tokens_of_unproven_bits_can_be_told(self) -> None:
        """Whatever the engine holds now, or will before the next event, is confirmed or among the unproven."""
        if self.swap.serves and self.engine.tensors[0] >= 0:
            assert self.engine.tensors[0] in {*self.swap.unproven, self.confirmed}

    @invariant()
    def an_undo_is_offered_only_where_the_engine_can(self) -> None:
        """``previous`` is what the engine saved."""
        if self.swap.serves and self.swap.previous is not None:
            assert self.engine.saved is not None
            assert self.engine.saved[0] == self.swap.previous

    def teardown(self) -> None:
        """Once faults stop, the target is reached, unless the replica is retired."""
        if not hasattr(self, "swap"):
            return
        for _ in range(8 * (self.head + 2)):
            if not self.swap.serves or (self.at(Stage.IDLE) and self.swap.version == self.target):
                return
            self.go_on()
        pytest.fail(f"{self.target} is not reached from {self.swap}")

    def go_on(self) -> None:
        match self.swap.stage:
            case Stage.IDLE:
                self.begin()
            case Stage.PREPARING:
                self.prepare(works=True)
            case Stage.STAGED | Stage.DRAINING:
                self.commit()
            case Stage.COMMITTING:
                self.apply(Event.COMMITTED, flips=False)
            case Stage.VERIFYING:
                self.verify()
            case Stage.UNDOING:
                self.undo(Event.UNDONE)
            case Stage.RETIRED:
                pytest.fail("nothing goes on from here")


SwapMachine.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSwapMachine = SwapMachine.TestCase
