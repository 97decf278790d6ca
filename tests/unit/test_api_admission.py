"""Which requests are taken on: a pure table."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.api.admission import Admission, Capacity, refusal, replica_capacity, retry_after_s, too_many_tokens
from slackwater.api.asking import MAX_ALTERNATIVES, requests, text_wanted
from slackwater.api.faults import Fault, fault, rebuild
from slackwater.api.schema import TextBody
from slackwater.errors import InvalidInputError, OverloadedError


@pytest.mark.parametrize(
    ("taken", "wanted", "wait"),
    [(0, 1, None), (0, 6, None), (5, 1, None), (6, 1, 1), (5, 2, 1), (2, 5, 1), (6, 4, 1), (6, 5, 2), (6, 6, 2)],
)
def test_a_request_is_taken_whole_or_refused_whole(taken: int, wanted: int, wait: int | None) -> None:
    error = refusal(Capacity(places=6, at_once=4), taken=taken, wanted=wanted)
    assert (error.retry_after_s if isinstance(error, OverloadedError) else error) == wait


@pytest.mark.parametrize("taken", [0, 6])
def test_what_never_fits_is_the_requests_own_fault(taken: int) -> None:
    error = refusal(Capacity(places=6, at_once=4), taken=taken, wanted=7)
    assert isinstance(error, InvalidInputError)
    assert fault(error).param == "n"


@pytest.mark.parametrize(
    ("slots", "max_waiting", "max_requests", "places", "at_once"),
    [(16, None, 1024, 80, 16), (16, 0, 1024, 16, 16), (1, None, 1024, 5, 1), (16, 9, 20, 20, 16), (16, 9, 3, 3, 3)],
)
def test_a_replica_takes_its_slots_and_who_may_wait(
    slots: int, max_waiting: int | None, max_requests: int, places: int, at_once: int
) -> None:
    assert replica_capacity(slots, max_waiting, max_requests) == Capacity(places=places, at_once=at_once)


@given(over=st.integers(1, 10**6), at_once=st.integers(0, 10**4))
def test_the_wait_is_from_1_to_30_s_and_grows_with_the_queue(over: int, at_once: int) -> None:
    assert 1 <= retry_after_s(over, at_once) <= retry_after_s(over + 1, at_once) <= 30


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.lists(st.integers(0, 8), max_size=4), st.integers(0, 3)), min_size=1, max_size=6
    )
)
def test_every_place_comes_back_whatever_order_they_are_given_back_in(
    asks: list[tuple[int, list[int], int]],
) -> None:
    admission = Admission(Capacity(places=8, at_once=4))
    for wanted, kept, apart in asks:
        with admission.taking(wanted) as places:
            assert admission.taken == wanted
            with places.part(apart) as part:
                assert admission.taken == wanted
                part.keep(0)
            for most in kept:
                places.keep(most)
                assert 0 <= admission.taken <= wanted
        assert admission.taken == 0


@pytest.mark.parametrize(
    ("limit", "others", "own", "taken"),
    [(None, 10**9, 10**9, True), (10, 4, 6, True), (10, 4, 7, False), (10, 0, 11, True), (10, 11, 1, False)],
)
def test_prompts_are_taken_while_they_have_few_enough_tokens_together(
    limit: int | None, others: int, own: int, *, taken: bool
) -> None:
    capacity = Capacity(places=6, at_once=4, prompt_tokens=limit)
    assert (too_many_tokens(capacity, others=others, own=own) is None) is taken


def test_a_requests_own_prompts_are_not_held_against_it_and_all_tokens_come_back() -> None:
    admission = Admission(Capacity(places=8, at_once=4, prompt_tokens=10))
    with admission.taking(2) as places, places.part(1) as part, part.prompting(9), places.prompting(9):
        assert admission.tokens == 18
        with admission.taking(1) as late, pytest.raises(OverloadedError, match="18 tokens"), late.prompting(1):
            pass
        assert admission.tokens == 18
    assert admission.tokens == 0


def test_a_refusal_takes_no_place_and_a_failure_gives_its_own_back() -> None:
    admission = Admission(Capacity(places=2, at_once=1))
    with admission.taking(2), pytest.raises(OverloadedError), admission.taking(1):
        raise AssertionError
    with pytest.raises(RuntimeError), admission.taking(1):
        raise RuntimeError
    assert admission.taken == 0


@pytest.mark.parametrize(("told", "believed"), [(7, 7), (0, 1), (-5, 1), (10**9, 60)])
def test_the_wait_passes_from_a_replica_to_the_gateways_client(told: int, believed: int) -> None:
    passed = rebuild(Fault(message="full", type="overloaded", retry_after_s=told))
    assert isinstance(passed, OverloadedError)
    assert (passed.retry_after_s, fault(passed).retry_after_s) == (believed, believed)
    assert pickle.loads(pickle.dumps(passed)).retry_after_s == believed


def ask(n: int, max_tokens: int, top: int, window: int) -> int:
    body = TextBody(prompt=(1, 2), n=n, max_tokens=max_tokens, logprobs=top)
    return len(requests(body, text_wanted(body), (1, 2), window=window, request_id="r", model="m"))


def test_a8_11_the_alternatives_of_one_reply_are_bounded() -> None:
    tokens = MAX_ALTERNATIVES // (64 * 16)
    assert ask(64, tokens, 16, window=10**6) == 64
    with pytest.raises(InvalidInputError, match="top_logprobs is out of range"):
        ask(64, tokens + 1, 16, window=10**6)
    assert ask(64, 10**6, 16, window=tokens + 2) == 64, "the window cuts max_tokens first"
    assert ask(64, 10**6, 0, window=10**7) == 64
