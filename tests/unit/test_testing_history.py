from dataclasses import replace
from typing import Final

import pytest

from slackwater.ids import BootId, ReplicaId, RequestId, RunId, StateDigest, Version
from slackwater.rollout.evidence import Finish, Origin, PolicySpan, TokenStep
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.history import (
    CHECKS,
    Accepted,
    Called,
    Ended,
    Event,
    Healed,
    Labelled,
    Published,
    Sampled,
    Seen,
    Steered,
    Stopped,
    Violation,
    answers,
    check,
)
from slackwater.testing.stamp import replayed

REPLICA: Final = ReplicaId("replica-0")
BOOT: Final = BootId("boot-1")
MARKS: Final = (11, 22, 33)


def published(version: int, state: str = "") -> Published:
    return Published(version=Version(version), state=StateDigest(state or f"s{version}"), mark=MARKS[version])


def labelled(version: int, *, boot: BootId = BOOT, at: float = 0.0) -> Labelled:
    return Labelled(replica=REPLICA, boot=boot, version=Version(version), at=at)


def steered(goal: int | None) -> Steered:
    return Steered(replica=REPLICA, goal=None if goal is None else Version(goal))


def asked(name: str = "r1", prompt: tuple[int, ...] = (1, 2, 3), *, state: str = "serving", **policy: int) -> Accepted:
    request = CompletionRequest(
        request_id=RequestId(name),
        prompt_ids=prompt,
        sampling=SamplingSpec(max_tokens=4),
        policy=PolicyConstraint(**{bound: Version(version) for bound, version in policy.items()}),  # type: ignore[arg-type]
    )
    return Accepted(replica=REPLICA, boot=BOOT, request=request, state=state)


def answered(accepted: Accepted, *versions: int, cached: int = 0, built_by: int | None = None) -> list[Event]:
    """A whole answer, by these versions, with nothing wrong in it."""
    request, steps = accepted.request, list[TokenStep]()
    events: list[Event] = [accepted]
    prompt_version = Version(versions[0] if built_by is None else built_by)
    origin = Origin(
        replica=REPLICA, boot=BOOT, run=RunId("demo"), seed=5, cached_tokens=cached, prompt_version=prompt_version
    )
    for index, version in enumerate(versions):
        finish = Finish.LENGTH if index == len(versions) - 1 else None
        blank = TokenStep(token_id=0, logprob=0.0, version=Version(version), finish=finish)
        token, logprob = replayed(request, 5, [*steps, blank], dict(enumerate(MARKS)))[-1]  # type: ignore[arg-type]
        steps.append(replace(blank, token_id=token, logprob=logprob))
        events.append(Sampled(request=request.request_id, origin=origin, step=steps[-1]))
    return [*events, Ended(request=request.request_id, finish=Finish.LENGTH)]


def changed(events: list[Event], index: int, **fields: object) -> list[Event]:
    """The same, but for one token."""
    one = events[index]
    assert isinstance(one, Sampled)
    step = replace(one.step, **fields)  # type: ignore[arg-type]
    return [*events[:index], replace(one, step=step), *events[index + 1 :]]


START: Final[list[Event]] = [published(0), labelled(0), published(1), labelled(1)]
GOOD: Final = answered(asked(), 0, 0, 1, 1)


def found(*events: Event) -> list[str]:
    return [violation.check for violation in check(events)]


def test_a_right_history_has_no_violation() -> None:
    reuse = answered(asked("r2"), 0, 0, 0, 0, cached=3)
    assert found(*START, *GOOD, *reuse, Called(what="a target", seconds=1.0, limit_s=30.0)) == []
    assert found() == []


def test_a_violation_says_its_number_and_what() -> None:
    assert str(Violation(check="I5", message="r1 has 0 ends")) == "I5: r1 has 0 ends"
    assert list(CHECKS) == [f"I{number}" for number in range(1, 11)]


@pytest.mark.parametrize("index", range(1, 5))
@pytest.mark.parametrize("wrong", ["version", "token_id", "logprob"])
def test_i1_any_token_that_its_label_does_not_make(index: int, wrong: str) -> None:
    one = GOOD[index]
    assert isinstance(one, Sampled)
    step = one.step
    values = {"version": 1 - step.version, "token_id": step.token_id ^ 1, "logprob": step.logprob + 2**-52}
    (violation, *_) = [v for v in check([*START, *changed(GOOD, index, **{wrong: values[wrong]})]) if v.check == "I1"]
    assert violation.message.startswith(f"token {index - 1} of r1 is not what version")


def test_i2_a_label_before_its_commit() -> None:
    early = answered(asked(), 2)
    assert found(*START, *early, published(2)) == ["I2"]
    assert found(labelled(0), published(0)) == ["I2"]
    assert found(*START, published(2), *early) == []


def test_i2_a_version_that_the_request_does_not_admit() -> None:
    assert found(*START, *answered(asked(min_version=1), 0, 1)) == ["I2"]
    assert found(*START, *answered(asked(exact_version=0), 0, 1)) == ["I2"]
    assert found(*START, *answered(asked(min_version=1), 1, 1)) == []
    assert found(*START, *answered(asked(min_version=1), 1, 0)) == []  # a rollback: the bound is the first token's


def test_i3_a_version_that_falls_unasked() -> None:
    assert found(*START, labelled(0)) == ["I3"]
    assert found(*START, steered(None), labelled(0)) == ["I3"]
    assert found(*START, steered(1), labelled(0)) == ["I3"]
    assert found(*START, steered(0), labelled(0)) == []
    assert found(*START, steered(0), steered(None), labelled(0), labelled(1)) == []
    assert found(*START, replace(labelled(0), mended=True)) == []
    assert found(*START, steered(0), labelled(0), steered(None), labelled(1), labelled(0)) == ["I3"]
    assert found(*START, Stopped(replica=REPLICA), labelled(0, boot=BootId("boot-2"))) == []


def test_i4_a_version_of_two_states() -> None:
    seen = Seen(reader="replica-0", version=Version(1), state=StateDigest("s1"))
    assert found(*START, seen) == []
    assert found(*START, replace(seen, state=StateDigest("s0"))) == ["I4"]
    assert found(*START, published(1, "another")) == ["I4"]


def test_i5_a_request_without_an_end_or_with_two() -> None:
    assert found(*START, *GOOD[:-1]) == ["I5"]
    assert found(*START, *GOOD, Ended(request=RequestId("r1"), finish=None, error="replica_lost")) == ["I5"]
    assert found(*START, asked()) == ["I5"]
    assert found(*START, asked(), Ended(request=RequestId("r1"), finish=None, error="policy_unmet")) == []


def test_i5_a_token_after_the_end_and_an_answer_that_nobody_asked_for() -> None:
    assert "I5" in found(*START, *GOOD[:-2], GOOD[-1], GOOD[-2])
    assert found(Ended(request=RequestId("r9"), finish=Finish.ABORT)) == ["I5"]


def test_i6_evidence_that_does_not_cover_the_tokens() -> None:
    start = [*START]
    assert found(*start, *changed(GOOD, 4, top_ids=(1, 2), top_logprobs=(-1.0,))) == ["I6"]
    assert found(*start, *changed(GOOD, 2, finish=Finish.STOP)) == ["I6"]
    assert found(*start, *changed(GOOD, 4, finish=None)) == ["I6"]
    assert found(*start, *changed(GOOD, 4, finish=Finish.STOP)) == ["I6"]
    assert found(*start, *answered(asked(), 0, 0, 0, 0, 0)) == ["I6"]


def test_i6_another_token_than_was_forced_and_two_origins() -> None:
    forced = asked()
    forced = replace(forced, request=replace(forced.request, forced_ids=(9, 8)))
    right = answered(forced, 0, 0)
    assert found(*START, *right) == []
    assert "I6" in found(*START, *changed(right, 1, token_id=7))
    second = GOOD[2]
    assert isinstance(second, Sampled)
    moved = replace(second, origin=replace(second.origin, boot=BootId("boot-2")))
    assert found(*START, *GOOD[:2], moved, *GOOD[3:]) == ["I6"]


def test_i6_a_move_that_is_told_and_one_that_is_not_told_right() -> None:
    first = GOOD[1]
    assert isinstance(first, Sampled)
    by = replace(first.origin, replica=ReplicaId("replica-1"), boot=BootId("boot-7"))
    kv = (PolicySpan(version=Version(0), start=0, end=4),)
    assert found(*START, *changed(GOOD, 2, moved=by, kv=kv)) == []
    assert found(*START, *changed(GOOD, 2, moved=by)) == ["I6"]
    assert found(*START, *changed(GOOD, 2, moved=replace(by, seed=6), kv=kv)) == ["I6"]
    assert found(*START, *changed(GOOD, 2, moved=replace(by, run=RunId("other")), kv=kv)) == ["I6"]
    assert found(*START, *changed(GOOD, 1, moved=by, kv=(replace(kv[0], end=3),))) == ["I6"]
    later = changed(GOOD, 3, moved=by, kv=(replace(kv[0], end=4), PolicySpan(version=Version(1), start=4, end=5)))
    third = later[3]
    assert isinstance(third, Sampled)
    assert "I6" not in found(*START, *later[:3], replace(third, origin=by), *later[4:])


@pytest.mark.parametrize("state", ["starting", "retired", "closed"])
def test_i7_a_request_taken_by_one_that_does_not_serve(state: str) -> None:
    assert found(*START, *answered(asked(state=state), 0)) == ["I7"]


def test_i8_kv_of_another_version_or_of_nobody() -> None:
    first = answered(asked("r0"), 0)
    assert found(*START, *first, *answered(asked("r1"), 1, cached=3)) == ["I8"]
    assert found(*START, *answered(asked("r1"), 0, cached=1)) == ["I8"]
    assert found(*START, *first, *answered(asked("r1", (1, 2, 4)), 0, cached=3)) == ["I8"]
    assert found(*START, *first, *answered(asked("r1", (1, 2, 4)), 0, cached=2)) == []
    assert found(*START, *answered(asked(), 1, built_by=0)) == ["I8"]


def test_i8_one_that_was_cut_before_its_first_token_may_have_built_rows() -> None:
    cut = [asked("r0"), Ended(request=RequestId("r0"), finish=Finish.ABORT)]
    assert found(*START, *cut, *answered(asked("r1"), 1, cached=3)) == []


def test_i9_a_call_beyond_its_bound() -> None:
    assert found(Called(what="a target", seconds=30.5, limit_s=30.0)) == ["I9"]


def test_i10_a_replica_that_does_not_reach_the_target_in_time() -> None:
    healed = Healed(target=Version(1), at=10.0, within_s=5.0)
    assert found(published(0), labelled(0), healed) == ["I10"]
    assert found(published(0), labelled(0), published(1), healed, labelled(1, at=15.5)) == ["I10"]
    assert found(published(0), labelled(0), published(1), healed, labelled(1, at=15.0)) == []
    assert found(published(0), labelled(0), Stopped(replica=REPLICA), healed) == []


def test_answers_join_what_belongs_together() -> None:
    (first, second) = answers([*GOOD, asked("r2")])
    assert (first.name, len(first.steps), len(first.ends)) == ("r1", 4, 1)
    assert (second.name, second.steps, second.ends) == ("r2", (), ())
