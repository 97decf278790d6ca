"""What a replica's swaps do with answers in flight, and what is looked at before a version counts as served."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from replica_rig import SPECS, Rig, request, until, weights_at

from slackwater.checkpoint.canary import Canary
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import Engine
from slackwater.errors import SlackwaterError, UnavailableError, UnsupportedError
from slackwater.ids import Version
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.status import State
from slackwater.replica.swap import Stage
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Completion, Finish, collect, kv_spans
from slackwater.rollout.request import PolicyConstraint
from slackwater.testing.engine import TableEngine

OpenRig = Callable[..., Rig]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[OpenRig]:
    rigs: list[Rig] = []

    def open_rig(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        for engine in rig.engines:
            engine.release()
        await rig.close()


async def whole(answer: Answer) -> Completion:
    steps = [step async for step in answer]
    return collect(answer.origin, steps, answer.finish)


async def begun(rig: Rig, tokens: int = 4, **asked: object) -> Answer:
    """An answer with one token, in an engine that stands still."""
    rig.engine.hold()
    answer = await rig.replica.complete(request(tokens, **asked))  # type: ignore[arg-type]
    rig.engine.release(1)
    await until(lambda: rig.engine._steps_allowed == 0)
    return answer


async def canary_of(step: int, tolerance: float = 0.001) -> Canary:
    """What a table engine with the weights of a step makes of a prompt."""
    engine = TableEngine(weights_at(step), SPECS)
    answer = await whole(await engine.generate(request(3, prompt=(5, 6))))
    await engine.close()
    return Canary(prompt=(5, 6), tokens=answer.token_ids, logprobs=answer.logprobs, tolerance=tolerance)


@pytest.mark.parametrize("mode", [InFlight.CONTINUE, InFlight.RECOMPUTE])
async def test_answers_go_on_and_say_who_built_their_kv(opened: OpenRig, mode: InFlight) -> None:
    rig = await opened(in_flight=mode).start()
    answer = await begun(rig)
    rig.publish()
    await rig.follow()
    rig.engine.release()
    steps = (await whole(answer)).steps
    assert [step.version for step in steps] == [0, 1, 1, 1]
    built = [(span.version, span.start, span.end) for span in kv_spans(3, steps)]
    assert built == ([(0, 0, 3), (1, 3, 6)] if mode is InFlight.CONTINUE else [(1, 0, 6)])


async def test_f38_abort_gives_every_token_so_far(opened: OpenRig) -> None:
    rig = await opened(in_flight=InFlight.ABORT).start()
    answer, waiting = await begun(rig), await rig.replica.complete(request(2, name="later"))
    rig.publish()
    report = (await rig.follow()).swaps[-1]
    rig.engine.release()
    cut, later = await whole(answer), await whole(waiting)
    assert (len(cut.steps), cut.finish, report.ended) == (1, Finish.SWAPPED, 1)
    assert [step.version for step in later.steps] == [1, 1]


async def test_f38_drain_lets_everyone_finish_on_the_old_version(opened: OpenRig) -> None:
    rig = await opened(in_flight=InFlight.DRAIN).start()
    answer, waiting = await begun(rig), await rig.replica.complete(request(2, name="later"))
    rig.publish()
    await rig.clock.advance(0.2)
    await until(lambda: rig.replica.status().stage is Stage.DRAINING)
    rig.engine.release()
    first, later = await whole(answer), await whole(waiting)
    assert (first.finish, {step.version for step in first.steps}) == (Finish.LENGTH, {0})
    assert {step.version for step in later.steps} == {1}
    await until(lambda: rig.replica.status().version == 1)


async def test_a2_19_a_drain_for_an_answer_that_never_ends_is_over_at_its_limit(
    opened: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await opened(in_flight=InFlight.DRAIN, limits=ExchangeLimits(drain_s=50.0, threads=1)).start()
    answer = await begun(rig, tokens=4, name="endless")
    rig.publish()
    await rig.clock.advance(0.2)
    await until(lambda: rig.replica.status().stage is Stage.DRAINING)
    await rig.clock.advance(50.0)
    caplog.set_level("INFO")
    cut = await whole(answer)
    assert (cut.finish, len(cut.steps)) == (Finish.SWAPPED, 1)
    assert "request endless after 1 tokens" in caplog.text
    await until(lambda: rig.replica.status().version == 1)


async def test_a_newer_target_ends_a_drain_and_those_who_wait_get_their_turn(opened: OpenRig) -> None:
    rig = await opened().start()
    answer, waiting = await begun(rig), await rig.replica.complete(request(2, name="later"))
    rig.publish()
    await rig.replica.set_target(Version(1), InFlight.DRAIN)
    await until(lambda: rig.replica.status().stage is Stage.DRAINING)
    await rig.replica.set_target(Version(0))
    await until(lambda: rig.replica.status().stage is Stage.IDLE)
    rig.engine.release()
    assert {step.version for one in (answer, waiting) for step in (await whole(one)).steps} == {0}
    assert rig.replica.status().swap_mode is InFlight.CONTINUE


async def test_a_target_that_moves_as_a_drain_ends_leaves_nobody_waiting(
    opened: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await opened().start()
    drain = rig.engine.drain

    async def drained_as_the_target_moves() -> None:
        await drain()
        await rig.replica.set_target(Version(0))

    monkeypatch.setattr(rig.engine, "drain", drained_as_the_target_moves)
    rig.publish()
    await rig.replica.set_target(Version(1), InFlight.DRAIN)
    assert (await rig.replica.settled()).version == 0
    answer = await whole(await rig.replica.complete(request(2)))
    assert [step.version for step in answer.steps] == [0, 0]


async def test_an_exact_version_is_served_whole_by_a_drain(opened: OpenRig) -> None:
    rig = await opened(in_flight=InFlight.DRAIN).start()
    exact = PolicyConstraint(exact_version=Version(0))
    answer = await begun(rig, policy=exact)
    rig.publish()
    await rig.clock.advance(0.2)
    await until(lambda: rig.replica.status().stage is Stage.DRAINING)
    rig.engine.release()
    assert (await whole(answer)).finish is Finish.LENGTH


async def test_a_roll_back_does_not_wait_for_a_drain(opened: OpenRig) -> None:
    rig = await opened(in_flight=InFlight.DRAIN).start(versions=2)
    await rig.replica.set_target(Version(0))
    rig.publish()
    await rig.replica.set_target(Version(2))
    await rig.replica.settled()
    answer = await begun(rig)
    await rig.replica.roll_back()
    assert (await whole(answer)).finish is Finish.SWAPPED


async def test_strict_puts_a_spoilt_commit_back_before_a_token_is_made(opened: OpenRig) -> None:
    rig = await opened(limits=ExchangeLimits(strict=True, threads=1)).start()
    answer = await begun(rig, tokens=8)
    rig.publish()
    rig.engine.faults.flip_bit = True
    await rig.clock.advance(0.2)
    await until(lambda: rig.replica.status().waiting)
    status = rig.replica.status()
    assert (status.version, status.state, status.provisional) == (0, State.SERVING, False)
    assert status.last_error is not None
    assert "a.weight, tile 0" in status.last_error.message
    assert rig.holds(0)
    rig.engine.release()
    done = await whole(answer)
    assert {step.version for step in done.steps} == {0}
    assert not any(step.provisional for step in done.steps)


async def test_strict_versions_are_never_provisional(opened: OpenRig) -> None:
    rig = await opened(limits=ExchangeLimits(strict=True, threads=1)).start()
    answer = await begun(rig)
    rig.publish()
    await rig.follow()
    rig.engine.release()
    assert [(step.version, step.provisional) for step in (await whole(answer)).steps] == [(0, False)] + [(1, False)] * 3


@pytest.mark.parametrize("strict", [False, True])
async def test_tokens_before_everything_is_looked_at_say_so(opened: OpenRig, strict: bool) -> None:
    rig = await opened(limits=ExchangeLimits(strict=strict, threads=1)).start()
    answer = await begun(rig, tokens=8)
    rig.publish(canary=await canary_of(1))
    await rig.clock.advance(0.2)
    await until(lambda: rig.engine.stats().active == 2)  # the canary was asked
    steps = aiter(answer)
    got = [await anext(steps)]
    rig.engine.release(1)
    got.append(await anext(steps))
    rig.engine.release(2)
    await until(lambda: not rig.replica.status().provisional)
    rig.engine.release()
    got += [step async for step in steps]
    assert [step.version for step in got] == [0] + [1] * 7
    assert [step.provisional for step in got[:2]] == [False, True]
    assert not any(step.provisional for step in got[4:])


async def test_a1_05_a_canary_that_is_answered_as_expected_confirms_the_version(opened: OpenRig) -> None:
    rig = await opened().start()
    rig.publish(canary=await canary_of(1))
    status = await rig.follow()
    assert (status.version, status.provisional, status.last_error) == (1, False, None)


async def test_a1_05_a_canary_that_is_off_undoes_the_swap_once(opened: OpenRig) -> None:
    rig = await opened().start()
    answer = await begun(rig, tokens=8)
    rig.publish(canary=await canary_of(2))
    await rig.clock.advance(0.2)
    await until(lambda: rig.engine.stats().active == 2)  # the canary was asked
    rig.engine.release(3)
    await until(lambda: rig.replica.status().waiting)
    status = rig.replica.status()
    assert (status.version, status.state) == (0, State.SERVING)
    assert status.last_error is not None
    assert (status.last_error.kind, "the canary's token 1 of 3" in status.last_error.message) == ("canary", True)
    with pytest.raises(UnavailableError, match="taken back"):
        await whole(answer)
    rig.engine.release()
    commits = rig.engine.commits
    await rig.clock.advance(300.0)
    assert rig.engine.commits == commits
    rig.publish(canary=await canary_of(2))
    await rig.clock.advance(0.5)
    await until(lambda: rig.replica.status().version == 2)
    assert rig.holds(2)


async def test_a_canary_of_ids_that_the_model_lacks_undoes_the_swap(opened: OpenRig) -> None:
    rig = await opened().start()
    rig.publish(canary=Canary(prompt=(4999, 5000), tokens=(1,), logprobs=(-1.5,)))
    status = await rig.follow()
    assert (status.version, status.last_error and status.last_error.kind) == (0, "canary")


async def test_a_canary_that_waits_for_a_slot_undoes_nothing_and_is_warned_of(
    opened: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await opened(limits=ExchangeLimits(canary_s=20.0, threads=1)).start()
    busy = [await begun(rig, tokens=9, name=f"busy {number}") for number in range(4)]
    rig.publish(canary=await canary_of(1))
    await rig.clock.advance(0.2)
    await until(lambda: rig.engine.stats().waiting == 1)
    for _ in range(5):
        await rig.clock.advance(20.0)
    await until(lambda: "the canary of version 1 still waits" in caplog.text)
    assert (rig.replica.status().version, rig.replica.status().provisional) == (1, True)
    rig.engine.release()
    assert {(await whole(answer)).finish for answer in busy} == {Finish.LENGTH}
    await until(lambda: not rig.replica.status().provisional)
    assert rig.replica.status().last_error is None


@pytest.mark.parametrize(("first", "then"), [("continue", "abort"), ("abort", "continue"), ("drain", "abort"),
                                             ("continue", "drain"), ("drain", "continue")])  # fmt: skip
async def test_the_newest_word_about_answers_in_flight_holds_until_the_commit(
    opened: OpenRig, first: str, then: str
) -> None:
    rig = await opened().start()
    answer = await begun(rig)
    rig.publish()
    rig.source.hold()
    await rig.replica.set_target(Version(1), InFlight(first))
    await until(rig.source.fetching.is_set)
    if first == "drain":
        rig.source.go.set()
        await until(lambda: rig.replica.status().stage is Stage.DRAINING)
    await rig.replica.set_target(Version(1), InFlight(then))
    rig.source.go.set()
    if then == "drain":
        await until(lambda: rig.replica.status().stage is Stage.DRAINING)
        rig.engine.release()
    await until(lambda: rig.replica.status().version == 1)
    rig.engine.release()
    done = await whole(answer)
    await until(lambda: bool(rig.replica.status().swaps))
    assert rig.replica.status().swaps[-1].mode is InFlight(then)
    assert done.finish is (Finish.SWAPPED if then == "abort" else Finish.LENGTH)
    assert {step.version for step in done.steps} == ({0, 1} if then == "continue" else {0})


async def test_stay_keeps_what_is_in_place_and_what_is_being_committed(opened: OpenRig) -> None:
    rig = await opened().start(versions=2)
    rig.publish()
    rig.source.hold()
    await rig.replica.set_target("head")
    await until(rig.source.fetching.is_set)
    status = await rig.replica.set_target("stay")
    rig.source.go.set()
    assert (status.target, status.mode.value) == (1, "manual")
    await until(lambda: rig.replica.status().stage is Stage.IDLE)
    rig.engine.faults.stall = True
    await rig.replica.set_target(Version(2))
    await until(lambda: rig.replica.status().stage is Stage.COMMITTING)
    assert (await rig.replica.set_target("stay")).target == 2
    rig.engine.faults.stall = False
    rig.engine.release()
    await until(lambda: rig.replica.status().version == 2)
    assert (await rig.replica.settled()).version == 2


async def test_a_start_leaves_out_a_head_whose_canary_is_off_and_goes_on_with_the_next(opened: OpenRig) -> None:
    rig = opened()
    rig.publish(3)
    rig.publish(canary=await canary_of(0))
    await rig.replica.start()
    assert (rig.replica.state, rig.replica.status().version, rig.replica.status().head) == (State.SERVING, 2, 3)
    commits = rig.engine.commits
    await rig.clock.advance(100.0)
    assert rig.engine.commits == commits
    rig.publish()
    await rig.turn_until(lambda: rig.replica.status().version == 4)
    assert rig.holds(4)


async def test_a_start_leaves_out_an_anchor_whose_canary_is_off(opened: OpenRig) -> None:
    rig = opened()
    rig.publish(2)
    rig.publish(anchor=True, canary=await canary_of(0))
    rig.publish()
    starting = asyncio.ensure_future(rig.replica.start())
    await rig.turn_until(starting.done)
    assert (rig.replica.state, rig.replica.status().version) == (State.SERVING, 1)
    assert rig.opened_at == [2, 0]


async def test_an_anchor_whose_canary_is_off_is_not_served_at_the_start(opened: OpenRig) -> None:
    rig = opened()
    rig.publish(canary=await canary_of(1))
    starting = asyncio.ensure_future(rig.replica.start())
    await until(lambda: rig.replica.status().last_error is not None)
    error = rig.replica.status().last_error
    assert (rig.replica.state, error and error.kind) == (State.STARTING, "canary")
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting


async def test_a_start_that_cannot_pass_a_refused_version_stays_below_it(opened: OpenRig) -> None:
    rig = opened(limits=ExchangeLimits(max_deltas=2, threads=1))
    rig.publish(2)
    rig.publish(canary=await canary_of(0))
    rig.publish(2)
    starting = asyncio.ensure_future(rig.replica.start())
    await rig.turn_until(starting.done)
    assert (rig.replica.state, rig.replica.status().version, rig.engine.commits) == (State.SERVING, 1, 2)


async def test_a_head_that_moves_while_an_anchor_is_refused_does_not_hold_the_start_up(
    opened: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = opened()
    rig.publish(4)
    rig.publish(anchor=True, canary=await canary_of(0))
    rig.publish()
    open_engine = rig.replica._open_engine

    async def open_as_the_trainer_goes_on(folder: Path, version: Version) -> Engine:
        if version == 0:
            rig.publish()
        return await open_engine(folder, version)

    monkeypatch.setattr(rig.replica, "_open_engine", open_as_the_trainer_goes_on)
    starting = asyncio.ensure_future(rig.replica.start())
    await rig.turn_until(starting.done)
    assert (rig.replica.state, rig.replica.status().version, rig.opened_at) == (State.SERVING, 3, [4, 0])


async def test_a_roll_back_does_not_wait_for_a_canary(opened: OpenRig) -> None:
    rig = await opened().start()
    for number in range(4):
        await begun(rig, tokens=9, name=f"busy {number}")
    rig.publish(canary=await canary_of(1))
    await rig.clock.advance(0.2)
    await until(lambda: rig.engine.stats().waiting == 1)
    status = await rig.replica.roll_back()
    assert (status.version, status.state, status.provisional) == (0, State.SERVING, False)


async def test_no_answer_of_spoilt_memory_stands(opened: OpenRig) -> None:
    rig = await opened().start()
    answer = await begun(rig)
    rig.engine.poke("a.weight", 5)
    rig.publish()
    assert (await rig.follow()).state is State.RETIRED
    with pytest.raises(UnavailableError, match="changed by themselves"):
        assert all(step.provisional for step in [step async for step in answer])


async def test_a_newer_version_frees_a_start_from_one_whose_canary_is_off(opened: OpenRig) -> None:
    rig = opened()
    rig.publish(canary=await canary_of(2))
    starting = asyncio.ensure_future(rig.replica.start())
    await until(lambda: rig.replica.status().last_error is not None)
    rig.publish(anchor=True, canary=await canary_of(1))
    await rig.turn_until(starting.done)
    assert (rig.replica.state, rig.replica.status().version) == (State.SERVING, 1)


async def test_memory_that_changes_by_itself_retires_the_replica(opened: OpenRig) -> None:
    rig = await opened(scrub_s=100.0).start()
    answer = await begun(rig)
    rig.engine.poke("b.weight", 3)
    await rig.turn_until(lambda: rig.replica.state is State.RETIRED)
    error = rig.replica.status().last_error
    assert error is not None
    assert "b.weight, tile 0" in error.message
    await until(lambda: answer.finish is Finish.ABORT)
    with pytest.raises(UnavailableError, match="changed by themselves"):
        await whole(answer)
    with pytest.raises(UnavailableError):
        await rig.replica.complete(request())


async def test_scrubbing_goes_on_over_swaps_and_finds_nothing_in_good_weights(opened: OpenRig) -> None:
    rig = await opened(scrub_s=3.0).start()
    for _ in range(4):
        rig.publish()
        await rig.turn_until(lambda: rig.replica.status().version == len(rig.truth) - 1)
        await rig.clock.advance(5.0)
    assert rig.replica.state is State.SERVING


async def test_a2_02_what_an_engine_cannot_do_is_said_and_activates_nothing(opened: OpenRig) -> None:
    rig = await opened().start()
    rig.publish()
    rig.engine.faults.stage = UnsupportedError("this engine can't exchange weights in place")
    status = await rig.follow()
    assert (status.version, status.last_error and status.last_error.kind) == (0, "unsupported")
    with suppress(SlackwaterError):
        await rig.replica.close()
