"""What another replica is asked after a failure: the rest of the request, no token twice and none that isn't sure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.router.resume import Ask, Over, after_failure

SEED: Final = 99
REQUEST: Final = CompletionRequest(
    request_id=RequestId("r"),
    prompt_ids=(1, 2, 3),
    sampling=SamplingSpec(max_tokens=8, temperature=0.5, top_k=4, stop_token_ids=(7,), top_logprobs=3),
    policy=PolicyConstraint(min_version=Version(2), any_kv=True),
    model="m",
)
STREAMED: Final = replace(REQUEST, streamed=True)


ORIGIN: Final = Origin(replica=ReplicaId("b"), boot=BootId("b0"), run=RunId("demo"), seed=5)


def steps(*versions: int, provisional: Sequence[int] = (), finish: Finish | None = None) -> list[TokenStep]:
    """Tokens 10, 11, ... by these versions."""
    made = [
        TokenStep(token_id=10 + at, logprob=-1.0, version=Version(version), provisional=at in provisional)
        for at, version in enumerate(versions)
    ]
    return [*made[:-1], replace(made[-1], finish=finish)] if made else []


def asked(after: Ask | Over) -> CompletionRequest:
    assert isinstance(after, Ask)
    return after.request


def test_the_rest_is_the_request_from_its_tokens_on() -> None:
    after = after_failure(STREAMED, steps(7, 7, 8), SEED, lost=True)
    sampling = replace(REQUEST.sampling, max_tokens=5, seed=SEED)
    policy = PolicyConstraint(min_version=Version(8), any_kv=True)
    rest = replace(STREAMED, prompt_ids=(1, 2, 3, 10, 11, 12), sampling=sampling, policy=policy, continued=3)
    assert after == Ask(request=rest, kept=3)


@given(made=st.lists(st.integers(0, 9), min_size=1, max_size=7).map(sorted), streamed=st.booleans())
def test_the_rest_of_the_rest_is_the_rest(made: list[int], *, streamed: bool) -> None:
    request, told = replace(REQUEST, streamed=streamed), steps(*made)
    whole = after_failure(request, told, SEED, lost=True)
    for first in range(1, len(told)):
        half = after_failure(request, told[:first], SEED, lost=True)
        assert asked(after_failure(asked(half), told[first:], SEED, lost=True)) == asked(whole)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
def test_without_a_token_it_begins_again(request_: CompletionRequest, *, lost: bool) -> None:
    assert after_failure(request_, [], None, lost=lost) == Ask(request=request_, kept=0)


def test_an_exact_version_stays_the_only_one() -> None:
    exact = PolicyConstraint(exact_version=Version(7))
    assert asked(after_failure(replace(REQUEST, policy=exact), steps(7, 7), SEED, lost=True)).policy == exact


def test_forced_tokens_go_on_where_they_were() -> None:
    forced = replace(REQUEST, forced_ids=(10, 11, 12), sampling=replace(REQUEST.sampling, max_tokens=1))
    rest = asked(after_failure(forced, steps(7, 7), SEED, lost=True))
    assert (rest.forced_ids, rest.sampling.max_tokens) == ((12,), 1)
    assert isinstance(after_failure(forced, steps(7, 7, 7), SEED, lost=True), Over)


@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_an_answer_with_its_last_token_is_complete(request_: CompletionRequest, finish: Finish) -> None:
    after = after_failure(request_, steps(7, 7, finish=finish), SEED, lost=True)
    assert isinstance(after, Over)
    assert after.complete


@pytest.mark.parametrize(("first", "kept"), [(0, 0), (1, 1), (2, 2)])
def test_unconfirmed_tokens_are_dropped_unless_they_were_seen(first: int, kept: int) -> None:
    told = steps(7, 8, 8, provisional=range(first, 3))
    after = after_failure(REQUEST, told, SEED, lost=True)
    assert isinstance(after, Ask)
    assert after.kept == kept
    assert after.request.prompt_ids == (*REQUEST.prompt_ids, *range(10, 10 + kept))
    seen = after_failure(STREAMED, told, SEED, lost=True)
    assert isinstance(seen, Over)
    assert not seen.complete


def test_a_later_token_of_the_same_version_and_replica_confirms_those_before_it() -> None:
    told = steps(7, 8, 8, 8, provisional=(1, 2))
    after = asked(after_failure(STREAMED, told, SEED, lost=True))
    assert after.prompt_ids == (*REQUEST.prompt_ids, 10, 11, 12, 13)
    elsewhere = [*told[:3], replace(told[3], moved=ORIGIN)]
    assert isinstance(after_failure(STREAMED, elsewhere, SEED, lost=True), Over)
    other = [*told[:3], replace(told[3], version=Version(9))]
    assert isinstance(after_failure(STREAMED, other, SEED, lost=True), Over)


def test_a_last_token_that_is_not_confirmed_completes_nothing() -> None:
    told = steps(7, 7, provisional=(1,), finish=Finish.LENGTH)
    assert asked(after_failure(REQUEST, told, SEED, lost=True)).sampling.max_tokens == 7


def test_tokens_that_were_taken_back_are_not_gone_on_from() -> None:
    told = steps(7, 7, 7)
    assert after_failure(REQUEST, told, SEED, lost=False) == Ask(request=REQUEST, kept=0)
    assert after_failure(REQUEST, told, SEED, kept=2, lost=False) == Ask(request=REQUEST, kept=0)
    assert isinstance(after_failure(STREAMED, told, SEED, kept=2, lost=False), Over)


def test_who_took_nothing_back_but_its_own_promise_leaves_the_tokens_before_it() -> None:
    after = after_failure(STREAMED, steps(7, 7), SEED, kept=2, lost=False)
    assert after == after_failure(STREAMED, steps(7, 7), SEED, lost=True)
