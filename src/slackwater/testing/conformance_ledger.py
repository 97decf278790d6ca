"""What every ledger must do, as a suite to inherit from.

::

    class TestMyLedger(LedgerTests):
        @pytest.fixture
        def ledger(self) -> Ledger:
            return MyLedger(...)   # empty for each test

One that outlives its process inherits from `DurableLedgerTests` and gives a ``reopen`` fixture, too: it closes nothing,
and opens anew what ``ledger`` has written. The suite needs pytest.
"""

from collections.abc import Callable
from dataclasses import replace

from slackwater.config.in_flight import InFlight
from slackwater.hotload.ledger import Ledger
from slackwater.hotload.operation import Operation, OperationEvent, Order, ReplicaProgress, ReplicaStage
from slackwater.hotload.rollout import Canary, Phase
from slackwater.hotload.target import SwapTimings, TargetError
from slackwater.hotload.witness import FleetEvent
from slackwater.ids import ReplicaId, RunId, Version

RUN = RunId("demo")
"""The lineage that the ledger is about."""


def operation(number: int) -> Operation:
    """One that says everything that an operation can say."""
    done = ReplicaProgress(
        replica=ReplicaId("r0"),
        stage=ReplicaStage.DONE,
        version=Version(number),
        boot_id="boot",
        told_at=1.5,
        settled_at=2.25,
        timings=SwapTimings(version=Version(number), from_version=Version(0), fetch_s=0.1, pause_s=0.002, ended=3),
    )
    failed = ReplicaProgress(
        replica=ReplicaId("r1"),
        stage=ReplicaStage.FAILED,
        error=TargetError(kind="corrupt", message='broken: "\u0000\U0001f60a"'),
    )
    order = Order(
        run=RUN,
        version=Version(number),
        group="train",
        replicas=(ReplicaId("r0"), ReplicaId("r1")),
        canary=Canary(count=1, hold_s=0.5),
        in_flight=InFlight.DRAIN,
    )
    return Operation(
        id=f"op{number}",
        idempotency_key=f"key {number}",
        order=order,
        created_at=1767225600.125,
        phase=Phase.HOLDING,
        replicas=(done, failed),
    )


def ended(number: int) -> Operation:
    """One that never changes again."""
    return operation(number).after(OperationEvent.CANCEL)


def event(number: int) -> FleetEvent:
    """One thing that happened."""
    return FleetEvent(at=float(number), kind="serves", replica=ReplicaId("r0"), version=Version(number), operation="op")


class LedgerTests:
    """Promises of every `slackwater.hotload.ledger.Ledger`."""

    def test_an_empty_one_has_nothing(self, ledger: Ledger) -> None:
        """Nothing comes out that wasn't put in."""
        assert (ledger.newest(10), ledger.events(10), dict(ledger.configured())) == ((), (), {})
        assert ledger.by_key("key 1") is None

    def test_an_operation_comes_back_as_it_was(self, ledger: Ledger) -> None:
        """Every field of it."""
        head = replace(operation(2), order=Order(run=RUN, version=None, standing=True), phase=Phase.FLEET, replicas=())
        ledger.save(operation(1), head)
        assert ledger.newest(10) == (head, operation(1))

    def test_saving_again_changes_it_and_its_place_stays(self, ledger: Ledger) -> None:
        """No operation is shown twice."""
        ledger.save(operation(1))
        ledger.save(operation(2))
        ledger.save(ended(1))
        assert ledger.newest(10) == (operation(2), ended(1))

    def test_a_key_finds_its_operation_also_when_it_has_ended(self, ledger: Ledger) -> None:
        """By the whole key alone."""
        ledger.save(operation(1), ended(2))
        assert ledger.by_key("key 2") == ended(2)
        assert ledger.by_key("key 1") == operation(1)
        assert ledger.by_key("key") is None
        assert ledger.by_key("' OR 1=1 --") is None

    def test_open_ones_are_found_however_old(self, ledger: Ledger) -> None:
        """The limit is for ended ones."""
        ledger.save(operation(0), *(ended(number) for number in range(1, 6)))
        assert ledger.newest(2) == (ended(5), ended(4), operation(0))

    def test_events_come_newest_first(self, ledger: Ledger) -> None:
        """As many as are asked for."""
        ledger.note(event(1), event(2))
        ledger.note(event(3))
        assert ledger.events(2) == (event(3), event(2))
        assert ledger.events(10) == (event(3), event(2), event(1))

    def test_configured_modes_are_replaced_as_a_whole(self, ledger: Ledger) -> None:
        """A group that isn't named any more is gone."""
        ledger.configure({"train": "follow", "eval": "pinned:3"})
        ledger.configure({"train": "manual"})
        assert dict(ledger.configured()) == {"train": "manual"}

    def test_closing_twice_is_closing_once(self, ledger: Ledger) -> None:
        """And raises nothing."""
        ledger.close()
        ledger.close()


class DurableLedgerTests(LedgerTests):
    """Promises of those that outlive their process."""

    def test_everything_is_there_again(self, ledger: Ledger, reopen: Callable[[], Ledger]) -> None:
        """Operations in their order, keys, events and modes."""
        ledger.save(operation(1), operation(2))
        ledger.save(ended(1))
        ledger.note(event(1), event(2))
        ledger.configure({"train": "follow"})
        ledger.close()
        again = reopen()
        assert again.newest(10) == (operation(2), ended(1))
        assert again.by_key("key 1") == ended(1)
        assert again.events(10) == (event(2), event(1))
        assert dict(again.configured()) == {"train": "follow"}
        again.save(operation(3))
        assert again.newest(1)[0] == operation(3)
        again.close()
