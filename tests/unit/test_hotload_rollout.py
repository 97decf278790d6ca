from itertools import product

import msgspec
import pytest
from hotload_rig import RUN, group, status

from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, InvalidInputError, NotFoundError
from slackwater.hotload.groups import DEFAULT_GROUP, Group, Mode, arrange, as_ordered, meant
from slackwater.hotload.operation import (
    Operation,
    OperationEvent,
    Order,
    ReplicaProgress,
    ReplicaStage,
    judge,
    news,
    obeys,
    still_well,
)
from slackwater.hotload.recovery import apart, take_up, under_way
from slackwater.hotload.rollout import MOVES, Canary, Phase, first_phase, told_in
from slackwater.hotload.target import SwapTimings, TargetError, TargetStatus
from slackwater.hotload.witness import changes
from slackwater.ids import ReplicaId, Version

FLEET = tuple(ReplicaId(name) for name in ("r0", "r1", "r2", "r3"))
BROKEN = TargetError(kind="corrupt", message="broken")
TRAIN = group("train", "r0", "r1", mode=Mode.FOLLOW)
EVAL = group("eval", "r2", mode=Mode.PINNED, version=3)
GROUPS = arrange([TRAIN, EVAL], FLEET)


def order(**changes: object) -> Order:
    return Order(run=RUN, version=Version(7), **changes)  # type: ignore[arg-type]  # a test names what it changes


def standing(name: str, version: int | None) -> Operation:
    wanted = Order(run=RUN, version=None if version is None else Version(version), group=name, standing=True)
    return Operation(id=name, idempotency_key=name, order=wanted, created_at=0.0)


def test_a_rollout_leaves_each_phase_but_the_last_two_in_two_ways() -> None:
    assert set(MOVES) == set(product((Phase.CANARY, Phase.HOLDING), (True, False)))
    assert all(to is Phase.STOPPED for (_, well), to in MOVES.items() if not well)
    assert MOVES[MOVES[first_phase(Canary()), True], True] is first_phase(None) is Phase.FLEET


@pytest.mark.parametrize(
    ("phase", "told"), [(Phase.CANARY, 2), (Phase.HOLDING, 2), (Phase.STOPPED, 2), (Phase.FLEET, 4)]
)
def test_only_the_last_phase_tells_everyone(phase: Phase, told: int) -> None:
    assert told_in(phase, FLEET, Canary(count=2)) == FLEET[:told]
    assert told_in(phase, FLEET, None) == FLEET


@pytest.mark.parametrize("body", [b'{"count":0}', b'{"hold_s":-1}', b'{"hold_s":1e9}', b'{"hold":3}', b'{"count":1.5}'])
def test_a_canary_has_bounds(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Canary)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (order(), ("r0", "r1", "r3")),
        (order(group="train"), ("r0", "r1")),
        (order(group=DEFAULT_GROUP), ("r3",)),
        (order(replicas=("r3",)), ("r3",)),
        (order(group=DEFAULT_GROUP, replicas=("r3",)), ("r3",)),
    ],
)
def test_a_hot_load_is_about_all_that_is_not_pinned_or_what_it_names(wanted: Order, names: tuple[str, ...]) -> None:
    assert meant(wanted, GROUPS) == names


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (order(group="evla"), NotFoundError),
        (order(replicas=("r9",)), NotFoundError),
        (order(replicas=()), InvalidInputError),
        (order(replicas=("r3", "r3")), InvalidInputError),
        (order(group="train", replicas=("r3",)), InvalidInputError),
        (order(group=DEFAULT_GROUP, canary=Canary(count=1)), InvalidInputError),
        (order(group="eval"), ConflictError),
        (order(replicas=("r2",)), ConflictError),
        (order(replicas=("r0",)), ConflictError),
        (order(group="train", canary=Canary(count=1)), ConflictError),
    ],
)
def test_what_a_hot_load_cannot_mean_is_refused(wanted: Order, error: type[Exception]) -> None:
    with pytest.raises(error):
        meant(wanted, GROUPS)


def test_nobody_is_meant_where_all_are_pinned() -> None:
    with pytest.raises(ConflictError, match="every replica is pinned"):
        meant(order(), arrange([group("eval", *FLEET, mode=Mode.PINNED, version=0)], FLEET))


@pytest.mark.parametrize(
    "groups",
    [
        [group("a", "r0"), group("a", "r1")],
        [group("a", "r0"), group("b", "r0")],
        [group("a", "r0", "r0")],
        [group("a")],
        [group("a", "r9")],
        [group(DEFAULT_GROUP, "r0")],
    ],
)
def test_groups_that_do_not_fit_the_fleet_are_refused(groups: list[Group]) -> None:
    with pytest.raises(InvalidInputError):
        arrange(groups, FLEET)


def test_a_pin_names_its_snapshot_and_nothing_else_does() -> None:
    for mode, version in ((Mode.PINNED, None), (Mode.FOLLOW, 3), (Mode.MANUAL, 3)):
        with pytest.raises(InvalidInputError, match="pinned"):
            group("a", "r0", mode=mode, version=version)


def test_the_open_standing_operation_is_a_groups_mode() -> None:
    ended = standing("train", None).after(OperationEvent.CANCEL)
    assert as_ordered(TRAIN, [ended])[0].mode is Mode.MANUAL
    assert as_ordered(TRAIN, [ended, standing("eval", 3)])[1] is None
    pinned, operation = as_ordered(TRAIN, [standing("train", 5)])
    assert (pinned.mode, pinned.version) == (Mode.PINNED, 5)
    assert operation == standing("train", 5)


def test_a_standing_operation_is_taken_up_for_its_group_as_it_is_now() -> None:
    taken = take_up(standing("train", None), GROUPS)
    assert taken.names == TRAIN.replicas
    assert take_up(standing("gone", None), GROUPS).ended
    other = Operation(id="x", idempotency_key="x", order=order(), created_at=0.0)
    assert take_up(other, GROUPS) is other


def test_of_two_operations_about_a_replica_the_newer_one_goes_on() -> None:
    def about(name: str, *replicas: str) -> Operation:
        parts = tuple(ReplicaProgress(replica=ReplicaId(replica)) for replica in replicas)
        return Operation(id=name, idempotency_key=name, order=order(), created_at=0.0, replicas=parts)

    found = apart([about("new", "r0", "r2"), about("middle", "r0", "r1"), about("old", "r1"), about("apart", "r3")])
    assert [(each.id, each.ended) for each in found] == [
        ("new", False), ("middle", True), ("old", False), ("apart", False)
    ]  # fmt: skip


def test_replicas_that_were_told_and_are_not_there_tell_what_was_running() -> None:
    found = under_way([
        status("r0", version=3, target=7, stage="preparing"),
        status("r1", version=7, target=7),
        status("r2", version=3, target=7, waiting=True),
        status("r3", version=3, target=5, mode="follow", stage="preparing"),
        status("r4", version=5, target=5, provisional=True, stage="verifying"),
        status("r5", version=3, target=7, stage="preparing", swap_mode="drain"),
        status("r6", version=3, target=7, stage="preparing", swap_mode="unheard-of"),
    ], RUN)  # fmt: skip
    assert [(each.version, each.replicas, each.in_flight) for each in found] == [
        (7, ("r0", "r2"), InFlight.CONTINUE),
        (5, ("r4",), InFlight.CONTINUE),
        (7, ("r5",), InFlight.DRAIN),
        (7, ("r6",), None),
    ]


@pytest.mark.parametrize(
    ("seen", "head", "pinned"),
    [
        (status(version=7, target=7), False, True),
        (status(version=6, target=7, stage="preparing"), False, True),
        (status(version=7, target=7, mode="follow"), True, False),
        (status(version=7, target=8), False, False),
        (status(version=6, target=7, waiting=True), False, False),
        (status(version=7, target=7, state="starting"), False, False),
        (status(version=7, target=7, state="retired", mode="follow"), False, False),
    ],
)
def test_who_does_not_do_what_a_standing_order_says_is_told_again(
    seen: TargetStatus, *, head: bool, pinned: bool
) -> None:
    assert obeys(Order(run=RUN, version=None, standing=True), seen) is head
    assert obeys(order(standing=True), seen) is pinned


@pytest.mark.parametrize(
    ("seen", "stage"),
    [
        (status(version=7, target=7, mode="follow"), ReplicaStage.DONE),
        (status(version=7, target=7), ReplicaStage.UNDER_WAY),
        (status(version=6, target=7, mode="follow", stage="preparing"), ReplicaStage.UNDER_WAY),
        (status(version=6, target=7, mode="follow", waiting=True, last_error=BROKEN), ReplicaStage.FAILED),
    ],
)
def test_a_follower_is_done_at_whatever_is_newest(seen: TargetStatus, stage: ReplicaStage) -> None:
    assert judge(Order(run=RUN, version=None, standing=True), seen).stage is stage


def test_timings_are_of_the_swap_that_this_operation_made() -> None:
    swaps = tuple(
        SwapTimings(version=Version(version), pause_s=pause) for version, pause in ((7, 1.0), (7, 2.0), (6, 3.0))
    )
    seen = judge(order(), status(version=7, target=7, swaps=swaps))
    fresh = ReplicaProgress(replica=ReplicaId("r0"))
    there_before = news(fresh, seen, 5.0)
    assert (there_before.stage, there_before.timings) == (ReplicaStage.DONE, None)
    told = news(fresh, judge(order(), status(version=6, target=7, stage="preparing")), 5.0)
    done = news(told, seen, 9.0)
    assert done.timings is not None
    assert (done.timings.pause_s, done.told_at, done.settled_at) == (2.0, 5.0, 9.0)
    assert news(done, seen, 11.0) == done


def test_who_was_silent_at_first_and_then_has_the_version_shows_no_swap_of_before() -> None:
    old = (SwapTimings(version=Version(7), pause_s=1.0),)
    seen = judge(order(), status(version=7, target=7, swaps=old))
    silent = ReplicaProgress(replica=ReplicaId("r0"), stage=ReplicaStage.UNKNOWN, error=BROKEN)
    first = news(news(ReplicaProgress(replica=ReplicaId("r0")), silent, 1.0), seen, 5.0)
    assert (first.stage, first.timings, first.told_at) == (ReplicaStage.DONE, None, 5.0)
    assert news(first, seen, 7.0).timings is None, "nor at the second look of a standing operation"
    swapped = judge(Order(run=RUN, version=None), status(version=8, target=8, mode="follow", swaps=old))
    assert news(first, swapped, 9.0).version == 8


def test_silence_keeps_what_was_known() -> None:
    told = news(ReplicaProgress(replica=ReplicaId("r0")), judge(order(), status(version=6, target=7)), 5.0)
    silent = news(told, ReplicaProgress(replica=ReplicaId("r0"), stage=ReplicaStage.UNKNOWN, error=BROKEN), 6.0)
    assert (silent.version, silent.boot_id, silent.told_at, silent.settled_at) == (6, "boot", 5.0, None)


@pytest.mark.parametrize(
    ("seen", "well"),
    [
        (status(version=7, target=7), True),
        (status(version=7, target=7, boot_id="other"), False),
        (status(version=6, target=6), False),
        (status(version=7, target=7, state="retired"), False),
        (status(version=7, target=7, provisional=True), False),
    ],
)
def test_a_canary_is_well_if_it_is_there_still_and_has_not_restarted(seen: TargetStatus, *, well: bool) -> None:
    before = judge(order(), status(version=7, target=7))
    after = still_well(before, judge(order(), seen))
    assert (after.stage is ReplicaStage.DONE) is well
    assert (after.error is None) is well


def test_events_tell_what_became_of_a_replica() -> None:
    before = status(version=5, target=5)
    seen = [
        (None, before, ["serves", "manual"]),
        (before, before, []),
        (before, status(version=6, target=6, mode="follow"), ["serves", "follows"]),
        (before, status(version=4, target=4), ["rolled_back"]),
        (before, status(version=4, target=5, boot_id="other"), ["restarted", "serves"]),
        (before, status(version=5, target=6, waiting=True, last_error=BROKEN), ["failed"]),
        (before, status(version=5, target=5, state="retired", last_error=BROKEN), ["retired"]),
        (None, status(version=0, target=7, state="starting"), ["manual"]),
        (before, status(version=0, target=7, state="starting", boot_id="other"), ["restarted"]),
        (status(version=0, target=7, state="starting"), status(version=0, target=7), ["serves"]),
        (status(version=7, target=9, state="starting"), status(version=6, target=6), ["serves"]),
    ]
    for old, new, kinds in seen:
        assert [event.kind for event in changes(old, new, 1.0)] == kinds
