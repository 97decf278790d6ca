import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from replica_rig import RUN, SPECS, Rig, request, until, weights_at

from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import AuthError, ConflictError, NotFoundError, SwapError, UnavailableError
from slackwater.ids import ObjectDigest, Version
from slackwater.replica.status import Mode, State
from slackwater.replica.swap import Stage
from slackwater.rollout.evidence import Finish, spans
from slackwater.rollout.request import PolicyConstraint
from slackwater.testing.engine import stamp_tokens, weights_stamp


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


async def test_a_replica_boots_on_the_anchor_and_catches_up_before_it_serves(rig: Rig) -> None:
    await rig.start(versions=4)
    status = rig.replica.status()
    assert (status.state, status.version, status.target, status.mode) == (State.SERVING, 3, 3, Mode.FOLLOW)
    assert [(swap.from_version, swap.version, swap.deltas) for swap in status.swaps] == [(0, 3, 3)]
    assert rig.opened_at == [0]
    assert rig.holds(3)


async def test_a7_01_nothing_is_answered_before_the_target_is_reached(rig: Rig) -> None:
    rig.publish(3)
    rig.source.hold()
    starting = asyncio.create_task(rig.replica.start(Version(2)))
    await until(rig.source.fetching.is_set)
    assert rig.replica.state is State.STARTING
    with pytest.raises(UnavailableError, match="starting"):
        await rig.replica.complete(request())
    with pytest.raises(ConflictError, match="starting"):
        await rig.replica.set_target(Version(1))
    rig.source.go.set()
    await starting
    answer = await rig.replica.complete(request())
    assert [step.version async for step in answer] == [2, 2, 2, 2]
    await answer.aclose()


async def test_an_empty_lineage_is_waited_for_and_told_of(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    starting = asyncio.create_task(rig.replica.start())
    await rig.clock.parked()
    await rig.clock.advance(1.0)
    status = rig.replica.status()
    assert (status.version, status.last_error and status.last_error.kind) == (None, "not_found")
    await rig.clock.parked()
    rig.publish()
    await rig.clock.advance(1.0)
    await starting
    assert (rig.replica.status().version, rig.replica.status().last_error) == (0, None)
    said = [record.getMessage() for record in caplog.records if "no version yet" in record.getMessage()]
    assert len(said) == 1, "once, however often it looks"


@pytest.mark.parametrize("error", [NotFoundError("no such bucket"), AuthError("refused")])
async def test_what_cannot_heal_is_raised_at_the_start(rig: Rig, error: Exception) -> None:
    assert isinstance(error, (NotFoundError, AuthError))
    rig.source.errors["head"] = error
    with pytest.raises(type(error)):
        await rig.replica.start()
    assert rig.replica.state is State.CLOSED


async def test_a_bucket_that_does_not_answer_at_the_start_is_asked_again(rig: Rig) -> None:
    rig.publish(2)
    rig.source.errors["bodies"] = UnavailableError("slow down")
    starting = asyncio.create_task(rig.replica.start())
    await rig.clock.parked()
    error = rig.replica.status().last_error
    assert error is not None
    assert error.kind == "unavailable"
    del rig.source.errors["bodies"]
    await rig.clock.advance(1.0)
    await starting
    assert rig.replica.status().version == 1
    assert rig.replica.status().last_error is None


async def test_following_takes_each_new_version_while_answers_go_on(rig: Rig) -> None:
    await rig.start()
    rig.engine.hold()
    answer = await rig.replica.complete(request(6))
    rig.engine.release(2)
    steps = aiter(answer)
    got = [await anext(steps), await anext(steps)]
    rig.publish()
    await rig.follow()
    rig.engine.release()
    got += [step async for step in steps]
    stamps = [weights_stamp(rig.truth[step.version]) for step in got]
    assert [step.version for step in got] == [0, 0, 1, 1, 1, 1]
    assert [step.token_id for step in got] == stamp_tokens((1, 2, 3), stamps)
    assert answer.finish is Finish.LENGTH
    assert rig.replica.status().swaps[-1].in_flight == 1
    await answer.aclose()


async def test_a2_20_spans_say_where_the_swap_fell(rig: Rig) -> None:
    await rig.start("head", versions=1)
    rig.publish(7)
    await rig.replica.set_target(Version(7))
    await rig.replica.settled()
    rig.engine.hold()
    answer = await rig.replica.complete(request(100))
    rig.engine.release(40)
    steps = aiter(answer)
    got = [await anext(steps) for _ in range(40)]
    rig.publish()
    await rig.replica.set_target(Version(8))
    await rig.replica.settled()
    rig.engine.release()
    got += [step async for step in steps]
    assert [(s.version, s.start, s.end) for s in spans(step.version for step in got)] == [(7, 0, 40), (8, 40, 100)]
    await answer.aclose()


async def test_exact_version_ends_at_the_swap_with_its_tokens(rig: Rig) -> None:
    await rig.start()
    rig.engine.hold()
    answer = await rig.replica.complete(request(9, policy=PolicyConstraint(exact_version=Version(0))))
    rig.engine.release(3)
    await until(lambda: rig.engine.stats().active == 1)
    steps = aiter(answer)
    got = [await anext(steps) for _ in range(3)]
    rig.publish()
    await rig.follow()
    got += [step async for step in steps]
    assert [step.version for step in got] == [0, 0, 0]
    assert answer.finish is Finish.POLICY_CHANGED


async def test_f10_a_corrupt_body_leaves_the_old_version_serving(rig: Rig) -> None:
    await rig.start(versions=2)
    rig.publish()
    whole = rig.spoil(2)
    status = await rig.follow()
    assert (status.state, status.version, status.target, status.stage) == (State.SERVING, 1, 2, Stage.IDLE)
    assert status.last_error is not None
    assert status.last_error.kind == "corrupt"
    assert status.waiting
    assert rig.holds(1)
    rig.repair(2, whole)
    await rig.turn_until(lambda: rig.replica.status().version == 2)
    status = await rig.replica.settled()
    assert status.last_error is None
    assert rig.holds(2)


async def test_a1_09_a_version_after_a_failed_one_waits_for_it(rig: Rig) -> None:
    await rig.start(versions=5)
    rig.publish()
    whole = rig.spoil(5)
    await rig.follow()
    rig.publish()
    status = await rig.follow()
    assert (status.version, status.target) == (4, 6)
    answer = await rig.replica.complete(request())
    assert {step.version async for step in answer} == {Version(4)}
    rig.repair(5, whole)
    await rig.turn_until(lambda: rig.replica.status().swaps[-1].version == 6)
    assert [(swap.from_version, swap.version) for swap in rig.replica.status().swaps] == [(0, 4), (4, 6)]
    assert rig.holds(6)


async def test_a1_09_an_anchor_leads_around_a_broken_version(rig: Rig) -> None:
    await rig.start(versions=2)
    rig.publish()
    rig.spoil(2)
    await rig.follow()
    rig.publish(anchor=True)
    rig.publish()
    status = await rig.follow()
    await until(lambda: rig.replica.status().swaps[-1].version == 4)
    assert status.state is State.SERVING
    assert [(swap.version, swap.kind) for swap in rig.replica.status().swaps][-2:] == [(3, "anchor"), (4, "delta")]
    assert rig.holds(4)


@pytest.mark.parametrize("anchor", [False, True])
async def test_a_memory_that_has_changed_by_itself_retires_the_replica_and_is_never_mended_in_silence(
    rig: Rig, anchor: bool
) -> None:
    await rig.start(versions=3)
    answer = await rig.replica.complete(request(4000))
    rig.engine.hold()
    rig.engine.poke("a.weight", 5)
    rig.publish(anchor=anchor)
    status = await rig.follow()
    assert (status.state, status.version, status.stage) == (State.RETIRED, 2, Stage.RETIRED)
    assert status.last_error is not None
    assert (status.last_error.kind, "a.weight" in status.last_error.message) == ("spoilt", True)
    await until(lambda: answer.finish is Finish.ABORT)


@pytest.mark.parametrize("write", [0, 1, 2, 3])
async def test_f33_an_apply_that_raises_anywhere_changes_nothing(rig: Rig, write: int) -> None:
    await rig.start()
    rig.publish()
    rig.engine.faults.commit_at_write = write
    await rig.replica.set_target(Version(1))
    status = await rig.replica.settled()
    assert (status.state, status.version, status.stage) == (State.SERVING, 0, Stage.IDLE)
    assert status.last_error is not None
    assert status.last_error.kind == "swap"
    assert rig.holds(0)
    await rig.replica.set_target(Version(1))
    assert (await rig.replica.settled()).version == 1
    assert rig.holds(1)


async def test_a2_15_a_failing_stage_leaves_the_engine_running(rig: Rig) -> None:
    await rig.start()
    rig.publish()
    rig.engine.faults.stage = SwapError("no memory")
    await rig.replica.set_target(Version(1))
    assert (await rig.replica.settled()).version == 0
    answer = await rig.replica.complete(request())
    assert len([step async for step in answer]) == 4


async def test_f34_an_apply_that_hangs_retires_the_replica_at_its_deadline(rig: Rig) -> None:
    await rig.start()
    rig.engine.hold()
    answer = await rig.replica.complete(request())
    rig.publish()
    rig.engine.faults.stall = True
    await rig.replica.set_target(Version(1))
    await until(lambda: rig.replica.status().stage is Stage.COMMITTING)
    await rig.clock.parked(2)
    await rig.clock.advance(31.0)
    status = await rig.replica.settled()
    assert status.state is State.RETIRED
    assert status.last_error is not None
    assert "did not end" in status.last_error.message
    assert [step async for step in answer] == []
    assert answer.finish is Finish.ABORT
    with pytest.raises(UnavailableError, match="retired"):
        await rig.replica.complete(request())
    with pytest.raises(ConflictError, match="retired"):
        await rig.replica.set_target(Version(0))


async def test_a1_08a_a_bit_flipped_while_applying_is_found_and_undone(rig: Rig) -> None:
    await rig.start()
    rig.publish()
    rig.engine.faults.flip_bit = True
    await rig.replica.set_target(Version(1))
    status = await rig.replica.settled()
    assert (status.state, status.version, status.provisional) == (State.SERVING, 0, False)
    assert status.last_error is not None
    assert status.last_error.kind == "swap"
    assert "a.weight" in status.last_error.message
    assert rig.holds(0)
    assert await rig.replica.weights_digest() == (0, rig.fetcher.manifest(Version(0)).state)


@pytest.mark.parametrize("fault", ["undo", "flip_undo"])
async def test_an_undo_that_fails_retires_the_replica(rig: Rig, fault: str) -> None:
    await rig.start()
    rig.publish()
    rig.engine.faults.flip_bit = True
    setattr(rig.engine.faults, fault, True)
    await rig.replica.set_target(Version(1))
    assert (await rig.replica.settled()).state is State.RETIRED
    with pytest.raises(UnavailableError):
        await rig.replica.complete(request())


async def test_a1_13_another_shape_is_refused_before_a_byte_is_fetched(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.start(versions=2)
    before = len(rig.source.fetched)
    wide = dict(SPECS) | {"a.weight": TensorSpec(name="a.weight", dtype="BF16", shape=(128, 4))}
    rig.engine._specs = wide
    rig.source.errors["anchor"] = UnavailableError("an anchor that does not fit is not asked for")
    rig.publish(anchor=True)
    await rig.replica.set_target(Version(2))
    status = await rig.replica.settled()
    assert status.last_error is not None
    assert status.last_error.kind == "conflict"
    assert "a.weight" in status.last_error.message
    assert len(rig.source.fetched) == before
    assert (rig.engine.commits, status.version) == (1, 1)
    await rig.close()


async def test_an_anchor_with_another_config_is_refused_and_the_old_version_serves(rig: Rig) -> None:
    await rig.start()
    assert rig.replica._exchange is not None
    rig.replica._exchange._laying._side_files = {"config.json": ObjectDigest("another")}
    rig.publish(anchor=True)
    await rig.replica.set_target(Version(1))
    status = await rig.replica.settled()
    assert status.last_error is not None
    assert (status.last_error.kind, status.version, status.state) == ("conflict", 0, State.SERVING)


async def test_a1_15_the_same_target_twice_is_no_new_work(rig: Rig) -> None:
    await rig.start()
    rig.publish(2)
    await rig.replica.set_target(Version(2))
    await rig.replica.settled()
    commits, digest = rig.engine.commits, rig.replica.status().state_digest
    await rig.replica.set_target(Version(2))
    status = await rig.replica.settled()
    assert (rig.engine.commits, status.state_digest) == (commits, digest)


async def test_f36_the_newest_target_wins_and_nothing_overtakes_it(rig: Rig) -> None:
    await rig.start()
    rig.publish(2)
    rig.source.hold()
    first = asyncio.create_task(rig.replica.set_target(Version(1)))
    second = asyncio.create_task(rig.replica.set_target(Version(2)))
    await asyncio.gather(first, second)
    rig.source.go.set()
    status = await rig.replica.settled()
    assert (status.version, status.target) == (2, 2)
    assert rig.holds(2)


async def test_a_newer_target_ends_an_exchange_that_does_not_lead_there(rig: Rig) -> None:
    await rig.start()
    rig.publish(2)
    await rig.replica.set_target(Version(1))
    await rig.replica.settled()
    rig.source.hold()
    await rig.replica.set_target(Version(2))
    await until(rig.source.fetching.is_set)
    await rig.replica.set_target(Version(1))
    status = await rig.replica.settled()
    assert (status.version, status.stage, status.last_error) == (1, Stage.IDLE, None)
    assert rig.engine.commits == 1


async def test_an_older_target_is_reached_through_its_anchor(rig: Rig) -> None:
    await rig.start(versions=5)
    await rig.replica.set_target(Version(2))
    status = await rig.replica.settled()
    assert (status.version, status.mode) == (2, Mode.MANUAL)
    assert rig.holds(2)


async def test_a_roll_back_undoes_the_last_commit_and_stays(rig: Rig) -> None:
    await rig.start(versions=2)
    rig.publish()
    await rig.follow()
    status = await rig.replica.roll_back()
    assert (status.version, status.mode, status.swaps[-1].kind) == (1, Mode.MANUAL, "rollback")
    assert rig.holds(1)
    with pytest.raises(ConflictError, match="no commit to undo"):
        await rig.replica.roll_back()
    rig.publish()
    await rig.clock.advance(5.0)
    assert rig.replica.status().version == 1
    await rig.replica.set_target("head")
    assert (await rig.replica.settled()).version == 3
    assert rig.holds(3)


async def test_an_uncommitted_target_is_refused_and_nothing_changes(rig: Rig) -> None:
    await rig.start(versions=2)
    with pytest.raises(NotFoundError, match="no version 9"):
        await rig.replica.set_target(Version(9))
    assert rig.replica.status().target == 1
    assert rig.replica.status().mode is Mode.FOLLOW


async def test_a_delta_without_changes_still_moves_the_label(rig: Rig) -> None:
    await rig.start()
    rig.publish(weights=weights_at(0))
    await rig.follow()
    assert rig.replica.status().version == 1
    answer = await rig.replica.complete(request(1))
    assert [step.version async for step in answer] == [1]


async def test_the_weights_digest_is_computed_from_the_engines_memory(rig: Rig) -> None:
    await rig.start(versions=3)
    manifest = rig.fetcher.manifest(Version(2))
    assert await rig.replica.weights_digest() == (2, manifest.state)
    rig.engine.poke("b.weight", 3)
    version, digest = await rig.replica.weights_digest()
    assert version == 2
    assert digest != manifest.state


async def test_a_head_that_cannot_be_seen_does_not_stop_the_service(rig: Rig) -> None:
    await rig.start()
    await rig.clock.parked()
    rig.bucket.delete(f"{RUN}/head.json")
    rig.publish()
    await rig.follow()
    assert rig.replica.status().version == 1


async def test_an_engine_that_died_is_not_served_from(rig: Rig) -> None:
    await rig.start()
    await rig.engine.close()
    assert rig.replica.state is State.RETIRED
    with pytest.raises(UnavailableError, match="retired"):
        await rig.replica.complete(request())


async def test_close_ends_every_task_and_the_engine_twice_over(rig: Rig) -> None:
    await rig.start()
    await rig.replica.close()
    await rig.replica.close()
    assert rig.engine.closed
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("replica-")]
    with pytest.raises(UnavailableError, match="closed"):
        await rig.replica.complete(request())


async def test_a_bug_in_a_task_retires_the_replica_and_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.start()
    rig.publish()
    monkeypatch.setattr(rig.engine, "tensors", lambda: 1 / 0)
    await rig.replica.set_target(Version(1))
    status = await rig.replica.settled()
    await until(lambda: rig.replica.state is State.RETIRED)
    assert rig.replica.status().last_error is not None
    assert status.version == 0


async def _inline(call: object, /, *args: object, **kwargs: object) -> object:
    await asyncio.sleep(0)
    assert callable(call)
    return call(*args, **kwargs)


@pytest.mark.parametrize("turns", range(0, 60, 2))
async def test_closing_at_any_await_of_an_exchange_never_mixes_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", _inline)
    rig = Rig(tmp_path)
    await rig.start()
    rig.publish()
    await rig.replica.set_target(Version(1))
    for _ in range(turns):
        await asyncio.sleep(0)
    await rig.replica.close()
    assert rig.holds(rig.engine.stats().version)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_cancelling_a_start_closes_what_it_opened(rig: Rig) -> None:
    rig.publish(2)
    rig.source.hold()
    starting = asyncio.create_task(rig.replica.start())
    await until(rig.source.fetching.is_set)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert rig.replica.state is State.CLOSED
    assert rig.engine.closed


async def test_an_engine_that_holds_other_bits_than_the_anchor_never_serves(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.publish()
    inner = rig.replica._open_engine

    async def open_wrong(folder: Path, version: Version) -> object:
        engine = await inner(folder, version)
        if len(rig.engines) == 1:
            rig.engine.poke("c.bias", 1)
        return engine

    monkeypatch.setattr(rig.replica, "_open_engine", open_wrong)
    starting = asyncio.create_task(rig.replica.start())
    await rig.clock.parked()
    error = rig.replica.status().last_error
    assert error is not None
    assert error.kind == "corrupt"
    assert rig.engines[0].closed
    await rig.clock.advance(1.0)
    await starting
    assert rig.holds(0)


def test_the_rig_changes_few_elements_per_step() -> None:
    changed = sum(int(np.count_nonzero(weights_at(1)[name] != weights_at(0)[name])) for name in SPECS)
    assert 0 < changed < 12


async def test_f16_a_bucket_that_was_set_back_is_told_and_changes_nothing(rig: Rig) -> None:
    await rig.start(versions=4)
    for version in (2, 3):
        rig.bucket.delete(manifest_key(RUN, Version(version)))
    await rig.turn_until(lambda: rig.replica.status().receded)
    status = rig.replica.status()
    assert (status.version, status.target, status.head, status.state) == (3, 3, 3, State.SERVING)
    await rig.replica.set_target(Version(1))
    assert (await rig.replica.settled()).version == 1


async def test_f19_a_bucket_that_does_not_answer_is_told_and_the_version_serves_on(rig: Rig) -> None:
    await rig.start()
    away = UnavailableError("the store is away")
    look, rig.fetcher.look = rig.fetcher.look, Mock(side_effect=away)  # type: ignore[method-assign]
    await rig.turn_until(lambda: rig.replica.status().trouble != "")
    assert (rig.replica.status().trouble, rig.replica.state) == (str(away), State.SERVING)
    rig.fetcher.look = look  # type: ignore[method-assign]
    await rig.turn_until(lambda: rig.replica.status().trouble == "")
