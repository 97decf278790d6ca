"""The choice of a replica: only who may answer, and of those the one with least to do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.errors import ConflictError, NotFoundError
from slackwater.ids import ReplicaId, Version
from slackwater.rollout.request import PolicyConstraint
from slackwater.router.policy import Candidate, Choice, Health, Refusal, RoutingContext, choose
from slackwater.router.pool import Pool, ProbeReport, Reservation

A, B = ReplicaId("a"), ReplicaId("b")
SERVING = ProbeReport(status="serving", version=Version(3))
GOOD = Candidate(replica=A, health=Health.GOOD, serving=True, version=Version(3))
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        replica=st.sampled_from([ReplicaId(name) for name in "abcdef"]),
        health=st.sampled_from(Health),
        serving=st.booleans(),
        version=st.none() | st.integers(0, 4).map(Version),
        in_flight=st.integers(0, 3),
        last_chosen=st.integers(0, 9),
        model=st.sampled_from(["", "m"]),
    ),
    unique_by=lambda one: one.replica,
)


@given(
    candidates=CANDIDATES,
    low=st.none() | st.integers(0, 4).map(Version),
    excluded=st.frozensets(st.sampled_from([A, B])),
)
def test_a_choice_may_answer_and_a_refusal_says_what_is_held(
    candidates: list[Candidate], low: Version | None, excluded: frozenset[ReplicaId]
) -> None:
    policy = PolicyConstraint(min_version=low)
    decision = choose(RoutingContext(policy=policy, excluded=excluded), candidates)
    able = [
        one
        for one in candidates
        if one.serving and one.health in (Health.GOOD, Health.SUSPECT) and one.replica not in excluded
    ]
    admitted = [one for one in able if one.version is not None and policy.admits(one.version)]
    if isinstance(decision, Refusal):
        assert not admitted
        assert set(decision.versions) == {one.version for one in able if one.version is not None}
    else:
        chosen = next(one for one in admitted if one.replica == decision.replica)
        peers = [one for one in admitted if one.health is chosen.health]
        assert chosen.in_flight == min(one.in_flight for one in peers)


def test_equals_take_turns() -> None:
    pool = Pool()
    for name in (A, B):
        pool.add(name)
        pool.report(name, SERVING)
    turns: list[ReplicaId] = []
    for _ in range(4):
        place = pool.reserve(RoutingContext())
        assert isinstance(place, Reservation)
        turns.append(place.replica)
        pool.release(place)
    assert turns == [A, B, A, B]


def test_a7_03_a_suspect_waits_behind_every_good_one_and_is_the_last_resort() -> None:
    suspect = replace(GOOD, health=Health.SUSPECT)
    busy = replace(GOOD, replica=B, in_flight=99)
    assert isinstance(first := choose(RoutingContext(), [suspect, busy]), Choice)
    assert first.replica == B
    assert isinstance(choose(RoutingContext(), [suspect]), Choice)


def test_an_unknown_model_is_told_from_no_replica() -> None:
    context = RoutingContext(model="other")
    assert choose(context, [replace(GOOD, model="m")]) == Refusal(kind="not_found")
    assert choose(context, []) == Refusal(kind="unavailable")


def test_a7_14_one_stall_stays_three_put_out_two_goods_bring_back() -> None:
    pool = Pool()
    pool.add(A)
    outcomes = [SERVING, None, SERVING, None, None, None, SERVING, None, SERVING, SERVING]
    for outcome in outcomes:
        pool.report(A, outcome)
    seen: list[Health] = []
    pool = Pool()
    pool.add(A)
    for outcome in outcomes:
        pool.report(A, outcome)
        seen.append(pool.members[A].health)
    good, out = Health.GOOD, Health.EJECTED
    assert seen == [good, good, good, good, good, out, out, out, out, good]


def test_a7_01_a_replica_gets_nothing_before_it_says_that_it_serves() -> None:
    pool = Pool()
    pool.add(A)
    assert pool.reserve(RoutingContext()) == Refusal(kind="unavailable")
    pool.report(A, ProbeReport(status="loading", version=Version(3)))
    assert pool.reserve(RoutingContext()) == Refusal(kind="unavailable")
    pool.report(A, SERVING)
    assert isinstance(pool.reserve(RoutingContext()), Reservation)


def test_load_of_other_gateways_counts_once() -> None:
    pool = Pool()
    for name in (A, B):
        pool.add(name)
        pool.report(name, SERVING)
    pool.report(A, replace(SERVING, in_flight=2))
    chosen = [pool.reserve(RoutingContext()) for _ in range(2)]
    pool.report(B, replace(SERVING, in_flight=2))
    last = pool.reserve(RoutingContext())
    assert [place.replica for place in (*chosen, last) if isinstance(place, Reservation)] == [B, B, A]


def test_joining_twice_and_leaving_twice_are_refused() -> None:
    pool = Pool()
    pool.add(A)
    with pytest.raises(ConflictError):
        pool.add(A)
    pool.remove(A)
    with pytest.raises(NotFoundError):
        pool.remove(A)
    assert pool.report(A, SERVING) is None
    assert pool.lost(A) is None


def test_one_that_drains_waits_behind_every_other_and_is_chosen_where_all_do() -> None:
    draining, busy = replace(GOOD, draining=True), replace(GOOD, replica=ReplicaId("busy"), in_flight=9)
    assert isinstance(first := choose(RoutingContext(), [draining, busy]), Choice)
    assert first.replica == "busy"
    assert isinstance(choose(RoutingContext(), [draining]), Choice)
    suspect = replace(GOOD, health=Health.SUSPECT, replica=ReplicaId("suspect"))
    assert isinstance(second := choose(RoutingContext(), [draining, suspect]), Choice)
    assert second.replica == GOOD.replica
