"""Bodies: bounds first, names in every refusal, defaults as documented."""

import json
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.api.asking import DEFAULT_MAX_TOKENS, chat_wanted, requests, text_wanted
from slackwater.api.faults import STATUS, Fault, fault, rebuild
from slackwater.api.schema import Sampled, TextBody, read_chat, read_text
from slackwater.errors import InvalidInputError, PolicyUnmetError, SlackwaterError, UnsupportedError
from slackwater.ids import Version
from slackwater.rollout.request import CompletionRequest, PolicyConstraint

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def ask(fields: dict[str, object], *, window: int = 100) -> tuple[CompletionRequest, ...]:
    body = read_text(json.dumps({"prompt": [1, 2, 3], **fields}).encode())
    return requests(body, text_wanted(body), (1, 2, 3), window=window, request_id="r", model="m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e6),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 2),
        ("top_k", -2),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("seed", -1),
        ("stop", ["x"] * 500_000),
        ("stop", ["x" * 257]),
        ("stop", ""),
        ("stop_token_ids", list(range(65))),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [-(2**63)]),
        ("top_logprobs_as_logprobs", 21),
        ("forced_token_ids", [1] * 98),
        ("policy", {"min_version": -1}),
        ("policy", {"max_lag": -1}),
        ("policy", {"max_lag": 1, "exact_version": 2}),
        ("cache_salt", "x" * 257),
        ("policy", {"kv": "other"}),
        ("policy", {"kv": True}),
        ("policy", {"kv": ""}),
        ("policy", {"min_version": "3"}),
        ("stop_token_ids", [1, "x"]),
        ("temperature", True),
        ("temperature", "hot"),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1000),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"5": 1, "05": 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 98),
        ("ignore_eos", 1),
        ("engine_data", {"raw_logprobs": 1}),
        ("engine_data", {"from_the_future": True}),
        ("nvext", {"extra_fields": ["timing"]}),
    ],
)
def test_a8_15_what_is_out_of_range_is_refused(field: str, value: object) -> None:
    name = "logprobs" if field == "top_logprobs_as_logprobs" else field
    with pytest.raises(InvalidInputError) as refused:
        ask({name: value})
    assert fault(refused.value).param == field.removesuffix("_as_logprobs")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"x":' + b"[" * 99_999]
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        read_text(body)


def test_a8_15_numbers_that_json_lacks_are_refused() -> None:
    for number in (b"NaN", b"Infinity", b"1e999"):
        with pytest.raises(InvalidInputError):
            read_text(b'{"prompt": "x", "temperature": ' + number + b"}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("bad_words", ["x"] * 50_000),
        ("best_of", 2),
    ],
)
def test_fields_that_ask_for_what_we_lack_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as refused:
        ask({field: value})
    assert fault(refused.value).param == field


@pytest.mark.parametrize("read", [read_chat, read_text])
@pytest.mark.parametrize(("field", "value"), [("temprature", 0.5), ("use_beam_search", True), ("eta_cutoff", 1e-3)])
def test_a8_11_a_field_that_is_not_known_is_refused_by_its_name(
    read: Callable[[bytes], Sampled], field: str, value: object
) -> None:
    shapes = {"messages": [{"role": "user", "content": "x"}]} if read is read_chat else {"prompt": "x"}
    assert read(msgspec.json.encode({**shapes, "user": "me"}))
    with pytest.raises(UnsupportedError, match=field) as refused:
        read(msgspec.json.encode({**shapes, field: value}))
    assert fault(refused.value).param == field
    assert ("was temperature meant" in refused.value.hint) is (field == "temprature")


def test_neutral_values_and_fields_without_effect_pass() -> None:
    fields: dict[str, object] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "user": "me",
        "metadata": {"a": "b"},
        "skip_special_tokens": True,
        "from_the_future": {},
    }
    assert len(ask(fields)) == 1


def test_sampling_fields_arrive_as_they_were_sent() -> None:
    fields: dict[str, object] = {
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    sampling = ask({**fields, "logit_bias": {"5": 1.5, "0": -100}})[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == ((5, 1.5), (0, -100.0))
    assert sampling.named_ids == (5, 0)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, (False, False, False)),
        ({"engine_data": False}, (False, False, False)),
        ({"engine_data": True}, (True, False, False)),
        ({"engine_data": {}}, (True, False, False)),
        ({"engine_data": {"raw_logprobs": True}}, (True, True, False)),
        ({"engine_data": {"sampling_mask": True}}, (True, False, True)),
        ({"nvext": {"annotations": ["x"]}}, (False, False, False)),
        ({"nvext": {"extra_fields": ["engine_data"]}}, (True, False, False)),
        ({"nvext": {"extra_fields": ["sampling_mask", "raw_logprobs"]}}, (True, True, True)),
    ],
)
def test_evidence_is_asked_for_part_by_part(fields: dict[str, object], shown: tuple[bool, bool, bool]) -> None:
    body = read_text(json.dumps({"prompt": "x", **fields}).encode())
    wanted = text_wanted(body)
    assert (wanted.engine_data, wanted.raw_logprobs, wanted.sampling_mask) == shown
    sampling = ask(fields)[0].sampling
    assert (sampling.raw_logprobs, sampling.sampling_mask) == shown[1:]


def test_defaults_take_what_is_left_of_the_window() -> None:
    assert ask({})[0].sampling.max_tokens == 97
    assert ask({}, window=10**6)[0].sampling.max_tokens == DEFAULT_MAX_TOKENS
    assert ask({"forced_token_ids": [5, 6]})[0].sampling.max_tokens == 2
    with pytest.raises(InvalidInputError, match="window"):
        ask({}, window=3)


def test_choices_draw_with_consecutive_seeds() -> None:
    asked = ask({"n": 3, "seed": 40, "top_k": -1, "policy": {"exact_version": 4}})
    assert [request.sampling.seed for request in asked] == [40, 41, 42]
    assert len({request.request_id for request in asked}) == 3
    assert {str(request.policy) for request in asked} == {"exact_version=4"}


@pytest.mark.parametrize(
    ("policy", "any_kv"),
    [(None, False), ({}, False), ({"kv": None}, False), ({"kv": "same"}, False), ({"kv": "any"}, True)],
)
def test_kv_of_any_version_is_taken_where_it_is_asked_for(policy: object, *, any_kv: bool) -> None:
    assert ask({"policy": policy})[0].policy == PolicyConstraint(any_kv=any_kv)


def test_a_wrong_value_within_a_field_is_named_with_its_place() -> None:
    with pytest.raises(InvalidInputError, match=r"policy is wrong: .*, at policy\.kv"):
        ask({"policy": {"kv": "other"}})


@pytest.mark.parametrize(("top", "expected"), [(None, 0), (0, 0), (5, 5)])
def test_a3_07_logprobs_with_and_without_alternatives(top: int | None, expected: int) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": top}
    wanted = chat_wanted(read_chat(json.dumps(body).encode()))
    assert wanted.logprobs
    assert wanted.top_logprobs == expected


def test_a_chat_body_prefers_max_completion_tokens() -> None:
    raw = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 7}
    body = read_chat(json.dumps(raw).encode())
    asked = requests(body, chat_wanted(body), (1,), window=99, request_id="r", model="m")
    assert asked[0].sampling.max_tokens == 7


def test_messages_are_text_in_parts_or_whole() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_chat(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert body.messages[0].plain() == {"role": "user", "content": "ab"}
    image = read_chat(json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode())
    with pytest.raises(UnsupportedError):
        image.messages[0].plain()


@given(fields=st.dictionaries(st.sampled_from(sorted(TextBody.__struct_fields__)), JSON))
def test_a8_15_any_body_is_admitted_or_refused_in_words(fields: dict[str, object]) -> None:
    with suppress(InvalidInputError, UnsupportedError):
        ask(fields)


def test_every_error_comes_back_as_itself() -> None:
    for kind in STATUS:
        seen = rebuild(fault(rebuild(fault(_error(kind)))))
        assert (seen.kind, seen.message, seen.hint) == (kind, "it broke", "mend it")
    unmet = rebuild(fault(PolicyUnmetError("no", versions=(3, 4))))
    assert isinstance(unmet, PolicyUnmetError)
    assert unmet.versions == (3, 4)


def _error(kind: str) -> SlackwaterError:

    return rebuild(Fault(message="it broke (mend it)", type=kind, hint="mend it"))


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"temperature": "hot"}, "temperature", "send float or null"),
        ({"policy": {"newest": 1}}, "policy", "leave it out; there are: min_version, exact_version, max_lag, kv"),
        ({"policy": {"kv": "some"}}, "policy", "one of: any, same"),
        ({"response_format": {"type": "xml"}}, "response_format", "one of: json_object, json_schema, text"),
        ({"nvext": {"extra_fields": ["all"]}}, "nvext", "one of: engine_data, raw_logprobs, routed_experts"),
        ({"forced_routes": {"dtype": "uint8", "shape": [1]}}, "forced_routes", "add data"),
        ({"max_tokens": -1}, "max_tokens", "allowed: 0 to 1000000"),
        ({"max_tokens": 0, "min_tokens": 1}, "max_tokens", "leave these out"),
        ({"top_k": -2}, "top_k", "allowed: -1 to 1000000"),
        ({"policy": {"max_lag": -1}}, "policy", "it counts from 0"),
        ({"policy": {"max_lag": 1, "exact_version": 1}}, "policy", "leave one of them out"),
        ({"policy": {"min_version": 3, "exact_version": 1}}, "policy", "no version can meet both: drop one"),
    ],
    ids=str,
)
def test_a8_11_what_is_wrong_is_named_with_what_to_send(fields: dict[str, object], param: str, hint: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ask(fields)
    assert (fault(refused.value).param, refused.value.hint[: len(hint)]) == (param, hint)


def test_a_body_that_lacks_a_field_names_it() -> None:
    with pytest.raises(InvalidInputError, match=r"^messages is wrong: .*add messages") as refused:
        read_chat(b"{}")
    assert fault(refused.value).param == "messages"
    with pytest.raises(InvalidInputError, match=r"at messages\[0\].role .one of: assistant, developer, system"):
        read_chat(b'{"messages": [{"role": "robot"}]}')


def test_a_version_that_is_past_is_not_waited_for() -> None:
    old, new = PolicyConstraint(exact_version=Version(3)), PolicyConstraint(min_version=Version(9))
    assert "hot-load version 3" in old.way_out((Version(5), Version(7)))
    for policy, held in ((old, (Version(2), Version(5))), (old, ()), (new, (Version(5),))):
        assert policy.way_out(held) == "retry once the fleet has swapped"
