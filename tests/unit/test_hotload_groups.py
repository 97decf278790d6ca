"""Groups, canaries and restarts of the conductor, on a manual clock."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hotload_rig import Fleet, group, stages, until

from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.hotload.conductor import ConductorLimits
from slackwater.hotload.groups import Mode
from slackwater.hotload.ledger import open_ledger
from slackwater.hotload.operation import Operation, OperationState
from slackwater.hotload.rollout import Canary, Phase
from slackwater.ids import Version
from slackwater.testing.conformance_ledger import RUN
from slackwater.testing.ledger import DyingLedger, MemoryLedger

CANARY = Canary(count=1, hold_s=10.0)
TRAIN_EVAL = [group("train", "r0", "r1", mode=Mode.FOLLOW), group("eval", "r2", mode=Mode.PINNED, version=3)]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.conductor.close()


@pytest.fixture
async def grouped() -> AsyncIterator[Fleet]:
    made = Fleet(groups=TRAIN_EVAL)
    await made.conductor.start()
    await made.polls()
    yield made
    await made.conductor.close()


def modes(fleet: Fleet) -> dict[str, str]:
    return {each.name: each.words for each in fleet.conductor.groups()}


async def test_a_canary_goes_first_is_held_and_then_the_rest_is_told(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls()
    assert fleet.goals() == [[7], [], []]
    fleet.targets[0].reach()
    await fleet.polls()
    assert fleet.conductor.get(operation.id).phase is Phase.HOLDING
    await fleet.polls(9.5)
    assert fleet.goals() == [[7], [], []]
    await fleet.polls(1.0)
    assert fleet.goals() == [[7], [7], [7]]
    fleet.targets[1].reach()
    fleet.targets[2].reach()
    await fleet.polls()
    assert fleet.conductor.get(operation.id).state is OperationState.SUCCEEDED


async def test_a_canary_that_fails_leaves_the_rest_untouched(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls()
    fleet.targets[0].fail("corrupt")
    await fleet.polls(100.0)
    ended = fleet.conductor.get(operation.id)
    assert (ended.state, ended.phase) == (OperationState.FAILED, Phase.STOPPED)
    assert stages(ended) == ["failed", "skipped", "skipped"]
    assert fleet.goals() == [[7], [], []]


@pytest.mark.parametrize("illness", ["restart", "moved", "retired", "silent"])
async def test_a_canary_that_falls_ill_in_its_hold_leaves_the_rest_untouched(fleet: Fleet, illness: str) -> None:
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls()
    canary = fleet.targets[0]
    canary.reach()
    await fleet.polls()
    match illness:
        case "restart":
            canary.restart()
        case "moved":
            canary.change(version=Version(6), target=Version(6))
        case "retired":
            canary.change(state="retired")
        case _:
            canary.error = UnavailableError("replica r0 did not answer within 5 s")
    await fleet.polls(20.0)
    ended = fleet.conductor.get(operation.id)
    assert ended.state is OperationState.FAILED
    assert stages(ended) == ["failed", "skipped", "skipped"]
    assert ended.replicas[0].error is not None
    assert fleet.goals() == [[7], [], []]


async def test_a_silent_canary_stops_the_rollout_at_the_deadline(fleet: Fleet) -> None:
    fleet.targets[0].silent = True
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls(61.0)
    assert stages(fleet.conductor.get(operation.id)) == ["unknown", "skipped", "skipped"]
    assert fleet.goals() == [[], [], []]


async def test_cancelling_in_the_hold_tells_nobody_else(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls()
    await fleet.conductor.cancel(operation.id)
    await fleet.polls(100.0)
    assert fleet.goals() == [[7], [], []]


async def test_a_subset_is_told_alone_and_operations_that_share_no_replica_run_together(fleet: Fleet) -> None:
    first = await fleet.conductor.submit("demo/7", replicas=["r2"])
    second = await fleet.conductor.submit("demo/6", replicas=["r1", "r0"])
    await fleet.polls()
    assert fleet.goals() == [[6], [6], [7]]
    assert not fleet.conductor.get(first.id).ended
    third = await fleet.conductor.submit("demo/5", replicas=["r1"])
    await fleet.polls()
    states = [fleet.conductor.get(each.id).state for each in (first, second, third)]
    assert states == [OperationState.RUNNING, OperationState.SUPERSEDED, OperationState.RUNNING]
    assert fleet.goals() == [[6], [6, 5], [7]]


async def test_one_key_is_one_body_in_all_its_fields(fleet: Fleet) -> None:
    first = await fleet.conductor.submit("demo/7", "key", canary=CANARY)
    assert (await fleet.conductor.submit("demo/7", "key", canary=CANARY)).id == first.id
    with pytest.raises(ConflictError, match="key"):
        await fleet.conductor.submit("demo/7", "key")
    with pytest.raises(ConflictError, match="key"):
        await fleet.conductor.submit("demo/7", "key", canary=Canary(count=2, hold_s=10.0))
    with pytest.raises(ConflictError, match="key"):
        await fleet.conductor.submit("demo/7", "key", canary=CANARY, replicas=["r0", "r1"])


async def test_configured_groups_follow_and_stay_pinned_by_standing_operations(grouped: Fleet) -> None:
    assert modes(grouped) == {"train": "follow", "eval": "pinned:3"}
    assert grouped.goals() == [["head"], ["head"], [3]]
    grouped.targets[2].reach()
    await grouped.polls(2.0)
    pin, follow = grouped.conductor.list()
    assert (pin.order.standing, follow.order.standing) == (True, True)
    assert stages(pin) == ["done"]
    for target in grouped.targets:
        target.restart()
    await grouped.polls(2.0)
    assert grouped.goals() == [["head"], ["head"], [3, 3]]
    assert [each.state for each in grouped.conductor.list()] == [OperationState.RUNNING] * 2


async def test_a_pinned_replica_that_failed_is_told_again(grouped: Fleet) -> None:
    grouped.targets[2].fail("unavailable")
    await grouped.polls(1.1)
    assert grouped.goals()[2] == [3, 3]
    assert stages(grouped.conductor.list()[0]) == ["under_way"]


async def test_a_pin_whose_canary_is_off_is_told_once_and_again_when_somebody_asks(
    grouped: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = grouped.targets[2]
    pinned.fail("canary")
    await grouped.polls(20.0)
    assert pinned.goals == [3]
    assert stages(grouped.conductor.list()[0]) == ["failed"]
    failed = grouped.conductor.list()[0].id
    assert caplog.text.count(f"replica r2 failed to reach version 3 (hot-load {failed}): canary: broken") == 1
    await grouped.conductor.set_mode("eval", Mode.PINNED, "demo/3")
    await grouped.polls(5.0)
    assert pinned.goals == [3, 3]
    pinned.reach()
    await grouped.polls(5.0)
    assert (pinned.goals, stages(grouped.conductor.list()[0])) == ([3, 3], ["done"])


async def test_a_follower_that_fails_is_a_warning_once_for_each_failure(
    grouped: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    follower = grouped.targets[0]

    def told(kind: str) -> int:
        return caplog.text.count(f"replica r0 failed to reach the head (hot-load op0): {kind}: broken")

    follower.change(target=Version(5))
    for _ in range(3):
        follower.fail("corrupt")
        await grouped.polls(3.0)
        follower.change(stage="preparing", waiting=False)
        await grouped.polls(3.0)
    assert told("corrupt") == 1, "a try more is no news"
    follower.fail("canary")
    await grouped.polls(3.0)
    follower.reach()
    follower.change(waiting=False, last_error=None)
    await grouped.polls(3.0)
    follower.change(target=Version(6))
    follower.fail("canary")
    await grouped.polls(3.0)
    assert (told("corrupt"), told("canary")) == (1, 2)


async def test_following_again_keeps_what_becomes_of_answers_in_flight(grouped: Fleet) -> None:
    await grouped.conductor.set_mode("train", Mode.FOLLOW, in_flight=InFlight.DRAIN)
    await grouped.polls(2.0)
    await grouped.conductor.follow()
    await grouped.polls(5.0)
    assert modes(grouped) == {"train": "follow drain", "eval": "pinned:3"}
    assert [target.now.swap_mode for target in grouped.targets] == ["drain", "drain", "continue"]
    assert grouped.targets[0].modes == [None, InFlight.DRAIN, InFlight.DRAIN]


async def test_a_pin_of_what_is_not_committed_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(groups=[group("eval", "r0", mode=Mode.PINNED, version=99)])
    await fleet.conductor.start()
    await until(lambda: "group eval" in caplog.text)
    assert (
        "group eval is pinned to what isn't there: there is no snapshot demo/99 (the newest is demo/8)" in caplog.text
    )
    await fleet.conductor.close()


async def test_a_bucket_that_is_away_at_the_start_holds_no_pinned_group(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(groups=[group("eval", "r0", mode=Mode.PINNED, version=3)])

    def away(version: Version) -> None:
        raise UnavailableError(f"the store is away, and {version} with it")

    monkeypatch.setattr(fleet.snapshots, "find", away)
    await fleet.conductor.start()
    await until(lambda: "can't be looked up" in caplog.text)
    await fleet.polls()
    assert fleet.goals() == [[3], [], []]
    assert "isn't there" not in caplog.text
    await fleet.conductor.close()


async def test_a_hot_load_passes_the_pinned_by_and_ends_following(grouped: Fleet) -> None:
    operation = await grouped.conductor.submit("demo/7")
    await grouped.polls()
    assert operation.names == ("r0", "r1")
    assert modes(grouped) == {"train": "manual", "eval": "pinned:3"}
    assert grouped.goals() == [["head", 7], ["head", 7], [3]]
    with pytest.raises(ConflictError, match="pinned to version 3"):
        await grouped.conductor.submit("demo/7", group="eval")


async def test_a_part_of_what_follows_is_loaded_once_the_group_is_manual(grouped: Fleet) -> None:
    grouped.targets[0].change(version=Version(5), target=Version(5))
    with pytest.raises(ConflictError, match="follows the head"):
        await grouped.conductor.submit("demo/7", replicas=["r1"])
    await grouped.conductor.set_mode("train", Mode.MANUAL)
    await grouped.polls()
    assert grouped.goals()[:2] == [["head", "stay", 5], ["head", "stay", 0]]
    await grouped.conductor.submit("demo/7", replicas=["r1"])
    await grouped.polls(5.0)
    assert grouped.goals()[:2] == [["head", "stay", 5], ["head", "stay", 0, 7]]


async def test_a_mode_is_changed_and_the_same_one_again_is_no_news(grouped: Fleet) -> None:
    before = grouped.conductor.standing("train")
    assert (await grouped.conductor.set_mode("train", Mode.FOLLOW)).mode is Mode.FOLLOW
    assert grouped.conductor.standing("train") == before
    await grouped.conductor.set_mode("train", Mode.PINNED, "demo/4")
    await grouped.polls()
    assert modes(grouped)["train"] == "pinned:4"
    assert grouped.goals()[:2] == [["head", 4], ["head", 4]]
    await grouped.conductor.follow()
    assert modes(grouped) == {"train": "pinned:4", "eval": "pinned:3"}


async def test_a_mode_that_cannot_be_is_refused_and_changes_nothing(grouped: Fleet) -> None:
    before = grouped.conductor.list()
    for mode, snapshot, error in (
        (Mode.PINNED, None, InvalidInputError),
        (Mode.FOLLOW, "demo/3", InvalidInputError),
        (Mode.PINNED, "../x", InvalidInputError),
        (Mode.PINNED, "demo/99", NotFoundError),
        (Mode.PINNED, "other/1", NotFoundError),
    ):
        with pytest.raises(error):
            await grouped.conductor.set_mode("train", mode, snapshot)
    with pytest.raises(NotFoundError, match="no group"):
        await grouped.conductor.set_mode("nobody", Mode.MANUAL)
    assert grouped.conductor.list() == before


async def test_cancelling_a_standing_operation_leaves_its_group_where_it_is(grouped: Fleet) -> None:
    following = grouped.conductor.standing("train")
    assert following is not None
    grouped.targets[0].change(version=Version(6), target=Version(6))
    cancelled = await grouped.conductor.cancel(following.id)
    await grouped.polls()
    assert cancelled.state is OperationState.CANCELLED
    assert grouped.goals()[:2] == [["head", "stay", 6], ["head", "stay", 0]]
    assert modes(grouped)["train"] == "manual"


async def test_after_a_restart_modes_are_as_they_were_left_unless_the_configuration_changed(grouped: Fleet) -> None:
    await grouped.conductor.set_mode("train", Mode.MANUAL)
    await grouped.restart(TRAIN_EVAL)
    assert modes(grouped) == {"train": "manual", "eval": "pinned:3"}
    await grouped.restart([group("train", "r0", mode=Mode.PINNED, version=2), TRAIN_EVAL[1]])
    await grouped.polls()
    assert modes(grouped) == {"train": "pinned:2", "eval": "pinned:3", "default": "manual"}
    assert grouped.goals()[0][-1] == 2
    await grouped.restart()
    assert modes(grouped) == {"default": "manual"}
    assert all(each.ended for each in grouped.conductor.list())


async def test_a_group_that_the_configuration_makes_manual_stays_where_it_is(grouped: Fleet) -> None:
    grouped.targets[1].change(version=Version(4), target=Version(4))
    await grouped.restart([group("train", "r0", "r1"), TRAIN_EVAL[1]])
    await until(lambda: len(grouped.targets[1].goals) > 2)
    assert modes(grouped) == {"train": "manual", "eval": "pinned:3"}
    assert grouped.goals() == [["head", "stay", 0], ["head", "stay", 4], [3]]


async def test_what_was_running_is_taken_up_by_the_next_conductor(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    fleet = Fleet(ledger=open_ledger(path, RUN))
    operation = await fleet.conductor.submit("demo/7", "key")
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls()
    await fleet.conductor.close()
    fleet.targets[1].reach()
    fleet.targets[2].reach()
    await fleet.restart(ledger=open_ledger(path, RUN))
    await fleet.polls()
    assert [each.id for each in fleet.conductor.list()] == [operation.id]
    ended = fleet.conductor.get(operation.id)
    assert ended.state is OperationState.SUCCEEDED
    assert ended.replicas[1].timings is not None
    assert (await fleet.conductor.submit("demo/7", "key")).id == operation.id
    with pytest.raises(ConflictError, match="key"):
        await fleet.conductor.submit("demo/6", "key")
    await fleet.conductor.close()


async def test_a_key_outlives_the_list(tmp_path: Path) -> None:
    fleet = Fleet(size=1, ledger=open_ledger(tmp_path / "l", RUN), limits=ConductorLimits(history=1))
    first = await fleet.conductor.submit("demo/7", "key")
    for number in range(3):
        await fleet.conductor.submit(f"demo/{number}")
    assert first.id not in [each.id for each in fleet.conductor.list()]
    assert (await fleet.conductor.submit("demo/7", "key")).id == first.id
    await fleet.conductor.close()


async def test_a_hold_that_a_restart_interrupts_begins_anew(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7", canary=CANARY)
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls(8.0)
    await fleet.restart()
    await fleet.polls(9.0)
    assert fleet.conductor.get(operation.id).phase is Phase.HOLDING
    assert fleet.goals() == [[7], [], []]
    await fleet.polls(2.0)
    assert fleet.goals() == [[7], [7], [7]]


async def test_a_replica_that_left_the_fleet_fails_its_part(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    gone = fleet.targets.pop()
    await fleet.restart()
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    ended = fleet.conductor.get(operation.id)
    assert stages(ended) == ["done", "done", "failed"]
    assert ended.replicas[2].error is not None
    assert f"{gone.replica} is no longer" in ended.replicas[2].error.message


async def test_without_a_ledger_what_replicas_are_at_becomes_an_operation() -> None:
    fleet = Fleet()
    for target in fleet.targets[:2]:
        await target.set_target(Version(7))
    await fleet.conductor.start()
    await until(lambda: bool(fleet.conductor.list()))
    (adopted,) = fleet.conductor.list()
    assert (adopted.order.version, adopted.names) == (7, ("r0", "r1"))
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    assert fleet.conductor.get(adopted.id).state is OperationState.SUCCEEDED
    await fleet.conductor.close()


async def play(fleet: Fleet) -> None:
    """A canary, a newer hot-load over it, a pin; as far as the process lives."""
    await fleet.conductor.start()
    await fleet.conductor.submit("demo/7", "first", canary=Canary(count=1, hold_s=1.0))
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls(1.5)
    await fleet.conductor.submit("demo/8", "second")
    await fleet.polls()
    fleet.targets[1].reach()
    await fleet.polls()
    await fleet.conductor.set_mode("train", Mode.PINNED, "demo/4")
    await fleet.polls()


@pytest.mark.parametrize("writes", range(40))
async def test_a_process_that_dies_at_any_write_is_gone_on_from_and_shows_nothing_twice(writes: int) -> None:
    groups = [group("train", "r0", "r1")]
    ledger = DyingLedger(writes)
    fleet = Fleet(ledger=ledger, groups=groups)
    await play(fleet)
    ledger.revive()
    await fleet.restart(groups)
    again = await fleet.conductor.submit("demo/8", "second")
    assert (await fleet.conductor.submit("demo/8", "second")).id == again.id
    keys = [each.idempotency_key for each in fleet.conductor.list()]
    assert len(set(keys)) == len(keys)
    open_names = [name for each in fleet.conductor.list() if not each.ended for name in each.names]
    assert len(set(open_names)) == len(open_names)
    for _ in range(4):
        for target in fleet.targets:
            target.reach()
        await fleet.polls(2.0)
    assert all(each.ended or each.order.standing for each in fleet.conductor.list())
    await fleet.conductor.close()


async def test_a_ledger_that_cannot_be_written_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(ledger=DyingLedger(0, tells=True))
    operation = await fleet.conductor.submit("demo/7", "key")
    await fleet.polls()
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    assert fleet.conductor.get(operation.id).state is OperationState.SUCCEEDED
    assert (await fleet.conductor.submit("demo/7", "key")).id == operation.id
    assert "gone on without" in caplog.text
    await fleet.conductor.close()


async def test_a_hanging_bucket_holds_no_call_beyond_its_limit(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def hang(version: Version) -> None:
        del version
        go.wait(10)

    monkeypatch.setattr(fleet.snapshots, "find", hang)
    call = asyncio.create_task(fleet.conductor.submit("demo/7"))
    await fleet.clock.parked()
    await fleet.polls(5.1)
    with pytest.raises(UnavailableError, match="bucket didn't answer within 5 s"):
        await call
    go.set()
    assert fleet.goals() == [[], [], []]


@pytest.mark.parametrize("turns", range(14))
async def test_f35_a_caller_that_goes_away_and_repeats_gets_one_operation(fleet: Fleet, turns: int) -> None:
    older = await fleet.conductor.submit("demo/6")
    call = asyncio.create_task(fleet.conductor.submit("demo/7", "key"))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    names = {(await fleet.conductor.submit("demo/7", "key")).id for _ in range(5)}
    assert len(names) == 1
    assert [each.id for each in fleet.conductor.list()] == [*names, older.id]
    await fleet.polls()
    assert fleet.conductor.get(older.id).state is OperationState.SUPERSEDED
    assert [goals.count(Version(7)) for goals in fleet.goals()] == [1, 1, 1]


@pytest.mark.parametrize("turns", range(8))
async def test_a_caller_that_goes_away_while_it_sets_a_mode_leaves_no_replica_undriven(
    fleet: Fleet, turns: int
) -> None:
    await fleet.conductor.submit("demo/6")
    call = asyncio.create_task(fleet.conductor.set_mode("default", Mode.FOLLOW))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    await until(lambda: not fleet.conductor._calls)
    await fleet.polls()
    driven = [each for each in fleet.conductor.list() if not each.ended]
    assert len(driven) == len(fleet.conductor._drives) == 1


async def test_a8_16_what_does_not_verify_is_neither_told_nor_written_down(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(version: Version) -> None:
        raise CorruptError(f"the manifest of {version} doesn't verify")

    monkeypatch.setattr(fleet.snapshots, "find", broken)
    with pytest.raises(CorruptError):
        await fleet.conductor.submit("demo/7", "key")
    with pytest.raises(CorruptError):
        await fleet.conductor.set_mode("default", Mode.PINNED, "demo/7")
    assert fleet.goals() == [[], [], []]
    assert fleet.ledger.newest(9) == ()


class HangingLedger(MemoryLedger):
    """One whose disk hangs until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def save(self, *operations: Operation) -> None:
        self.go.wait(10)
        super().save(*operations)


async def test_a_hanging_disk_holds_no_call_beyond_its_limit_and_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    ledger = HangingLedger()
    fleet = Fleet(ledger=ledger)
    call = asyncio.create_task(fleet.conductor.submit("demo/7"))
    await until(lambda: fleet.goals() == [[7], [7], [7]])
    await fleet.polls(11.0)
    operation = await call
    assert "the ledger hangs" in caplog.text
    keyed = asyncio.create_task(fleet.conductor.submit("demo/7", "key"))
    await until(lambda: fleet.clock.sleepers > 4)
    await fleet.polls(11.0)
    with pytest.raises(UnavailableError, match="ledger didn't answer"):
        await keyed
    ledger.go.set()
    await fleet.conductor.close()
    assert [each.id for each in ledger.newest(9)] == [operation.id]


async def test_making_a_manual_group_manual_disturbs_no_hot_load(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    await fleet.conductor.set_mode("default", Mode.MANUAL)
    assert fleet.conductor.get(operation.id).state is OperationState.RUNNING
    assert fleet.goals() == [[7], [7], [7]]


async def test_events_tell_who_moved_and_which_group(grouped: Fleet) -> None:
    grouped.targets[2].reach()
    await grouped.polls(1.1)
    grouped.targets[2].change(state="retired")
    await grouped.polls(1.1)
    await grouped.conductor.set_mode("train", Mode.MANUAL)
    kinds = [(event.kind, str(event.replica)) for event in await grouped.conductor.events(100)]
    assert kinds.count(("group", "None")) == 3
    assert ("retired", "r2") in kinds
    assert kinds.count(("serves", "r2")) == 2
    assert ("follows", "r0") in kinds
