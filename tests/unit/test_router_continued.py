"""A5-10: an answer whose replica is lost goes on elsewhere, and is what it would have been."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from typing import Final

import pytest
from replica_rig import SPECS, weights_at

from slackwater.errors import (
    ContextLengthError,
    OverloadedError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.ids import BootId, ReplicaId, RequestId, StateDigest, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Completion, Finish, Origin, PolicySpan, TokenStep, kv_spans
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.rollout.routes import Routing
from slackwater.router.policy import Health
from slackwater.router.pool import ProbeReport
from slackwater.router.router import Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableAnswer, TableCompleter
from slackwater.testing.conformance_completer import REQUEST, answer
from slackwater.testing.history import Accepted, Ended, Event, Labelled, Published, Sampled, check
from slackwater.testing.stamp import StampEngine, weights_mark

A, B, C, D = (ReplicaId(name) for name in "abcd")
LOST: Final = ReplicaLostError("gone")
BOTH: Final = pytest.mark.parametrize("streamed", [False, True])
Fleet = dict[ReplicaId, "LocalReplica"]


class LocalReplica(TableCompleter):
    """An anchored table completer that answers probes."""

    def __init__(self, name: str, *, run: str = "demo", window: int = 256) -> None:
        rows = [[((token * 5 + row) % 7) / 3 for token in range(8)] for row in range(3)]
        super().__init__(rows, replica=name, boot=f"boot-{name}", run=run, window=window, anchored=True)

        self.seed += sum(map(ord, name))
        self.admission: asyncio.Event | None = None
        """None: nothing holds a request back."""
        self.asked = asyncio.Event()

    async def complete(self, request: CompletionRequest) -> TableAnswer:
        self.asked.set()
        if self.admission is not None:
            await self.admission.wait()
        return await super().complete(request)

    async def probe(self) -> ProbeReport:
        return ProbeReport(status="serving", version=self.versions[0], window=self.window())

    async def aclose(self) -> None:
        assert self.active == 0


@pytest.fixture
async def fleet() -> Fleet:
    return {name: LocalReplica(name) for name in (A, B, C)}


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Router]:
    async with Router(fleet, clock=ManualClock()) as opened:
        yield opened
        assert opened.statistics().in_flight == 0


def asking(*, streamed: bool, **fields: object) -> CompletionRequest:
    return replace(REQUEST, streamed=streamed, **fields)  # type: ignore[arg-type]


async def undisturbed(request: CompletionRequest, by: ReplicaId = A) -> Completion:
    return await answer(LocalReplica(by), request)


def shares(whole: Completion) -> list[tuple[str, int, int]]:
    assert all(span.boot == f"boot-{span.replica}" for span in whole.replicas)
    return [(span.replica, span.start, span.end) for span in whole.replicas]


def drawn(whole: Completion) -> list[TokenStep]:
    """Its tokens, without what tells of the move."""
    return [replace(step, moved=None, kv=()) for step in whole.steps]


async def read(under_way: Answer) -> tuple[list[int], SlackwaterError | None]:
    """The tokens that a reader gets, and how that ends."""
    ids: list[int] = []
    try:
        async for step in under_way:
            ids.append(step.token_id)  # noqa: PERF401  # what came before an error counts
    except SlackwaterError as error:
        return ids, error
    finally:
        await under_way.aclose()
    return ids, None


@BOTH
@pytest.mark.parametrize("made", range(6))
@pytest.mark.parametrize("seed", [None, 5])
async def test_a5_10_it_goes_on_as_if_nothing_had_happened(
    router: Router, fleet: Fleet, made: int, seed: int | None, *, streamed: bool
) -> None:
    request = asking(streamed=streamed, sampling=replace(REQUEST.sampling, seed=seed))
    fleet[A].fail_after(made, LOST)
    whole = await answer(router, request)
    begun = A if made else B
    alone = await undisturbed(request, begun)
    assert drawn(whole) == list(alone.steps)
    assert whole.finish is Finish.LENGTH
    assert (whole.origin.seed, whole.origin.replica) == (alone.origin.seed, begun)
    assert shares(whole) == ([("a", 0, made), ("b", made, 6)] if made else [("b", 0, 6)])
    assert [(step.moved.replica if step.moved else "") for step in whole.steps] == [
        "b" if made and at == made else "" for at in range(6)
    ]
    assert kv_spans(3, whole.steps) == (PolicySpan(version=Version(7), start=0, end=8),)
    assert (router.statistics().retries, router.statistics().losses) == (1, 1)
    assert router.members()[A].health is Health.SUSPECT


@BOTH
@pytest.mark.parametrize("made", [1, 3, 5])
async def test_a5_10_penalties_and_min_tokens_go_on_too(
    router: Router, fleet: Fleet, made: int, *, streamed: bool
) -> None:
    drawing = replace(
        REQUEST.sampling,
        presence_penalty=1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.3,
        min_tokens=4,
        stop_token_ids=(1, 2),
        sampling_mask=True,
        raw_logprobs=True,
    )
    request = asking(streamed=streamed, sampling=drawing)
    fleet[A].fail_after(made, LOST)
    whole = await answer(router, request)
    alone = await undisturbed(request)
    assert drawn(whole) == list(alone.steps)
    assert len(alone.steps) >= 4


@BOTH
async def test_one_lost_twice_goes_on_twice(router: Router, fleet: Fleet, *, streamed: bool) -> None:
    fleet[A].fail_after(2, LOST)
    fleet[B].fail_after(3, LOST)
    whole = await answer(router, asking(streamed=streamed))
    assert drawn(whole) == list((await undisturbed(REQUEST)).steps)
    assert shares(whole) == [("a", 0, 2), ("b", 2, 5), ("c", 5, 6)]


@BOTH
async def test_attempts_are_bounded_over_all_its_replicas(router: Router, fleet: Fleet, *, streamed: bool) -> None:
    for one in fleet.values():
        one.fail_after(1, LOST)
    fleet[D] = LocalReplica(D)
    router.add(D, fleet[D])
    await router.probe(D)
    router._pool._members[D] = replace(router.members()[D], foreign=99)
    ids, error = await read(await router.complete(asking(streamed=streamed)))
    assert isinstance(error, ReplicaLostError)
    assert ids == list((await undisturbed(REQUEST)).token_ids[:3]) * streamed
    assert [len(one.requests) for one in fleet.values()] == [1, 1, 1, 0]


@BOTH
async def test_forced_tokens_are_each_scored_once(router: Router, fleet: Fleet, *, streamed: bool) -> None:
    request = asking(streamed=streamed, forced_ids=(4, 0, 6, 6, 1))
    fleet[A].fail_after(3, LOST)
    whole = await answer(router, request)
    assert drawn(whole) == list((await undisturbed(request)).steps)
    assert (whole.token_ids, whole.finish) == ((4, 0, 6, 6, 1), Finish.STOP)
    assert fleet[B].requests[0].forced_ids == (6, 1)


@BOTH
async def test_a_stop_token_and_the_window_end_it_where_they_would_have(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    fleet[A].fail_after(2, LOST)
    ids = (await undisturbed(REQUEST)).token_ids
    stop = next(token for at, token in enumerate(ids) if at >= 2 and token not in ids[:at])
    sampling = replace(REQUEST.sampling, stop_token_ids=(stop,))
    whole = await answer(router, asking(streamed=streamed, sampling=sampling))
    assert (whole.token_ids, whole.finish) == (ids[: ids.index(stop) + 1], Finish.STOP)
    fleet[A]._window = fleet[B]._window = fleet[C]._window = 8
    fleet[B].fail_after(2, LOST)
    whole = await answer(router, asking(streamed=streamed))
    assert (whole.token_ids, whole.finish) == (ids[:5], Finish.LENGTH)


@BOTH
async def test_versions_do_not_fall(router: Router, fleet: Fleet, *, streamed: bool) -> None:
    fleet[A].versions, fleet[B].versions, fleet[C].versions = (Version(8),), (Version(7),), (Version(9),)
    for name in fleet:
        await router.probe(name)
    fleet[A].fail_after(2, LOST)
    whole = await answer(router, asking(streamed=streamed, policy=PolicyConstraint(min_version=Version(3))))
    assert [(span.version, span.start, span.end) for span in whole.policy] == [(8, 0, 2), (9, 2, 6)]
    assert kv_spans(3, whole.steps) == (PolicySpan(version=Version(9), start=0, end=8),)
    assert shares(whole) == [("a", 0, 2), ("c", 2, 6)]
    assert fleet[B].requests == []


@BOTH
async def test_an_exact_version_is_gone_on_with_by_who_holds_it(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    fleet[B].versions = (Version(8),)
    await router.probe(B)
    fleet[A].fail_after(2, LOST)
    exact = asking(streamed=streamed, policy=PolicyConstraint(exact_version=Version(7)))
    whole = await answer(router, exact)
    assert shares(whole) == [("a", 0, 2), ("c", 2, 6)]
    fleet[C].fail_after(2, LOST)
    ids, error = await read(await router.complete(exact))
    assert (len(ids), type(error)) == (4 * streamed, ReplicaLostError)


async def test_where_nobody_may_go_on_a_stream_is_lost_and_a_whole_answer_begins_again(
    router: Router, fleet: Fleet
) -> None:
    fleet[A].versions = (Version(8),)
    await router.probe(A)
    fleet[A].fail_after(2, LOST)
    newest = asking(streamed=True)
    ids, error = await read(await router.complete(newest))
    assert (len(ids), type(error)) == (2, ReplicaLostError)
    await router.probe(A)
    for name in (B, C):
        router._pool._members[name] = replace(router.members()[name], foreign=9)
    whole = await answer(router, asking(streamed=False))
    assert [(span.version, span.start, span.end) for span in whole.policy] == [(7, 0, 6)]
    assert shares(whole) == [("b", 0, 6)]
    assert whole.origin.replica == B
    assert not any(step.kv or step.moved for step in whole.steps)


@BOTH
@pytest.mark.parametrize(
    "refusal",
    [
        OverloadedError("full"),
        UnavailableError("starting"),
        PolicyUnmetError("swapped meanwhile", versions=(8,)),
        ContextLengthError("its window is smaller"),
    ],
    ids=lambda error: error.kind,
)
async def test_who_cannot_go_on_with_it_is_passed_over_and_to_blame_for_nothing(
    router: Router, fleet: Fleet, refusal: SlackwaterError, *, streamed: bool
) -> None:
    request = asking(streamed=streamed)
    fleet[A].fail_after(2, LOST)
    fleet[B].admission_error = refusal
    assert shares(await answer(router, request)) == [("a", 0, 2), ("c", 2, 6)]
    assert (router.members()[B].health, router.statistics().losses) == (Health.GOOD, 1)
    fleet[C].admission_error = refusal
    await router.probe(A)
    for name in (B, C):
        router._pool._members[name] = replace(router.members()[name], foreign=9)
    _, error = await read(await router.complete(request))
    assert isinstance(error, ReplicaLostError)


@BOTH
async def test_one_that_fails_before_it_went_on_leaves_the_tokens_so_far(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    fleet[A].fail_after(2, LOST)
    fleet[B].fail_after(0, UnavailableError("version 7 was taken back"))
    whole = await answer(router, asking(streamed=streamed))
    assert shares(whole) == [("a", 0, 2), ("c", 2, 6)]
    assert drawn(whole) == list((await undisturbed(REQUEST)).steps)


@BOTH
async def test_tokens_that_are_taken_back_after_a_move_are_not_gone_on_from(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    fleet[A].fail_after(2, LOST)
    fleet[B].fail_after(2, UnavailableError("version 7 was taken back"))
    under_way = await router.complete(asking(streamed=streamed))
    ids, error = await read(under_way)
    assert (len(ids), str(error)) == ((4, "version 7 was taken back") if streamed else (6, "None"))
    assert under_way.origin.replica == (A if streamed else C)


@pytest.mark.parametrize(("first", "kept"), [(0, 0), (2, 2)])
async def test_a_whole_answer_goes_on_from_its_last_confirmed_token(
    router: Router, fleet: Fleet, first: int, kept: int
) -> None:
    fleet[A].provisional = range(first, 4)
    fleet[A].fail_after(4, LOST)
    whole = await answer(router, asking(streamed=False))
    assert shares(whole) == ([("a", 0, kept), ("b", kept, 6)] if kept else [("b", 0, 6)])
    assert whole.origin.replica == (A if kept else B)
    assert not any(step.provisional for step in whole.steps)
    assert drawn(whole) == list((await undisturbed(REQUEST)).steps)


async def test_a_stream_that_passed_on_unconfirmed_tokens_is_lost(router: Router, fleet: Fleet) -> None:
    fleet[A].provisional = (1, 2)
    fleet[A].fail_after(3, LOST)
    ids, error = await read(await router.complete(asking(streamed=True)))
    assert (len(ids), type(error)) == (3, ReplicaLostError)
    assert (router.statistics().losses, fleet[B].requests) == (1, [])


@BOTH
async def test_one_of_another_run_does_not_go_on_with_it(router: Router, fleet: Fleet, *, streamed: bool) -> None:
    fleet[B] = LocalReplica("b", run="another")
    await router.remove(B)
    router.add(B, fleet[B])
    await router.probe(B)
    fleet[A].fail_after(2, LOST)
    router._pool._members[C] = replace(router.members()[C], foreign=9)
    assert shares(await answer(router, asking(streamed=streamed))) == [("a", 0, 2), ("c", 2, 6)]
    assert (len(fleet[B].requests), fleet[B].active) == (1, 0)


@BOTH
async def test_what_the_next_replica_says_of_its_kv_is_what_counts(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    told = (PolicySpan(version=Version(5), start=0, end=4), PolicySpan(version=Version(7), start=4, end=5))
    fleet[A].fail_after(2, LOST)
    fleet[B].kv = {0: told}
    whole = await answer(router, asking(streamed=streamed, policy=PolicyConstraint(any_kv=True)))
    assert fleet[B].requests[0].policy.any_kv
    assert whole.steps[2].kv == told
    assert whole.origin.prompt_version == 7


async def test_closing_while_it_moves_ends_it(router: Router, fleet: Fleet) -> None:
    fleet[A].fail_after(2, LOST)
    fleet[B].hold()
    under_way = await router.complete(asking(streamed=True))
    reading = asyncio.create_task(read(under_way))
    await fleet[B].until_active(1)
    await under_way.aclose()
    fleet[B].release()
    ids, error = await reading
    assert (len(ids), error, under_way.finish) == (2, None, Finish.ABORT)
    assert fleet[B].active == 0


@BOTH
async def test_closing_before_the_next_one_admits_it_ends_it_and_its_tokens_stand(
    router: Router, fleet: Fleet, *, streamed: bool
) -> None:
    fleet[A].fail_after(2, LOST)
    fleet[B].admission = asyncio.Event()
    under_way = await router.complete(asking(streamed=streamed))
    reading = asyncio.create_task(read(under_way))
    await fleet[B].asked.wait()
    assert under_way.finish is None
    for _ in range(2):
        await under_way.aclose()
    ids, error = await reading
    assert (len(ids), error, under_way.finish) == (2, None, Finish.ABORT)
    assert (fleet[B].active, fleet[C].requests) == (0, [])


class Breaking:
    """An answer whose replica is lost after some tokens."""

    def __init__(self, answer: Answer, tokens: int) -> None:
        self._answer = answer
        self._left = tokens

    @property
    def origin(self) -> Origin:
        return self._answer.origin

    @property
    def finish(self) -> Finish | None:
        return self._answer.finish

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        if not self._left:
            raise LOST
        async for step in self._answer:
            yield step
            self._left -= 1
            if not self._left:
                raise LOST

    async def aclose(self) -> None:
        await self._answer.aclose()


class StampReplica:
    """A stamp engine as a replica that is lost after ``tokens`` tokens of each answer."""

    def __init__(self, name: ReplicaId, log: list[Event], *, step: int, tokens: int) -> None:
        self.engine = StampEngine(
            weights_at(step), SPECS, Version(step), replica=name, boot=BootId(f"boot-{name}"), window=64
        )
        self.engine._seeds = count(sum(map(ord, name)))
        self._log = log
        self._tokens = tokens
        log.append(Labelled(replica=name, boot=BootId(f"boot-{name}"), version=Version(step), at=0.0))

    def window(self) -> int:
        return 64

    def routing(self) -> Routing | None:
        return self.engine.describe().routing

    async def probe(self) -> ProbeReport:
        return ProbeReport(status="serving", version=self.engine.stats().version, window=64)

    async def complete(self, request: CompletionRequest) -> Breaking:
        under_way = await self.engine.generate(request)
        origin = under_way.origin
        if len(request.prompt_ids) == len(STAMPED.prompt_ids):
            self._log.append(Accepted(replica=origin.replica, boot=origin.boot, request=request, state="serving"))
        return Breaking(under_way, self._tokens)

    def sever(self) -> None:
        """Nothing waits."""

    async def aclose(self) -> None:
        await self.engine.close()


STAMPED: Final = CompletionRequest(
    request_id=RequestId("r"), prompt_ids=(1, 2, 3), sampling=SamplingSpec(max_tokens=12)
)


async def stamped(request: CompletionRequest, *losses: tuple[int, int]) -> tuple[list[Event], list[TokenStep]]:
    """The history of one answer over replicas that hold version ``losses[i][0]`` and are lost after ``[1]`` tokens."""
    log: list[Event] = [
        Published(version=Version(step), state=StateDigest(f"s{step}"), mark=weights_mark(weights_at(step)))
        for step in range(2)
    ]
    fleet = {
        name: StampReplica(name, log, step=step, tokens=tokens)
        for name, (step, tokens) in zip((A, B, C), losses, strict=False)
    }
    steps: list[TokenStep] = []
    async with Router(fleet, clock=ManualClock()) as router:
        under_way = await router.complete(request)
        async for step in under_way:
            steps.append(step)
            log.append(Sampled(request=request.request_id, origin=under_way.origin, step=step))
        log.append(Ended(request=request.request_id, finish=under_way.finish))
        await under_way.aclose()
    return log, steps


@BOTH
@pytest.mark.parametrize("forced", [(), tuple(range(12))], ids=["drawn", "forced"])
@pytest.mark.parametrize("made", [1, 5, 11])
async def test_a5_10_every_token_and_its_evidence_are_those_of_an_undisturbed_answer(
    made: int, forced: tuple[int, ...], *, streamed: bool
) -> None:
    request = replace(STAMPED, streamed=streamed, forced_ids=forced)
    _, alone = await stamped(request, (0, 99))
    log, moved = await stamped(request, (0, made), (0, 99))
    assert [replace(step, moved=None, kv=()) for step in moved] == alone
    assert [at for at, step in enumerate(moved) if step.moved] == [made]
    assert check(log) == ()


@BOTH
async def test_a_loss_after_the_last_token_loses_nothing(*, streamed: bool) -> None:
    request = replace(STAMPED, streamed=streamed)
    _, alone = await stamped(request, (0, 99))
    log, steps = await stamped(request, (0, 12), (0, 99))
    assert steps == alone
    assert check(log) == ()


@pytest.mark.parametrize("second", [0, 1])
async def test_i1_and_i6_hold_over_a_move_and_find_one_that_is_not_told(second: int) -> None:
    log, steps = await stamped(replace(STAMPED, streamed=True), (0, 4), (second, 3), (1, 99))
    assert len(steps) == 12
    assert check(log) == ()

    def told(change: Callable[[TokenStep], TokenStep]) -> set[str]:
        seen = [replace(one, step=change(one.step)) if isinstance(one, Sampled) else one for one in log]
        return {violation.check for violation in check(seen)}

    assert told(lambda step: replace(step, kv=())) >= {"I6"}
    assert told(lambda step: replace(step, moved=replace(step.moved, seed=1234) if step.moved else None)) == {"I6"}
    by_whom = [
        replace(one, origin=one.step.moved) if isinstance(one, Sampled) and one.step.moved else one for one in log
    ]
    assert check(by_whom) == ()
    silent = [replace(one, step=replace(one.step, moved=None)) if isinstance(one, Sampled) else one for one in by_whom]
    assert {violation.check for violation in check(silent)} == {"I6"}
