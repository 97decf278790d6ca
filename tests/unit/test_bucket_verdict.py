"""What a finding about a store rules out, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.bucket.verdict import Finding, Mode, Outcome, Probe, Verdict, judge
from slackwater.errors import AuthError, SlackwaterError, UnsupportedError

URL = "s3://bucket/runs"
BAD = (Outcome.WRONG, Outcome.DENIED, Outcome.UNSUPPORTED)
BOTH, PUBLISH = {Mode.READ, Mode.PUBLISH}, {Mode.PUBLISH}

HARMLESS = (Probe.SHOWN, Probe.CLOCK, Probe.REPLACE, Probe.SWAP, Probe.ABORT, Probe.DELETE)
"""Whatever comes of these, versions can be published and read."""

STOPS = [
    (Probe.LIST, Outcome.DENIED, BOTH),
    (Probe.ABSENT, Outcome.DENIED, BOTH),
    (Probe.ABSENT, Outcome.WRONG, BOTH),
    (Probe.CREATE, Outcome.DENIED, PUBLISH),
    (Probe.CREATE, Outcome.WRONG, PUBLISH),
    (Probe.CREATE, Outcome.UNSUPPORTED, PUBLISH),
    (Probe.READ, Outcome.WRONG, PUBLISH),
    (Probe.READ, Outcome.DENIED, BOTH),
    (Probe.REFUSE, Outcome.WRONG, PUBLISH),
    (Probe.RANGE, Outcome.WRONG, BOTH),
    (Probe.RANGE, Outcome.DENIED, BOTH),
    (Probe.RANGE_END, Outcome.WRONG, BOTH),
    (Probe.PARTS, Outcome.WRONG, PUBLISH),
    (Probe.PARTS, Outcome.DENIED, PUBLISH),
]


def judged(**but: Outcome) -> Verdict:
    """All is well but these probes, by their names in the enumeration."""
    return judge(Finding(probe=probe, outcome=but.get(probe.name, Outcome.OK), detail="as seen") for probe in Probe)


def ruled_out(verdict: Verdict) -> set[Mode]:
    return {mode for mode in Mode if not verdict.carries(mode)}


def test_a_store_that_does_everything_carries_everything() -> None:
    verdict = judged()
    assert ruled_out(verdict) == set()
    assert [ruling.finding.probe for ruling in verdict.rulings] == list(Probe)
    for mode in Mode:
        verdict.require(mode, URL)


@pytest.mark.parametrize(("probe", "outcome", "stopped"), STOPS)
def test_a_finding_rules_out_what_rests_on_it(probe: Probe, outcome: Outcome, stopped: set[Mode]) -> None:
    assert ruled_out(judged(**{probe.name: outcome})) == stopped


@pytest.mark.parametrize("probe", HARMLESS)
@pytest.mark.parametrize("outcome", Outcome)
def test_nothing_rests_on_what_the_design_does_without(probe: Probe, outcome: Outcome) -> None:
    assert ruled_out(judged(**{probe.name: outcome})) == set()


def test_what_was_not_asked_is_not_vouched_for() -> None:
    verdict = judge([])
    assert ruled_out(verdict) == BOTH
    assert all(ruling.finding.outcome is Outcome.UNTRIED for ruling in verdict.rulings)


def test_a_replicas_key_in_an_empty_bucket_may_read() -> None:
    tried = {Probe.LIST: Outcome.OK, Probe.ABSENT: Outcome.OK, Probe.CREATE: Outcome.DENIED}
    verdict = judge(Finding(probe=probe, outcome=outcome) for probe, outcome in tried.items())
    assert ruled_out(verdict) == PUBLISH


@given(st.dictionaries(st.sampled_from([probe.name for probe in Probe]), st.sampled_from(list(Outcome))))
def test_whatever_stops_reading_stops_publishing_and_says_why(but: dict[str, Outcome]) -> None:
    verdict = judged(**but)
    assert verdict.carries(Mode.READ) or not verdict.carries(Mode.PUBLISH)
    for mode in Mode:
        assert all(ruling.means for ruling in verdict.against(mode))


@given(
    st.dictionaries(st.sampled_from([probe.name for probe in Probe]), st.sampled_from(BAD)),
    st.sampled_from([probe.name for probe in Probe]),
    st.sampled_from(BAD),
)
def test_one_more_fault_never_allows_more(but: dict[str, Outcome], name: str, outcome: Outcome) -> None:
    assert ruled_out(judged(**but)) <= ruled_out(judged(**{name: outcome, **but}))


@pytest.mark.parametrize(
    ("outcome", "error", "hint"),
    [(Outcome.DENIED, AuthError, "right to put"), (Outcome.WRONG, UnsupportedError, "If-None-Match")],
)
def test_a_refusal_is_typed_and_says_what_to_do(outcome: Outcome, error: type[SlackwaterError], hint: str) -> None:
    verdict = judged(CREATE=outcome)
    verdict.require(Mode.READ, URL)
    with pytest.raises(error, match=rf"{URL} can't be used to publish: .*; as seen") as refused:
        verdict.require(Mode.PUBLISH, URL)
    assert hint in refused.value.hint
