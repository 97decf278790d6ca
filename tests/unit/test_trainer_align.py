"""The label check's decisions: what counts as a false label, and that shifting makes every label false."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.config.in_flight import InFlight
from slackwater.errors import InvalidInputError
from slackwater.ids import StateDigest, Version
from slackwater.rollout.evidence import PolicySpan, TokenStep, kv_spans, spans
from slackwater.trainer.align import (
    LabelCheck,
    LabelledAnswer,
    LeftOut,
    compared,
    mislabelled,
    replayed_as,
    shifted,
    tolerance,
    touching,
)


def answer(key: int, *versions: int) -> LabelledAnswer:
    return LabelledAnswer(
        key=key,
        prompt_ids=(1,),
        token_ids=tuple(range(len(versions))),
        logprobs=tuple(-1.0 for _ in versions),
        policy=spans(Version(version) for version in versions),
        replica="a",
    )


histories = st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
    lambda counts: st.integers(1, 5).map(
        lambda first: [first + index for index, count in enumerate(counts) for _ in range(count)]
    )
)


def states(*marks: str) -> list[StateDigest]:
    return [StateDigest(mark) for mark in marks]


@given(histories)
def test_a_shift_makes_every_label_false_and_stays_inside_the_chain(versions: list[int]) -> None:
    true = answer(0, *versions)
    for newest in (versions[-1], versions[-1] + 1):
        moved = shifted(true, states(*map(str, range(newest + 1))))
        assert moved is not None
        before = [span.version for span in true.policy]
        after = [span.version for span in moved.policy]
        assert all(abs(left - right) == 1 for left, right in zip(before, after, strict=True))
        assert max(after) <= newest
        assert [(span.start, span.end) for span in moved.policy] == [(span.start, span.end) for span in true.policy]


def test_a_shift_to_a_version_that_changed_nothing_is_none() -> None:
    assert shifted(answer(0, 1), states("a", "b", "b")) == answer(0, 0)
    assert shifted(answer(0, 1), states("b", "b", "b")) is None
    assert shifted(answer(0, 0), states("a")) is None


def test_a_difference_beyond_the_limit_counts_and_a_nan_always_does() -> None:
    assert mislabelled([-1.0, -2.0, math.nan], [-1.0005, -2.1, -1.0], 1e-3) == 2
    assert mislabelled([-1.0], [-1.0], 0.0) == 0


def test_the_tolerance_follows_the_noise_but_has_a_floor() -> None:
    assert tolerance(0.0) == 1e-3
    assert tolerance(0.01) == pytest.approx(0.04)


def test_spans_that_do_not_cover_the_tokens_are_refused() -> None:
    good = answer(0, 1, 1, 2)
    for policy in (
        (PolicySpan(version=Version(1), start=0, end=2),),
        (PolicySpan(version=Version(1), start=0, end=2), PolicySpan(version=Version(1), start=2, end=3)),
        (PolicySpan(version=Version(2), start=1, end=3),),
        (),
    ):
        with pytest.raises(InvalidInputError):
            replace(good, policy=policy)


def test_what_stays_resident_over_the_next_swap_comes_last() -> None:
    early, ending, crossing = answer(0, 1, 2), answer(1, 2, 2), answer(2, 2, 3)
    assert touching([crossing, ending, early, answer(3, 1)], Version(2)) == [early, ending, crossing]


def test_an_answer_over_a_rollback_is_legal_and_does_not_rise() -> None:
    assert answer(0, 7, 8).rises
    assert not answer(0, 8, 8, 7).rises


def span(version: int, start: int, end: int) -> PolicySpan:
    return PolicySpan(version=Version(version), start=start, end=end)


@given(histories, st.integers(1, 9))
def test_kv_as_nobody_changed_it_is_that_of_the_vocabulary(versions: list[int], prompt: int) -> None:
    true = replace(answer(0, *versions), prompt_ids=(1,) * prompt)
    steps = [TokenStep(token_id=0, logprob=-1.0, version=Version(version)) for version in versions]
    assert true.kept_kv == kv_spans(prompt, steps)
    assert replayed_as(replace(true, kv=true.kept_kv)) is InFlight.CONTINUE
    assert replayed_as(true) is InFlight.CONTINUE


PLAIN = replace(answer(0, 1, 1, 2, 2), prompt_ids=(1, 2, 3), prompt_version=Version(1))


@pytest.mark.parametrize(
    ("told", "replayed"),
    [
        (replace(PLAIN, kv=(span(2, 0, 6),)), InFlight.RECOMPUTE),
        (replace(PLAIN, kv=(span(2, 0, 6),), prompt_version=None), LeftOut.OTHER_KV),
        (replace(PLAIN, kv=(span(2, 0, 6),), prompt_version=Version(0)), LeftOut.OTHER_KV),
        (replace(PLAIN, kv=(span(1, 0, 6),)), LeftOut.OTHER_KV),
        (replace(PLAIN, kv=(span(2, 0, 5),)), LeftOut.OTHER_KV),
        (replace(PLAIN, kv=(span(0, 0, 2), span(1, 2, 4), span(2, 4, 6))), LeftOut.OTHER_KV),
        (replace(answer(0, 1, 2, 3), kv=(span(3, 0, 3),), prompt_version=Version(1)), LeftOut.OTHER_KV),
        (replace(answer(0, 1, 1), kv=(span(2, 0, 2),), prompt_version=Version(1)), LeftOut.OTHER_KV),
        (replace(answer(0, 2, 1), kv=(span(1, 0, 2),), prompt_version=Version(2)), LeftOut.FALLS),
        (replace(PLAIN, moved=True), LeftOut.MOVED),
        (replace(PLAIN, kv=PLAIN.kept_kv, moved=True), LeftOut.MOVED),
        (replace(PLAIN, kv=(span(2, 0, 6),), moved=True), LeftOut.MOVED),
    ],
)
def test_an_answer_is_replayed_only_in_the_way_that_its_spans_prove(
    told: LabelledAnswer, replayed: InFlight | LeftOut
) -> None:
    assert replayed_as(told) is replayed


def test_what_was_left_out_is_counted_by_its_reason() -> None:
    check = LabelCheck(
        tokens=1,
        mislabelled=0,
        largest_difference=0.0,
        tolerance=1e-3,
        answers=1,
        unchecked=2,
        shifted=0,
        shifted_caught=0,
        unchecked_because={"versions_fall": 1, "kv_of_other_versions": 1},
    )
    both = check.plus(replace(check, unchecked=3, unchecked_because={"versions_fall": 3}))
    assert (both.unchecked, both.unchecked_because) == (5, {"versions_fall": 4, "kv_of_other_versions": 1})


TOLD = replace(
    answer(0, 1, 2, 2),
    raw_logprobs=(-2.0, -2.0, -2.0),
    masks=(b"a", b"b", b""),
    routes=(b"\0\1", b"\2\3", b"\4\5"),
)
"""Its prompt has one token."""


def made(
    *, logprob: float = -1.0, raw: float | None = -2.0, mask: bytes | None = b"b", routes: bytes | None = b""
) -> TokenStep:
    return TokenStep(token_id=1, logprob=logprob, version=Version(2), raw_logprob=raw, mask=mask, routes=routes)


def test_a_piece_that_was_made_again_agrees_in_all_that_was_told() -> None:
    first, later = TOLD.policy
    steps = [made(routes=b"\2\3"), made(mask=b"", routes=b"\4\5")]
    found = compared(TOLD, later, steps, 1e-3)
    assert (found.tokens, found.mislabelled, found.masks, found.masks_differing) == (2, 0, 2, 0)
    assert (found.routes, found.routes_differing) == (2, 0)
    assert TOLD.routes_of(first) == (b"\0\1",)


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        (made(logprob=-1.1, mask=b"a", routes=b"\0\1"), (1, 0, 0)),
        (made(raw=-2.1, mask=b"a", routes=b"\0\1"), (1, 0, 0)),
        (made(raw=None, mask=b"a", routes=b"\0\1"), (1, 0, 0)),
        (made(logprob=-math.inf, mask=b"a", routes=b"\0\1"), (1, 0, 0)),
        (made(routes=b"\0\1"), (0, 1, 0)),
        (made(mask=None, routes=b"\0\1"), (0, 1, 0)),
        (made(mask=b"a", routes=b"\1\0"), (0, 0, 1)),
        (made(mask=b"a", routes=b"\0\1\0\1"), (0, 0, 1)),
        (made(mask=b"a", routes=None), (0, 0, 1)),
    ],
)
def test_each_kind_of_evidence_can_differ_by_itself(step: TokenStep, wrong: tuple[int, int, int]) -> None:
    found = compared(TOLD, TOLD.policy[0], [step], 1e-3)
    assert (found.mislabelled, found.masks_differing, found.routes_differing) == wrong
    assert math.isfinite(found.largest_difference)


def test_what_was_not_told_is_not_compared() -> None:
    found = compared(answer(0, 2), PolicySpan(version=Version(2), start=0, end=1), [made(raw=None)], 1e-3)
    assert (found.tokens, found.mislabelled, found.masks, found.routes) == (1, 0, 0, 0)


@pytest.mark.parametrize("cut", [{"masks": (b"a",)}, {"routes": (b"\0",)}, {"raw_logprobs": (-1.0, -1.0)}])
def test_evidence_that_does_not_cover_an_answer_is_refused(cut: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="don't cover it"):
        replace(TOLD, **cut)
