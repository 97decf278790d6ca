import asyncio
from collections.abc import AsyncIterator

import pytest
from hotload_rig import Fleet, until

from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from slackwater.hotload.conductor import ConductorLimits
from slackwater.hotload.operation import OperationState, ReplicaStage
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.ids import RunId, Version
from slackwater.testing.bucket import MemoryBucket

HOSTILE = [
    "../x",
    "/etc",
    "s3://other/..",
    "http://169.254.169.254/",
    "file:///",
    "a" * 300 + "/1",
    "demo/\x00",
    "demo/1\x00",
    "demo/\u0661",
    "\uff0e\uff0e/1",
    "demo/-1",
    "demo/7/..",
    "demo",
    "",
]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.conductor.close()


async def test_every_replica_is_told_and_the_operation_ends_when_all_are_there(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    assert operation.state is OperationState.QUEUED
    await fleet.polls()
    assert fleet.conductor.get(operation.id).state is OperationState.RUNNING
    for target in fleet.targets:
        assert target.goals == [7]
        target.reach()
    await fleet.polls()
    ended = fleet.conductor.get(operation.id)
    assert ended.state is OperationState.SUCCEEDED
    assert [(part.stage, part.version) for part in ended.replicas] == [(ReplicaStage.DONE, 7)] * 3


async def test_a1_12_one_failing_replica_is_named_and_the_others_are_done(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[0].reach()
    fleet.targets[1].fail("corrupt")
    fleet.targets[2].reach()
    await fleet.polls()
    ended = fleet.conductor.get(operation.id)
    assert ended.state is OperationState.PARTLY_FAILED
    assert [part.stage for part in ended.replicas] == [ReplicaStage.DONE, ReplicaStage.FAILED, ReplicaStage.DONE]
    assert [part.version for part in ended.replicas] == [7, 0, 7]
    error = ended.replicas[1].error
    assert error is not None
    assert error.kind == "corrupt"


async def test_a2_11_a_silent_replica_is_unknown_at_the_deadline_and_the_others_done(fleet: Fleet) -> None:
    fleet.targets[1].silent = True
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[0].reach()
    fleet.targets[2].reach()
    await fleet.polls(61.0)
    ended = fleet.conductor.get(operation.id)
    assert ended.state is OperationState.PARTLY_FAILED
    assert [part.stage for part in ended.replicas] == [ReplicaStage.DONE, ReplicaStage.UNKNOWN, ReplicaStage.DONE]


async def test_a2_12_the_same_call_again_is_the_same_operation(fleet: Fleet) -> None:
    first = await fleet.conductor.submit("demo/7", "key-1")
    await fleet.polls(30.0)
    again = await fleet.conductor.submit("demo/7", "key-1")
    unkeyed = await fleet.conductor.submit("demo/7")
    assert first.id == again.id == unkeyed.id
    assert again.state is OperationState.RUNNING
    assert all(target.goals == [7] for target in fleet.targets)
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    assert (await fleet.conductor.submit("demo/7", "key-1")).state is OperationState.SUCCEEDED
    assert (await fleet.conductor.submit("demo/7")).id != first.id
    with pytest.raises(ConflictError, match="key-1"):
        await fleet.conductor.submit("demo/6", "key-1")


async def test_f36_a_newer_hot_load_supersedes_the_running_one(fleet: Fleet) -> None:
    first, second = await asyncio.gather(fleet.conductor.submit("demo/7"), fleet.conductor.submit("demo/8"))
    await fleet.polls()
    assert fleet.conductor.get(first.id).state is OperationState.SUPERSEDED
    for target in fleet.targets:
        assert target.goals[-1] == 8
        target.reach()
    await fleet.polls()
    assert fleet.conductor.get(second.id).state is OperationState.SUCCEEDED
    assert [operation.order.version for operation in fleet.conductor.list()] == [8, 7]


async def test_a_replica_whose_target_was_moved_is_told_again(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[0].change(target=Version(3), version=Version(3), stage="idle")
    await fleet.polls()
    assert fleet.targets[0].goals == [7, 7]
    assert fleet.conductor.get(operation.id).state is OperationState.RUNNING


async def test_a2_16_a_replica_that_cannot_take_a_target_yet_is_waited_for(fleet: Fleet) -> None:
    fleet.targets[0].error = ConflictError("replica r0 is starting")
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    part = fleet.conductor.get(operation.id).replicas[0]
    assert part.stage is ReplicaStage.PENDING
    assert part.error is not None
    assert "starting" in part.error.message
    fleet.targets[0].error = None
    await fleet.polls()
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    assert fleet.conductor.get(operation.id).state is OperationState.SUCCEEDED


async def test_a_refused_key_fails_that_replica_at_once(fleet: Fleet) -> None:
    fleet.targets[2].error = AuthError("no valid key")
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    assert fleet.conductor.get(operation.id).replicas[2].stage is ReplicaStage.FAILED


async def test_cancelling_tells_those_under_way_to_stay(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[0].reach()
    await fleet.polls()
    cancelled = await fleet.conductor.cancel(operation.id)
    assert cancelled.state is OperationState.CANCELLED
    assert [target.goals[-1] for target in fleet.targets] == [7, "stay", "stay"]
    with pytest.raises(ConflictError, match="has ended"):
        await fleet.conductor.cancel(operation.id)
    with pytest.raises(NotFoundError):
        await fleet.conductor.cancel("nothing")


async def test_following_the_head_supersedes_and_lists_who_was_told(fleet: Fleet) -> None:
    operation = await fleet.conductor.submit("demo/7")
    await fleet.polls()
    fleet.targets[1].error = ConflictError("replica r1 is retired")
    members = await fleet.conductor.follow()
    assert fleet.conductor.get(operation.id).state is OperationState.SUPERSEDED
    assert [member.status is not None for member in members] == [True, False, True]
    assert fleet.targets[0].now.mode == "follow"


async def test_an_unknown_snapshot_is_not_found_before_any_replica_is_told(fleet: Fleet) -> None:
    for name in ("demo/99", "other/1"):
        with pytest.raises(NotFoundError):
            await fleet.conductor.submit(name)
    await fleet.polls()
    assert all(not target.goals for target in fleet.targets)
    assert fleet.conductor.list() == ()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a8_04_a_hostile_name_is_refused_and_nothing_is_asked(fleet: Fleet, name: str) -> None:
    with pytest.raises(InvalidInputError):
        await fleet.conductor.submit(name)
    assert fleet.snapshots.asked == 0
    assert all(not target.goals for target in fleet.targets)


async def test_the_history_is_bounded_and_keeps_what_runs() -> None:
    fleet = Fleet(size=1, limits=ConductorLimits(history=3))
    ids = [(await fleet.conductor.submit(f"demo/{number}")).id for number in range(6)]
    assert [operation.id for operation in fleet.conductor.list()] == ids[:2:-1]
    with pytest.raises(NotFoundError):
        fleet.conductor.get(ids[0])
    await fleet.conductor.close()


@pytest.mark.parametrize("turns", range(12))
async def test_closing_at_any_moment_leaves_no_task_and_the_operation_open(turns: int) -> None:
    fleet = Fleet()
    await fleet.conductor.submit("demo/7")
    for _ in range(turns):
        await asyncio.sleep(0)
    await fleet.conductor.close()
    await fleet.conductor.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert [operation.ended for operation in fleet.conductor.list()] == [False]


async def test_a_bucket_manifest_that_is_another_ones_is_corrupt() -> None:
    bucket = MemoryBucket()
    bucket.put(manifest_key(RunId("demo"), Version(0)), b"{}")
    with pytest.raises(CorruptError):
        BucketSnapshots(bucket, RunId("demo")).find(Version(0))
    with pytest.raises(NotFoundError) as missing:
        BucketSnapshots(bucket, RunId("demo")).find(Version(4))
    assert str(missing.value) == "there is no snapshot demo/4"


@pytest.mark.parametrize(
    ("hint", "committed", "newest"),
    [
        (None, [], None),
        (None, [0, 1, 2], 2),
        (b'{"version": 5}', [5, 6], 6),
        (b'{"version": 1}', [0, 1, 2], 2),
        (b'{"version": 9}', [0, 1], 1),
        (b'{"version": -1}', [0], 0),
        (b"[" * 4000, [0], 0),
        (b" " * 5000, [0], 0),
    ],
)
def test_the_newest_version_is_found_from_the_hint_and_without_it(
    hint: bytes | None, committed: list[int], newest: int | None
) -> None:
    bucket = MemoryBucket()
    if hint is not None:
        bucket.put(head_key(RunId("demo")), hint)
    for version in committed:
        bucket.put(manifest_key(RunId("demo"), Version(version)), b"" if version == 1 else b"{}")
    assert BucketSnapshots(bucket, RunId("demo")).newest() == newest


async def test_an_unknown_snapshot_names_the_newest_one_and_not_a_file(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError) as missing:
        await fleet.conductor.submit("demo/99")
    assert str(missing.value) == "there is no snapshot demo/99 (the newest is demo/8)"
    monkeypatch.setattr(fleet.snapshots, "newest", lambda: None)
    with pytest.raises(NotFoundError, match="no version of demo is committed yet"):
        await fleet.conductor.submit("demo/99")

    def away() -> None:
        raise UnavailableError("the store is away")

    monkeypatch.setattr(fleet.snapshots, "newest", away)
    with pytest.raises(NotFoundError) as missing:
        await fleet.conductor.submit("demo/99")
    assert str(missing.value) == "there is no snapshot demo/99"
