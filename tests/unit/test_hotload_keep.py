"""Where replicas of manual groups are to be, and what brings them back there after a restart."""

from collections.abc import AsyncIterator

import pytest
from hotload_rig import RUN, Fleet, group, stages, status

from slackwater.config.in_flight import InFlight
from slackwater.errors import NotFoundError, UnavailableError, UnsupportedError
from slackwater.hotload.groups import Mode
from slackwater.hotload.keep import Kept, kept, strays
from slackwater.hotload.operation import (
    Operation,
    OperationEvent,
    OperationState,
    Order,
    ReplicaProgress,
    ReplicaStage,
)
from slackwater.hotload.rollout import Canary, Phase
from slackwater.ids import ReplicaId, Version
from slackwater.testing.ledger import MemoryLedger

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
STAGE = ReplicaStage


def ended(
    version: int | None,
    stage: ReplicaStage,
    event: OperationEvent = OperationEvent.SOME_DONE,
    other: ReplicaStage = STAGE.FAILED,
    **changes: object,
) -> Operation:
    """One about r0, which was at 4 when it was last heard, and r1."""
    told = None if stage is STAGE.PENDING else 1.0
    made = Operation(
        id=f"op-{version}",
        idempotency_key=f"op-{version}",
        order=Order(run=RUN, version=None if version is None else Version(version), standing=version is None),
        created_at=0.0,
        state=OperationState.RUNNING,
        replicas=(
            ReplicaProgress(replica=R0, stage=stage, version=Version(4), boot_id="boot", told_at=told),
            ReplicaProgress(replica=R1, stage=other, version=Version(2)),
        ),
        **changes,  # type: ignore[arg-type]  # a test names what it changes
    )
    return made.after(event)


@pytest.mark.parametrize(
    ("newest", "version"),
    [
        (ended(7, STAGE.DONE), 7),
        (ended(7, STAGE.FAILED, other=STAGE.DONE), 7),
        (ended(7, STAGE.FAILED, OperationEvent.NONE_DONE), 3),
        (ended(7, STAGE.FAILED, other=STAGE.DONE, phase=Phase.STOPPED), 3),
        (ended(7, STAGE.SKIPPED, phase=Phase.STOPPED), 3),
        (ended(7, STAGE.UNKNOWN, OperationEvent.NONE_DONE), 7),
        (ended(7, STAGE.UNDER_WAY, OperationEvent.SUPERSEDE), 7),
        (ended(7, STAGE.PENDING, OperationEvent.SUPERSEDE), 3),
        (ended(7, STAGE.UNDER_WAY, OperationEvent.CANCEL), 4),
        (ended(7, STAGE.DONE, OperationEvent.CANCEL), 7),
        (ended(None, STAGE.DONE, OperationEvent.CANCEL), 4),
    ],
    ids=["done", "left behind", "nobody's", "bad canary", "skipped", "unheard", "overtaken", "never told", "cancelled",
         "done and cancelled", "followed"],
)  # fmt: skip
def test_the_newest_operation_that_moved_a_replica_says_where_it_is_to_be(newest: Operation, version: int) -> None:
    older = ended(3, STAGE.DONE)
    assert kept([newest, older], [R0])[R0].version == version


def test_an_open_operation_moves_its_replicas_itself_and_who_was_never_told_is_free() -> None:
    running = Operation(
        id="op", idempotency_key="op", order=Order(run=RUN, version=Version(8)), created_at=0.0,
        replicas=(ReplicaProgress(replica=R0),),
    )  # fmt: skip
    found = kept([running, ended(3, STAGE.DONE, other=STAGE.DONE)], [R0, R1, ReplicaId("r9")])
    assert {name: place.version for name, place in found.items()} == {"r1": 3}


@pytest.mark.parametrize(
    ("stage", "told_at", "boot"),
    [
        (STAGE.PENDING, None, "boot"),
        (STAGE.UNKNOWN, None, "boot"),
        (STAGE.SKIPPED, None, "boot"),
        (STAGE.UNDER_WAY, 2.0, "after"),
        (STAGE.FAILED, None, "after"),
    ],
    ids=["not told", "silent", "skipped", "told", "refused"],
)
def test_only_an_operation_that_told_or_was_refused_knows_which_start_it_told(
    stage: ReplicaStage, told_at: float | None, boot: str
) -> None:
    part = ReplicaProgress(replica=R0, stage=stage, boot_id="after", told_at=told_at)
    order = Order(run=RUN, version=Version(7))
    made = Operation(id="new", idempotency_key="new", order=order, created_at=0.0, replicas=(part,))
    place = kept([made.after(OperationEvent.CANCEL), ended(4, STAGE.DONE)], [R0])[R0]
    assert (place.version, place.boot_id) == (4, boot)


@pytest.mark.parametrize("standing", [True, False])
def test_what_was_never_told_leaves_a_replica_where_it_was(*, standing: bool) -> None:
    order = Order(run=RUN, version=Version(7), standing=standing)
    part = ReplicaProgress(replica=R0)
    made = Operation(id="new", idempotency_key="new", order=order, created_at=0.0, replicas=(part,))
    assert kept([made.after(OperationEvent.SUPERSEDE), ended(4, STAGE.DONE)], [R0])[R0].version == 4


def test_only_a_restart_strays_and_not_who_is_on_its_way_or_cannot_go() -> None:
    place = {R0: Kept(version=Version(7), in_flight=InFlight.DRAIN, boot_id="before")}
    for seen, strayed in (
        (status(version=9, target=9, mode="follow"), True),
        (status(version=9, target=9), True),
        (status(version=0, target=7), False),
        (status(version=9, target=9, mode="follow", boot_id="before"), False),
        (status(version=9, target=9, mode="follow", state="starting"), False),
        (status(version=9, target=9, mode="follow", state="retired"), False),
        (status("r1", version=9, target=9, mode="follow"), False),
    ):
        assert bool(strays([seen], place)) == strayed
    assert list(strays([status(version=9, target=9, mode="follow")], place)) == [(7, InFlight.DRAIN)]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    await made.conductor.start()
    yield made
    await made.conductor.close()


async def load(fleet: Fleet, version: int, in_flight: InFlight | None = None) -> None:
    await fleet.conductor.submit(f"demo/{version}", in_flight=in_flight)
    await fleet.polls()
    for target in fleet.targets:
        target.reach()
    await fleet.polls()


async def test_a_manual_replica_that_restarts_is_brought_back_once_and_that_is_told(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await load(fleet, 7, InFlight.DRAIN)
    for target in fleet.targets[:2]:
        target.restart()
        target.change(version=Version(8), target=Version(8))
    await fleet.rounds(1)
    back = fleet.conductor.list()[0]
    assert (back.names, back.order.version, back.order.standing) == (("r0", "r1"), 7, False)
    assert fleet.goals() == [[7, 7], [7, 7], [7]]
    assert fleet.targets[0].modes == [InFlight.DRAIN] * 2
    assert f"restarted, and back to version 7 by {back.id}: r0, r1" in caplog.text
    for target in fleet.targets[:2]:
        target.reach()
    await fleet.rounds(5)
    assert len(fleet.conductor.list()) == 2
    assert fleet.conductor.list()[0].state is OperationState.SUCCEEDED


async def test_one_that_restarts_while_the_gateway_does_is_brought_back_all_the_same(fleet: Fleet) -> None:
    await load(fleet, 7)
    await fleet.conductor.close()
    fleet.targets[2].restart()
    await fleet.restart()
    await fleet.rounds(1)
    assert fleet.goals() == [[7], [7], [7, 7]]


async def test_one_that_cannot_be_brought_back_is_a_failed_hot_load_and_not_tried_for_ever(fleet: Fleet) -> None:
    await load(fleet, 7)
    fleet.targets[0].restart()
    fleet.targets[0].refusal = NotFoundError("version 7 is gone")
    await fleet.rounds(30)
    back, _ = fleet.conductor.list()
    assert (back.state, stages(back)) == (OperationState.FAILED, ["failed"])


async def test_a_refusal_is_no_restart_and_who_was_silent_is_loaded_once_it_answers(fleet: Fleet) -> None:
    await fleet.rounds(1)
    fleet.targets[0].refusal = UnsupportedError("not with this engine")
    fleet.targets[1].error = UnavailableError("no answer")
    made = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[2].reach()
    await fleet.polls(61.0)
    assert stages(fleet.conductor.get(made.id)) == ["failed", "unknown", "done"]
    fleet.targets[1].error = None
    await fleet.rounds(3)
    assert [each.names for each in fleet.conductor.list()] == [("r1",), ("r0", "r1", "r2")]
    assert fleet.goals() == [[], [7], [7]]


async def test_who_was_moved_by_hand_or_never_loaded_is_left_alone(fleet: Fleet) -> None:
    fleet.targets[0].restart()
    await fleet.rounds(5)
    assert (fleet.goals(), fleet.conductor.list()) == ([[], [], []], ())
    await load(fleet, 7)
    fleet.targets[1].change(version=Version(5), target=Version(5))
    fleet.targets[2].change(mode="follow")
    await fleet.rounds(5)
    assert fleet.goals() == [[7], [7], [7]]


async def test_a_cancelled_hot_load_that_never_told_a_replica_hides_no_restart_of_it(fleet: Fleet) -> None:
    await load(fleet, 4)
    restarted = fleet.targets[2]
    restarted.restart()
    restarted.change(version=Version(7), target=Version(7))
    await fleet.conductor.fleet()
    made = await fleet.conductor.submit("demo/8", canary=Canary(count=1, hold_s=50.0))
    await fleet.rounds(2)
    assert restarted.goals == [4]
    await fleet.conductor.cancel(made.id)
    await fleet.rounds(2)
    assert restarted.goals == [4, 4]


async def test_a_cancel_leaves_a_commit_that_was_not_seen_yet_and_a_restart_comes_back_to_it(fleet: Fleet) -> None:
    await load(fleet, 4)
    made = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    committed, committing, prepared = fleet.targets
    committed.reach()
    committing.change(stage="committing")
    ended = await fleet.conductor.cancel(made.id)
    committing.reach()
    await fleet.rounds(2)
    assert [target.now.version for target in fleet.targets] == [7, 7, 4]
    assert [target.now.target for target in fleet.targets] == [7, 7, 4]
    assert [part.version for part in ended.replicas] == [7, 7, 4]
    assert fleet.goals() == [[4, 7, "stay"]] * 3
    assert stages(ended) == ["done", "under_way", "under_way"]
    for target in (committed, committing, prepared):
        target.restart()
        target.change(version=Version(8), target=Version(8))
    await fleet.rounds(2)
    assert fleet.goals() == [[4, 7, "stay", 7], [4, 7, "stay", 7], [4, 7, "stay", 4]]


async def test_the_canary_that_restarts_in_its_hold_goes_back_to_what_its_group_has(fleet: Fleet) -> None:
    await load(fleet, 6)
    await fleet.conductor.submit("demo/7", canary=Canary(count=1, hold_s=2.0))
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls()
    fleet.targets[0].restart()
    await fleet.rounds(4)
    assert fleet.goals() == [[6, 7, 6], [6], [6]]


@pytest.mark.parametrize("how", ["mode", "cancel", "configuration"])
async def test_a_group_that_was_made_manual_goes_back_after_a_restart_to_where_it_stayed(how: str) -> None:
    follow = [group("train", "r0", "r1", mode=Mode.FOLLOW)]
    fleet = Fleet(size=2, groups=follow, ledger=MemoryLedger())
    await fleet.conductor.start()
    await fleet.polls()
    fleet.targets[0].change(version=Version(5), target=Version(5))
    fleet.targets[1].change(version=Version(6), target=Version(6))
    if how == "mode":
        await fleet.conductor.set_mode("train", Mode.MANUAL)
    elif how == "cancel":
        await fleet.conductor.cancel(fleet.conductor.list()[0].id)
    else:
        await fleet.restart([group("train", "r0", "r1")])
    await fleet.rounds(2)
    assert fleet.goals() == [["head", "stay", 5], ["head", "stay", 6]]
    assert all(each.ended for each in fleet.conductor.list())
    fleet.targets[0].restart()
    fleet.targets[0].change(version=Version(8), target=Version(8))
    await fleet.rounds(2)
    assert fleet.goals() == [["head", "stay", 5, 5], ["head", "stay", 6]]
    await fleet.conductor.close()


async def test_a_call_that_comes_first_decides_over_the_configuration_that_made_its_group_manual() -> None:
    fleet = Fleet(size=2, groups=[group("train", "r0", "r1", mode=Mode.FOLLOW)], ledger=MemoryLedger())
    await fleet.conductor.start()
    await fleet.polls()
    await fleet.conductor.close()
    manual = [group("train", "r0", "r1")]
    fleet.conductor = fleet.conduct(manual)
    await fleet.conductor.start()
    await fleet.conductor.set_mode("train", Mode.FOLLOW)
    await fleet.rounds(3)
    open_ones = [each for each in fleet.conductor.list() if not each.ended]
    assert len({name for each in open_ones for name in each.names}) == sum(len(each.names) for each in open_ones)
    assert fleet.conductor.groups()[0].mode is Mode.FOLLOW
    assert [target.now.mode for target in fleet.targets] == ["follow", "follow"]
    await fleet.conductor.close()
