"""Canaries: what is a good one, the same after the wire to the last bit, and which token is told to be off."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.canary import DEFAULT_TOLERANCE, MAX_PROMPT, MAX_TOKENS, Canary, first_off
from slackwater.checkpoint.manifest import FORMAT, Bodies, Manifest, Parent, Tiles, encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import InvalidInputError
from slackwater.ids import RunId, StateDigest, Version

STATE = StateDigest("b" * 64)
PARTS: dict[str, Any] = {"prompt": (1, 2), "tokens": (3, 4, 5), "logprobs": (-0.5, -2.0, 0.0)}
IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


@st.composite
def canaries(draw: st.DrawFn) -> Canary:
    scored = draw(st.lists(st.tuples(IDS, LOGPROBS), min_size=1, max_size=MAX_TOKENS))
    return Canary(
        prompt=tuple(draw(st.lists(IDS, min_size=1, max_size=MAX_PROMPT))),
        tokens=tuple(token for token, _ in scored),
        logprobs=tuple(logprob for _, logprob in scored),
        tolerance=draw(st.floats(0, 100, exclude_min=True)),
    )


def empty(canary: Canary | None) -> Manifest:
    """A delta that changes nothing."""
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(8),
        kind="delta",
        parent=Parent(version=Version(7), state=STATE),
        state=STATE,
        step=8,
        created_at="2026-01-01T00:00:00+00:00",
        objects=(),
        bodies=Bodies(object=(), length=(), encoding="", tiles=()),
        tiles=Tiles(number=(), changed=(), digests="", sums=""),
        canary=canary,
    )


@given(canaries())
def test_a_canary_comes_back_from_a_manifest_bit_for_bit(canary: Canary) -> None:
    body = encode_manifest(empty(canary))
    read = decode_manifest(body)
    assert read.canary == canary
    assert read.state == STATE
    assert encode_manifest(read) == body
    assert read.canary is not None
    signs = [math.copysign(1, number) for number in canary.logprobs]
    assert [math.copysign(1, number) for number in read.canary.logprobs] == signs


@given(canaries())
def test_another_json_reader_gets_the_same_numbers_in_no_more_digits_than_needed(canary: Canary) -> None:
    body = encode_manifest(empty(canary)).decode()
    spelled = json.loads(body, parse_float=str)["canary"]
    for number, text in zip(
        (*canary.logprobs, canary.tolerance), (*spelled["logprobs"], spelled["tolerance"]), strict=True
    ):
        assert float(text) == number
        assert digits(text) == digits(repr(number))


def digits(text: str) -> str:
    """Significant ones."""
    return text.lower().partition("e")[0].replace("-", "").replace(".", "").strip("0")


def test_without_a_canary_a_manifest_says_nothing_of_it() -> None:
    assert b"canary" not in encode_manifest(empty(None))
    assert json.loads(encode_manifest(empty(Canary(**PARTS))))["canary"]["tolerance"] == DEFAULT_TOLERANCE == 0.25


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("prompt", (), "canary.prompt: 0 token ids, and 1 to 512 are admitted"),
        ("prompt", (1,) * 513, "canary.prompt: 513 token ids"),
        ("prompt", [1], "canary.prompt: it is a list, not a tuple"),
        ("prompt", "1", "canary.prompt: it is a str"),
        ("prompt", (1, 2**31), "canary.prompt: number 1 is no token id: an int from 0 to 2147483647"),
        ("prompt", (-1,), "canary.prompt: number 0"),
        ("prompt", (True,), "canary.prompt: number 0"),
        ("prompt", (1.0,), "canary.prompt: number 0"),
        ("prompt", (10**9999,), "canary.prompt: number 0"),
        ("tokens", (1,) * 65, "canary.tokens: 65 token ids, and 1 to 64 are admitted"),
        ("tokens", (), "canary.tokens: 0 token ids"),
        ("tokens", (1, 2), "canary.logprobs: 3 for 2 tokens"),
        ("tokens", None, "canary.tokens: it is a NoneType"),
        ("logprobs", [-0.5, -2.0, 0.0], "canary.logprobs: it is a list"),
        ("logprobs", (-0.5, -2.0, math.nan), "canary.logprobs: number 2 is no finite float of 0 or less"),
        ("logprobs", (-0.5, -math.inf, 0.0), "canary.logprobs: number 1"),
        ("logprobs", (0.5, -2.0, 0.0), "canary.logprobs: number 0"),
        ("logprobs", (-1, -2.0, 0.0), "canary.logprobs: number 0"),
        ("logprobs", (-0.5, -2.0, False), "canary.logprobs: number 2"),
        ("tolerance", 0.0, "canary.tolerance"),
        ("tolerance", -1.0, "canary.tolerance"),
        ("tolerance", 100.5, "canary.tolerance"),
        ("tolerance", math.nan, "canary.tolerance"),
        ("tolerance", math.inf, "canary.tolerance"),
        ("tolerance", True, "canary.tolerance"),
        ("tolerance", 1, "canary.tolerance"),
        ("tolerance", None, "canary.tolerance"),
    ],
)
def test_a_bad_canary_is_refused_where_it_is_made_and_the_part_named(part: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Canary(**{**PARTS, part: value})
    assert told in caught.value.message


def test_bounds_are_inside() -> None:
    canary = Canary(prompt=(0,) * 512, tokens=(2**31 - 1,) * 64, logprobs=(-1.7e308,) * 64, tolerance=100.0)
    assert decode_manifest(encode_manifest(empty(canary))).canary == canary


# What is off


@given(canaries())
def test_what_is_expected_is_not_off(canary: Canary) -> None:
    assert first_off(canary, canary.logprobs) is None
    assert first_off(canary, list(canary.logprobs)) is None


@pytest.mark.parametrize("moved", [-0.25, -0.125, 0.125, 0.25])
def test_up_to_the_tolerance_and_at_it_nothing_is_off(moved: float) -> None:
    canary = Canary(**PARTS, tolerance=0.25)
    assert first_off(canary, [number + moved for number in canary.logprobs]) is None


def test_the_first_token_that_is_off_is_named_with_how_far() -> None:
    canary = Canary(**PARTS, tolerance=0.25)
    assert first_off(canary, (-0.5, -2.75, -9.0)) == (
        "the canary's token 2 of 3, id 4, has log-probability -2.75 instead of -2: off by 0.75 nats, where 0.25 are "
        "tolerated"
    )


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf, 1e308])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_finite_number_is_off_whatever_is_tolerated(wrong: float, place: int) -> None:
    canary = Canary(**PARTS, tolerance=100.0)
    found = [*canary.logprobs]
    found[place] = wrong
    told = first_off(canary, found)
    assert told is not None
    assert f"token {place + 1} of 3, id {canary.tokens[place]}" in told


@pytest.mark.parametrize("count", [0, 2, 4])
def test_too_many_or_too_few_are_off(count: int) -> None:
    found = (-0.5, -2.0, 0.0, -1.0)[:count]
    assert first_off(Canary(**PARTS), found) == f"{count} log-probabilities were found for the canary's 3 tokens"


@given(canaries(), st.data())
def test_one_token_beyond_the_tolerance_is_always_found(canary: Canary, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(canary.tokens) - 1))
    found = [*canary.logprobs]
    found[place] = data.draw(st.floats().filter(lambda got: not abs(got - found[place]) <= canary.tolerance))
    told = first_off(canary, found)
    assert told is not None
    assert f"token {place + 1} of {len(found)}, id {canary.tokens[place]}," in told
