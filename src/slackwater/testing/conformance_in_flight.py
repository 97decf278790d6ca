"""What every engine owes to answers under way when its weights are exchanged: inherit `InFlightTests` as `EngineTests`.

Tests aim a swap into answers of `LONG` tokens: writes are staged beforehand, so that the commit comes soon.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
import pytest

from slackwater.config.in_flight import InFlight
from slackwater.engine.base import Engine, Staged
from slackwater.errors import SwapError, UnavailableError
from slackwater.ids import Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Completion, Finish, PolicySpan, TokenStep, kv_spans
from slackwater.rollout.request import ANY_POLICY, PolicyConstraint
from slackwater.testing.conformance_engine import (
    FIRST,
    LONG,
    SECOND,
    SHORT,
    EngineFixtures,
    answered,
    digest,
    finished,
    first_token,
    flips,
    request,
    swap,
)

THIRD: Final = Version(9)
"""Label of the weights that a second swap leads to."""

_EXACT: Final = PolicyConstraint(exact_version=FIRST)
_ANY_KV: Final = PolicyConstraint(any_kv=True)
_GOES_ON: Final = (InFlight.CONTINUE, InFlight.RECOMPUTE)
_CUTS: Final = (InFlight.ABORT, InFlight.DRAIN)


async def begun(engine: Engine, count: int = 1, policy: PolicyConstraint = ANY_POLICY) -> list[Answer]:
    """Long answers of which one token has been read."""
    answers = [await engine.generate(request(seed=seed, policy=policy, max_tokens=LONG)) for seed in range(count)]
    for answer in answers:
        await first_token(answer)
    return answers


async def taken(answer: Answer) -> list[TokenStep]:
    """Every step from the next on."""
    steps = [step async for step in answer]
    await answer.aclose()
    return steps


async def over(engine: Engine, staged: Staged, mode: InFlight, version: Version = SECOND) -> list[TokenStep]:
    """The whole of one long answer over a commit in this mode."""
    answer = await engine.generate(request(max_tokens=LONG))
    head = await anext(aiter(answer))
    await engine.commit(staged, version, in_flight=mode)
    return [head, *await taken(answer)]


def span(version: Version, start: int, end: int) -> PolicySpan:
    """Positions ``[start, end)``."""
    return PolicySpan(version=version, start=start, end=end)


def cut_of(steps: Sequence[TokenStep], version: Version = SECOND) -> int:
    """The first token of ``version``; there is one, and one before it."""
    cut = [step.version for step in steps].index(version)
    assert cut > 0
    return cut


class InFlightTests(EngineFixtures):
    """`InFlight`, drains, proofs, spoilt weights and reuse of KV: one test per promise of `Engine`."""

    @pytest.mark.parametrize("mode", _CUTS)
    async def test_f38_answers_that_are_cut_keep_their_tokens(self, engine: Engine, mode: InFlight) -> None:
        """In abort mode, and where a drain has left some: `SWAPPED`; what was received begins the old answer."""
        old = await answered(engine, request(seed=0, max_tokens=LONG))
        staged = await engine.stage(flips(engine))
        answers = await begun(engine, 3)
        report = await engine.commit(staged, SECOND, in_flight=mode)
        assert (report.in_flight, engine.stats().active) == (0, 0)
        whole = [await finished(answer) for answer in answers]
        assert {one.finish for one in whole} == {Finish.SWAPPED}
        assert {step.version for one in whole for step in one.steps} <= {FIRST}
        assert whole[0].steps == old.steps[1 : 1 + len(whole[0].steps)]

    @pytest.mark.parametrize("mode", InFlight)
    async def test_answers_without_a_token_begin_anew_in_every_mode(self, engine: Engine, mode: InFlight) -> None:
        """They wait while the slots are full, and are answered by the new weights alone."""
        staged = await engine.stage(flips(engine))
        busy = await begun(engine, engine.describe().slots)
        waiting = [await engine.generate(request(seed=seed)) for seed in range(3)]
        await engine.commit(staged, SECOND, in_flight=mode)
        for answer in busy:
            await answer.aclose()
        for answer in waiting:
            whole = await finished(answer)
            assert (whole.finish, len(whole.steps)) == (Finish.LENGTH, SHORT)
            assert whole.policy == (span(SECOND, 0, SHORT),)
            assert whole.origin.prompt_version == SECOND

    @pytest.mark.parametrize("mode", _GOES_ON)
    async def test_a2_08_in_modes_that_go_on_every_answer_completes(self, engine: Engine, mode: InFlight) -> None:
        """As many as there are slots. Their first token is old; the exchange may come before a second old one."""
        staged = await engine.stage(flips(engine))
        answers = await begun(engine, engine.describe().slots)
        report = await engine.commit(staged, SECOND, in_flight=mode)
        assert report.in_flight == len(answers)
        for answer in answers:
            whole = await finished(answer)
            assert (whole.finish, len(whole.steps)) == (Finish.LENGTH, LONG - 1)
            assert [one.version for one in whole.policy] in ([FIRST, SECOND], [SECOND])

    async def test_continued_answers_keep_the_kv_of_the_old_weights(self, engine: Engine) -> None:
        """Rows up to the token before the last old one are old, and no step needs to say so."""
        prompt = len(request().prompt_ids)
        steps = await over(engine, await engine.stage(flips(engine)), InFlight.CONTINUE)
        rows = prompt + cut_of(steps) - 1
        assert not any(step.kv for step in steps)
        assert kv_spans(prompt, steps) == (span(FIRST, 0, rows), span(SECOND, rows, prompt + LONG - 1))

    async def test_recomputed_answers_have_kv_of_the_new_weights_alone(self, engine: Engine) -> None:
        """The first step after it tells, and it alone; from there on one version has built everything."""
        prompt = len(request().prompt_ids)
        steps = await over(engine, await engine.stage(flips(engine)), InFlight.RECOMPUTE)
        cut = cut_of(steps)
        assert [index for index, step in enumerate(steps) if step.kv] == [cut]
        assert steps[cut].kv == (span(SECOND, 0, prompt + cut),)
        assert kv_spans(prompt, steps) == (span(SECOND, 0, prompt + LONG - 1),)

    async def test_recomputed_kv_makes_other_tokens_than_kv_that_was_kept(self, engine: Engine, other: Engine) -> None:
        """The same tokens forced, one answer recomputed and one not: log-probabilities part at the swap or after it."""
        made = (await answered(engine, request(max_tokens=LONG))).token_ids
        scored = [await self._forced_over(one, made, mode) for one, mode in zip((engine, other), _GOES_ON, strict=True)]
        cut = max(cut_of(steps) for steps in scored)
        kept, recomputed = ([step.logprob for step in steps[cut:]] for steps in scored)
        assert kept != recomputed

    async def _forced_over(self, engine: Engine, forced: Sequence[int], mode: InFlight) -> list[TokenStep]:
        staged = await engine.stage(flips(engine))
        answer = await engine.generate(request(forced=forced, max_tokens=len(forced)))
        head = await anext(aiter(answer))
        await engine.commit(staged, SECOND, in_flight=mode)
        return [head, *await taken(answer)]

    @pytest.mark.parametrize("mode", _GOES_ON)
    async def test_a_second_swap_while_answers_are_recomputed(self, engine: Engine, mode: InFlight) -> None:
        """What was recomputed or was to be is never of the first weights; a second recompute begins anew."""
        prompt = len(request().prompt_ids)
        first = await engine.stage(flips(engine))
        answers = await begun(engine, engine.describe().slots)
        await engine.commit(first, SECOND, in_flight=InFlight.RECOMPUTE)
        await engine.commit(await engine.stage(flips(engine, seed=1, share=0.01)), THIRD, in_flight=mode)
        for answer in answers:
            steps = await taken(answer)
            assert (len(steps), steps[-1].finish) == (LONG - 1, Finish.LENGTH)
            # The token before it may be the one that `begun` has read, which is of the first weights.
            after = [step.version for step in steps].index(THIRD)
            rows = prompt + 1 + after
            if mode is InFlight.RECOMPUTE:
                assert steps[after].kv == (span(THIRD, 0, rows),)
            told = kv_spans(prompt + 1, steps)
            assert {one.version for one in told} <= {SECOND, THIRD}
            assert (told[0].start, told[-1].version, told[-1].end) == (0, THIRD, prompt + LONG - 1)

    async def test_closing_answers_while_they_are_recomputed_frees_their_slots(self, engine: Engine) -> None:
        """And later ones are answered as on an engine where nothing happened."""
        staged = await engine.stage(flips(engine))
        answers = await begun(engine, engine.describe().slots)
        await engine.commit(staged, SECOND, in_flight=InFlight.RECOMPUTE)
        for answer in answers:
            await answer.aclose()
        whole = await answered(engine, request())
        assert whole.policy == (span(SECOND, 0, SHORT),)
        assert await engine.abort_all() == 0
        assert (engine.stats().active, engine.stats().waiting) == (0, 0)

    @pytest.mark.parametrize("mode", InFlight)
    async def test_exact_version_ends_at_a_swap_in_every_mode(self, engine: Engine, mode: InFlight) -> None:
        """With its own finish, and with no token of another version."""
        staged = await engine.stage(flips(engine))
        (answer,) = await begun(engine, policy=_EXACT)
        await engine.commit(staged, SECOND, in_flight=mode)
        whole = await finished(answer)
        assert whole.finish is Finish.POLICY_CHANGED
        assert {step.version for step in whole.steps} <= {FIRST}

    async def test_f38_a_drain_loses_no_answer(self, engine: Engine) -> None:
        """Those that have begun end under the old weights, one of an exact version too; the others wait for the new."""
        staged = await engine.stage(flips(engine))
        slots = engine.describe().slots
        old = [*await begun(engine, slots - 1), *await begun(engine, policy=_EXACT)]
        waiting = [await engine.generate(request(seed=seed)) for seed in range(2)]
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        late = await engine.generate(request(seed=3))
        await draining
        assert [answer.finish for answer in old] == [Finish.LENGTH] * slots
        report = await engine.commit(staged, SECOND, in_flight=InFlight.DRAIN)
        assert [len((await finished(answer)).steps) for answer in old] == [LONG - 1] * slots
        for answer in (*waiting, late):
            assert (await finished(answer)).policy == (span(SECOND, 0, SHORT),)
        assert report.bytes_written > 0

    async def test_a_drain_with_nothing_begun_returns_at_once(self, engine: Engine) -> None:
        """Even if answers wait; they go on at `proceed`, which does nothing where there is no drain."""
        engine.proceed()
        await engine.drain()
        waiting = await engine.generate(request())
        await engine.drain()
        engine.proceed()
        assert (await finished(waiting)).policy == (span(FIRST, 0, SHORT),)
        engine.proceed()
        assert (await answered(engine, request())).finish is Finish.LENGTH

    async def test_a_cancelled_drain_lets_the_others_on(self, engine: Engine) -> None:
        """While the one that it waited for is still under way."""
        (long,) = await begun(engine)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        waiting = await engine.generate(request())
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        assert draining.cancelled()
        assert (await finished(waiting)).policy == (span(FIRST, 0, SHORT),)
        assert len((await finished(long)).steps) == LONG - 1

    async def test_a_drain_that_is_ended_returns_though_others_have_begun(self, engine: Engine) -> None:
        """It waits for the answers that had a token when it began, not for those that came after `proceed`."""
        (short,) = await begun(engine)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        engine.proceed()
        (later,) = await begun(engine)
        await short.aclose()
        await draining
        assert later.finish is None
        await later.aclose()

    async def test_closing_the_last_answer_ends_a_drain(self, engine: Engine) -> None:
        """Readers that leave, and an operator who ends all."""
        for close in (lambda one: one.aclose(), lambda _: engine.abort_all()):
            (answer,) = await begun(engine)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            await close(answer)
            await draining
            engine.proceed()

    async def test_a_failing_commit_ends_a_drain(self, engine: Engine, other: Engine) -> None:
        """Whether its writes are stale, another engine's, or wrong: the old weights answer those that waited."""
        stale = await engine.stage(flips(engine, seed=1))
        foreign = await other.stage(flips(other))
        await swap(engine)
        wrong = await engine.stage(flips(engine, seed=2))
        for staged in (stale, foreign, wrong):
            await engine.drain()
            waiting = await engine.generate(request())
            with pytest.raises(SwapError):
                await engine.commit(staged, THIRD, in_flight=InFlight.DRAIN, proof=lambda: "a tile")
            assert (await finished(waiting)).policy == (span(SECOND, 0, SHORT),)

    async def test_a_failing_undo_ends_a_drain(self, engine: Engine) -> None:
        """As a commit does."""
        staged = await engine.stage(flips(engine))
        await engine.drain()
        waiting = await engine.generate(request())
        with pytest.raises(SwapError):
            await engine.undo(staged, FIRST)
        assert (await finished(waiting)).policy == (span(FIRST, 0, SHORT),)

    async def test_a_cancelled_commit_ends_a_drain(self, engine: Engine) -> None:
        """Whether it came to its turn or not."""
        staged = await engine.stage(flips(engine))
        await engine.drain()
        waiting = await engine.generate(request())
        committing = asyncio.create_task(engine.commit(staged, SECOND))
        await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        whole = await finished(waiting)
        assert (whole.finish, len(whole.policy)) == (Finish.LENGTH, 1)

    async def test_closing_the_engine_ends_a_drain(self, engine: Engine) -> None:
        """It returns or says that the engine is closed; a later one is refused."""
        answers = await begun(engine, 2)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        await engine.close()
        (ended,) = await asyncio.gather(draining, return_exceptions=True)
        assert ended is None or isinstance(ended, UnavailableError)
        assert [answer.finish for answer in answers] == [Finish.ABORT] * 2
        with pytest.raises(UnavailableError):
            await engine.drain()
        engine.proceed()

    @pytest.mark.parametrize("mode", InFlight)
    async def test_a_commit_whose_proof_finds_a_fault_never_was(self, engine: Engine, mode: InFlight) -> None:
        """Bits, label, answers under way and KV are as before it, and the commit before can still be undone."""
        first, earlier = digest(engine), await engine.stage(flips(engine))
        await engine.commit(earlier, SECOND)
        before, alone = digest(engine), await answered(engine, request())
        staged = await engine.stage(flips(engine, seed=1))
        (answer,) = await begun(engine)
        with pytest.raises(SwapError, match="the third tile"):
            await engine.commit(staged, THIRD, in_flight=mode, proof=lambda: "the third tile")
        assert (digest(engine), engine.stats().version) == (before, SECOND)
        assert (await finished(answer)).policy == (span(SECOND, 0, LONG - 1),)
        again = await answered(engine, request())
        assert (again.steps, again.origin.cached_tokens > 0) == (alone.steps, True)
        await engine.undo(earlier, FIRST)
        assert (digest(engine), engine.stats().version) == (first, FIRST)

    async def test_a_proof_that_raises_leaves_the_old_bits(self, engine: Engine) -> None:
        """All or nothing, on any error."""
        before, staged = digest(engine), await engine.stage(flips(engine))

        def proof() -> str | None:
            raise UnavailableError("no memory to look with")

        with pytest.raises(UnavailableError, match="to look with"):
            await engine.commit(staged, SECOND, proof=proof)
        assert (digest(engine), engine.stats().version) == (before, FIRST)
        await engine.commit(staged, SECOND)
        assert engine.stats().version == SECOND

    async def test_a_proof_sees_the_new_bits_under_the_old_label(self, engine: Engine) -> None:
        """And no token is made of them before the label flips: those of the old label are the old weights'."""
        old = await answered(engine, request(seed=0, max_tokens=LONG))
        writes = flips(engine)
        staged = await engine.stage(writes)
        seen: list[tuple[Version, bool]] = []

        def proof() -> str | None:
            bits = [engine.read(write.name, write.tile)[write.positions] for write in writes]
            right = all(np.array_equal(one, write.values) for one, write in zip(bits, writes, strict=True))
            seen.append((engine.stats().version, right))
            return None

        (answer,) = await begun(engine)
        await engine.commit(staged, SECOND, proof=proof)
        steps = await taken(answer)
        cut = [step.version for step in steps].index(SECOND)  # 0 where the exchange came before a second old token
        assert seen == [(FIRST, True)]
        assert engine.stats().version == SECOND
        assert tuple(steps[:cut]) == old.steps[1 : 1 + cut]

    async def test_spoilt_weights_take_their_answers_with_them(self, engine: Engine) -> None:
        """Answers with a token of theirs end in an error; those that wait are answered by what is put back."""
        staged = await engine.stage(flips(engine))
        busy = await begun(engine, engine.describe().slots)
        waiting = await engine.generate(request())
        await engine.commit(staged, SECOND)
        for answer in busy:
            assert SECOND in [step.version async for step in _until(answer, SECOND)]
        await engine.undo(staged, FIRST, spoilt=True)
        for answer in busy:
            with pytest.raises(UnavailableError):
                await taken(answer)
            assert answer.finish is None
        assert (await finished(waiting)).policy == (span(FIRST, 0, SHORT),)

    @pytest.mark.parametrize("spoilt", [True, False])
    async def test_kv_of_spoilt_weights_is_never_reused(self, engine: Engine, other: Engine, spoilt: bool) -> None:
        """Not even where KV of any version will do, which takes that of good ones after an undo."""
        cold = await answered(other, request())
        staged = await engine.stage(flips(engine))
        await engine.commit(staged, SECOND)
        assert (await answered(engine, request())).origin.prompt_version == SECOND
        await engine.undo(staged, FIRST, spoilt=spoilt)
        warm = await answered(engine, request(policy=_ANY_KV))
        built = {one.version for one in kv_spans(len(request().prompt_ids), warm.steps)}
        assert (warm.origin.cached_tokens == 0, SECOND not in built) == (spoilt, spoilt)
        if spoilt:
            assert (warm.steps, warm.origin.prompt_version) == (cold.steps, FIRST)

    async def test_kv_of_any_version_is_reused_where_it_is_asked_for(self, engine: Engine) -> None:
        """The spans tell of it; the first token is the new weights', and so is its distribution."""
        old, prompt = await answered(engine, request(top_logprobs=5)), len(request().prompt_ids)
        await swap(engine)
        whole = await answered(engine, request(policy=_ANY_KV, top_logprobs=5))
        head = whole.steps[0]
        assert whole.origin.cached_tokens > 0
        assert head.version == SECOND
        assert (head.logprob, head.top_logprobs) != (old.steps[0].logprob, old.steps[0].top_logprobs)
        assert (head.kv[0].version, head.kv[0].start, head.kv[-1].end) == (FIRST, 0, prompt)
        assert whole.origin.cached_tokens == head.kv[0].end
        builders = {one.version for one in head.kv}
        assert whole.origin.prompt_version == (FIRST if builders == {FIRST} else None)

    async def test_a2_01_reuse_by_one_is_no_reuse_by_all(self, engine: Engine, other: Engine) -> None:
        """After an answer on old KV, one that doesn't ask for it has none, and the bits of an engine without any."""
        await answered(engine, request())
        await swap(engine)
        await swap(other)
        assert (await answered(engine, request(policy=_ANY_KV))).origin.cached_tokens > 0
        plain, cold = await answered(engine, request()), await answered(other, request())
        assert (plain.origin.cached_tokens, plain.origin.prompt_version) == (0, SECOND)
        assert plain.steps == cold.steps

    async def test_kv_of_any_version_is_the_usual_kv_where_nothing_was_swapped(self, engine: Engine) -> None:
        """Same bits, and nothing to tell."""
        plain, any_kv = await answered(engine, request()), await answered(engine, request(policy=_ANY_KV))
        assert any_kv.origin.cached_tokens > 0
        assert any_kv.steps == plain.steps
        assert any_kv.origin.prompt_version == FIRST

    async def test_a_request_ahead_begins_before_all_that_wait(self, engine: Engine) -> None:
        """In the first slot that is freed."""
        busy = await begun(engine, engine.describe().slots)
        order: list[str] = []
        answers = {f"late {seed}": await engine.generate(request(seed=seed)) for seed in range(4)}
        answers["ahead"] = await engine.generate(request(), ahead=True)

        async def follow(name: str, answer: Answer) -> Completion:
            await first_token(answer)
            order.append(name)
            return await finished(answer)

        following = [asyncio.create_task(follow(*pair)) for pair in answers.items()]
        await busy[0].aclose()
        await asyncio.gather(*following)
        assert order == ["ahead", "late 0", "late 1", "late 2", "late 3"]
        for answer in busy:
            await answer.aclose()


async def _until(answer: Answer, version: Version) -> AsyncIterator[TokenStep]:
    """Steps up to the first of ``version``."""
    while True:
        step = await anext(aiter(answer))
        yield step
        if step.version == version:
            return
