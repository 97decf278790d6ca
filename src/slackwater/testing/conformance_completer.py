"""What every Completer must do: inherit `CompleterTests` and give it a ``completer`` fixture.

One that passes on what others answer inherits `PassingOnTests` too.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slackwater.errors import InvalidInputError, PolicyUnmetError
from slackwater.ids import RequestId, Version
from slackwater.rollout.completer import Answer, Completer
from slackwater.rollout.evidence import Completion, Finish, PolicySpan, TokenStep, collect, kv_spans, mask_ids
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.completer import TableCompleter

REQUEST = CompletionRequest(
    request_id=RequestId("r"),
    prompt_ids=(1, 2, 3),
    sampling=SamplingSpec(max_tokens=6, seed=5, top_logprobs=3),
)
"""A small request that every completer under test can answer."""


async def answer(completer: Completer, request: CompletionRequest) -> Completion:
    """Ask, read to the end, close."""
    under_way = await completer.complete(request)
    try:
        steps = [step async for step in under_way]
        return collect(under_way.origin, steps, under_way.finish)
    finally:
        await under_way.aclose()


class CompleterTests:
    """The completer under test serves version 7 with a window of at least 32 and a vocabulary of at least 8 tokens,
    of which none ends an answer by itself.
    """

    async def test_an_answer_has_max_tokens_and_ends_by_length(self, completer: Completer) -> None:
        """The plain case."""
        whole = await answer(completer, REQUEST)
        assert len(whole.steps) == 6
        assert whole.finish is Finish.LENGTH
        assert [step.finish for step in whole.steps] == [None] * 5 + [Finish.LENGTH]
        assert [span.version for span in whole.policy] == [7]

    async def test_a_seed_repeats_its_answer_and_is_reported(self, completer: Completer) -> None:
        """Tokens and log-probabilities, both."""
        first, second = await answer(completer, REQUEST), await answer(completer, REQUEST)
        assert first.origin.seed == 5
        assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)

    async def test_a3_22_evidence_is_of_the_draw_and_there_where_it_is_asked_for(self, completer: Completer) -> None:
        """Raw log-probabilities and the support; the answer is the same without them."""
        cut = replace(REQUEST.sampling, top_k=3, temperature=0.7, raw_logprobs=True, sampling_mask=True)
        shown = await answer(completer, replace(REQUEST, sampling=cut))
        for step in shown.steps:
            assert step.raw_logprob is not None
            assert step.raw_logprob <= 0.0
            assert step.mask is not None
            assert step.token_id in mask_ids(step.mask)
            assert sorted(step.top_ids) == list(mask_ids(step.mask))
        hidden = await answer(
            completer, replace(REQUEST, sampling=replace(cut, raw_logprobs=False, sampling_mask=False))
        )
        plain = [replace(one, raw_logprob=None, mask=None, raw_top_ids=(), raw_top_logprobs=()) for one in shown.steps]
        assert plain == list(hidden.steps)

    async def test_a3_03_raw_alternatives_are_the_same_whatever_the_sampling(self, completer: Completer) -> None:
        """As many as were asked for, though the support has fewer."""
        raw = replace(REQUEST.sampling, top_logprobs=3, raw_logprobs=True, max_tokens=1)
        cut = replace(raw, temperature=0.5, top_p=0.0001)
        (plain,), (narrow,) = [(await answer(completer, replace(REQUEST, sampling=each))).steps for each in (raw, cut)]
        assert len(narrow.top_ids) == 1
        assert len(set(narrow.raw_top_ids)) == len(narrow.raw_top_logprobs) == 3
        assert (narrow.raw_top_ids, narrow.raw_top_logprobs) == (plain.raw_top_ids, plain.raw_top_logprobs)
        assert list(narrow.raw_top_logprobs) == sorted(narrow.raw_top_logprobs, reverse=True)

    async def test_an_id_outside_of_the_vocabulary_is_not_biased(self, completer: Completer) -> None:
        """Nobody would know what was meant."""
        biased = replace(REQUEST.sampling, logit_bias=((2**31 - 1, 1.0),))
        with pytest.raises(InvalidInputError):
            await answer(completer, replace(REQUEST, sampling=biased))

    async def test_a_reported_seed_repeats_an_answer_without_one(self, completer: Completer) -> None:
        """The replica's pick is as good as the caller's."""
        free = await answer(completer, replace(REQUEST, sampling=SamplingSpec(max_tokens=6)))
        again = SamplingSpec(max_tokens=6, seed=free.origin.seed)
        assert (await answer(completer, replace(REQUEST, sampling=again))).token_ids == free.token_ids

    async def test_a3_20_alternatives_are_different_and_fall(self, completer: Completer) -> None:
        """One per rank, of the same distribution as the sampled token's log-probability."""
        for step in (await answer(completer, REQUEST)).steps:
            assert len(set(step.top_ids)) == len(step.top_logprobs) == 3
            assert list(step.top_logprobs) == sorted(step.top_logprobs, reverse=True)
            if step.token_id in step.top_ids:
                assert step.top_logprobs[step.top_ids.index(step.token_id)] == pytest.approx(step.logprob)

    async def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, completer: Completer) -> None:
        """Its log-probability too."""
        whole = await answer(completer, REQUEST)
        stop = whole.token_ids[2]
        cut = await answer(completer, replace(REQUEST, sampling=replace(REQUEST.sampling, stop_token_ids=(stop,))))
        assert cut.finish is Finish.STOP
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]

    async def test_forced_tokens_come_back_with_log_probabilities(self, completer: Completer) -> None:
        """Forced decoding scores a given continuation exactly as sampling did."""
        whole = await answer(completer, REQUEST)
        forced = await answer(completer, replace(REQUEST, forced_ids=whole.token_ids))
        assert forced.token_ids == whole.token_ids
        assert forced.logprobs == pytest.approx(whole.logprobs)

    @pytest.mark.parametrize("made", [1, 5])
    async def test_an_answer_goes_on_from_its_tokens_under_its_seed(self, completer: Completer, made: int) -> None:
        """Prompt and tokens so far as the prompt draw what would have been drawn: a lost replica's answer is saved."""
        free = replace(REQUEST, sampling=replace(REQUEST.sampling, seed=None))
        whole = await answer(completer, free)
        rest = replace(REQUEST.sampling, seed=whole.origin.seed, max_tokens=6 - made)
        prompt = (*REQUEST.prompt_ids, *whole.token_ids[:made])
        last = await answer(completer, replace(REQUEST, prompt_ids=prompt, sampling=rest))
        assert last.token_ids == whole.token_ids[made:]
        assert last.logprobs == pytest.approx(whole.logprobs[made:])

    async def test_a_prompt_past_the_window_is_refused(self, completer: Completer) -> None:
        """Before any work."""
        with pytest.raises(InvalidInputError):
            await answer(completer, replace(REQUEST, prompt_ids=(1,) * (completer.window() + 1)))

    @pytest.mark.parametrize(
        "policy",
        [PolicyConstraint(min_version=Version(8)), PolicyConstraint(exact_version=Version(6))],
        ids=str,
    )
    async def test_an_unmet_policy_gives_no_token(self, completer: Completer, policy: PolicyConstraint) -> None:
        """Whether at admission or in the step that would sample the first token."""
        with pytest.raises(PolicyUnmetError):
            await answer(completer, replace(REQUEST, policy=policy))

    async def test_a_met_policy_is_answered(self, completer: Completer) -> None:
        """Bounds are inclusive."""
        policy = PolicyConstraint(min_version=Version(7), exact_version=Version(7))
        assert len((await answer(completer, replace(REQUEST, policy=policy))).steps) == 6

    async def test_closing_twice_before_the_end_aborts_once(self, completer: Completer) -> None:
        """Close is idempotent and sets the finish."""
        under_way = await completer.complete(replace(REQUEST, streamed=True))
        async for _ in under_way:
            break
        await under_way.aclose()
        await under_way.aclose()
        assert under_way.finish is Finish.ABORT

    async def test_closing_before_the_first_token_is_fine(self, completer: Completer) -> None:
        """Nobody has to read."""
        under_way = await completer.complete(REQUEST)
        await under_way.aclose()
        assert under_way.finish is Finish.ABORT

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 10, 20])
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a5_01_closing_an_answer_that_another_task_reads_ends_its_reading(
        self, completer: Completer, *, streamed: bool, turns: int
    ) -> None:
        """Without an error, wherever it is; the tokens are the first ones of the whole."""
        request = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=24), streamed=streamed)
        whole = await answer(completer, request)
        under_way = await completer.complete(request)
        reading = asyncio.ensure_future(_read(under_way))
        for _ in range(turns):
            await asyncio.sleep(0)
        await under_way.aclose()
        steps = await asyncio.wait_for(reading, 5)
        assert steps == list(whole.steps[: len(steps)])
        assert under_way.finish is (whole.finish if len(steps) == len(whole.steps) else Finish.ABORT)

    async def test_reading_an_answer_that_was_closed_ends_at_once(self, completer: Completer) -> None:
        """It has no token."""
        under_way = await completer.complete(REQUEST)
        await under_way.aclose()
        assert await asyncio.wait_for(_read(under_way), 5) == []

    async def test_concurrent_answers_do_not_mix(self, completer: Completer) -> None:
        """Each gets what it gets alone."""
        asks = [replace(REQUEST, sampling=SamplingSpec(max_tokens=6, seed=seed)) for seed in range(12)]
        alone = [await answer(completer, ask) for ask in asks]
        together = await asyncio.gather(*(answer(completer, ask) for ask in asks))
        assert [one.token_ids for one in alone] == [one.token_ids for one in together]


async def _read(under_way: Answer) -> list[TokenStep]:
    return [step async for step in under_way]


async def _one_waits(tables: Sequence[TableCompleter]) -> None:
    waits = [asyncio.ensure_future(table.until_waiting(1)) for table in tables]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


MIXED = (
    PolicySpan(version=Version(5), start=0, end=1),
    PolicySpan(version=Version(4), start=1, end=2),
    PolicySpan(version=Version(7), start=2, end=3),
)
"""KV of `REQUEST`'s prompt that three versions built."""
ANEW = (PolicySpan(version=Version(7), start=0, end=7),)
"""KV before token number 4 of its answer, all of it computed again."""


class PassingOnTests:
    """The completer under test passes on what the ``tables``, a fixture, answer: evidence of how
    an answer came about arrives as it was told.
    """

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_evidence_of_kv_and_of_unconfirmed_versions_arrives(
        self, completer: Completer, tables: Sequence[TableCompleter], *, streamed: bool
    ) -> None:
        """At the very tokens that told it."""
        for table in tables:
            table.kv, table.provisional = {0: MIXED, 4: ANEW}, (1, 2)
        whole = await answer(completer, replace(REQUEST, streamed=streamed))
        assert [step.kv for step in whole.steps] == [MIXED, (), (), (), ANEW, ()]
        assert [step.provisional for step in whole.steps] == [False, True, True, False, False, False]
        assert whole.origin.prompt_version is None
        assert kv_spans(3, whole.steps) == (PolicySpan(version=Version(7), start=0, end=8),)

    async def test_kv_of_very_many_versions_arrives(
        self, completer: Completer, tables: Sequence[TableCompleter]
    ) -> None:
        """No number of spans is too much for a hop."""
        rows = completer.window() - 1
        kv = tuple(PolicySpan(version=Version(2**40 + row % 2), start=row, end=row + 1) for row in range(rows))
        for table in tables:
            table.kv = {0: kv}
        whole = await answer(completer, replace(REQUEST, prompt_ids=(1,) * rows))
        assert [step.kv for step in whole.steps] == [kv]

    @pytest.mark.parametrize("tokens", [0, 2])
    @pytest.mark.parametrize("finish", [Finish.SWAPPED, Finish.ABORT, Finish.POLICY_CHANGED])
    async def test_an_answer_that_is_cut_keeps_its_tokens_and_its_word(
        self, completer: Completer, tables: Sequence[TableCompleter], finish: Finish, tokens: int
    ) -> None:
        """It has no last token to say so."""
        for table in tables:
            table.cut_after(tokens, finish)
        cut = await answer(completer, REQUEST)
        assert (len(cut.steps), cut.finish) == (tokens, finish)

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("tokens", [0, 3])
    async def test_a5_01_an_answer_closed_while_it_waits_has_the_tokens_so_far(
        self, completer: Completer, tables: Sequence[TableCompleter], *, streamed: bool, tokens: int
    ) -> None:
        """Held back or not; and whoever made them is free."""
        whole = await answer(completer, REQUEST)
        for table in tables:
            table.hold(position=tokens)
        under_way = await completer.complete(replace(REQUEST, streamed=streamed))
        reading = asyncio.ensure_future(_read(under_way))
        await asyncio.wait_for(_one_waits(tables), 5)
        if tokens:  # they have come once those of a later answer have
            await answer(completer, replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=tokens)))
        await under_way.aclose()
        steps = await asyncio.wait_for(reading, 5)
        assert (steps, under_way.finish) == (list(whole.steps[:tokens]), Finish.ABORT)
        for table in tables:
            await asyncio.wait_for(table.until_active(0), 5)

    async def test_a_request_for_kv_of_any_version_arrives(
        self, completer: Completer, tables: Sequence[TableCompleter]
    ) -> None:
        """And one for the same version's alone does."""
        for any_kv in (True, False):
            await answer(completer, replace(REQUEST, policy=PolicyConstraint(any_kv=any_kv)))
        asked = sorted(request.policy.any_kv for table in tables for request in table.requests)
        assert asked == [False, True]
