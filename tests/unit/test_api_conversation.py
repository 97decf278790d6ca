"""Conversations: rendered by the model's own template, gone on from by ids, refused in words."""

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from chat_rig import THINKING, TOOLS, tokenizer_with
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from slackwater.api.appending import extended, kept
from slackwater.api.asking import chat_wanted
from slackwater.api.conversation import conversation, parsing
from slackwater.api.faults import STATUS, fault, rebuild
from slackwater.api.parsing.families import REASONING_FORMATS, TOOL_FORMATS
from slackwater.api.parsing.reader import said
from slackwater.api.schema import ChatBody, read_chat
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import ContextLengthError, ForkError, InvalidInputError, UnsupportedError
from slackwater.testing.tiny_model import END_OF_TEXT, IM_END, IM_START, TINY_CHAT_TEMPLATE

HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "tide"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sea"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("thinking"), THINKING)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("plain"), TINY_CHAT_TEMPLATE)


def read(messages: list[Any], **fields: Any) -> ChatBody:
    return read_chat(json.dumps({"messages": messages, **fields}).encode())


def shown(tokenizer: ChatTokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(map(tokenizer.table.piece, ids)).decode()


def rendered(tokenizer: ChatTokenizer, messages: list[Any], **fields: Any) -> str:
    told = conversation(read(messages, **fields))
    return shown(tokenizer, tokenizer.render(told.messages, style=told.style))


def appended(tokenizer: ChatTokenizer, prior: list[int], messages: list[Any], **fields: Any) -> tuple[int, ...]:
    told = conversation(read(messages, prior_token_ids=prior, **fields))
    return tokenizer.extend(told.prior_ids, told.messages, style=told.style, forks=told.forks)


def test_tools_calls_results_and_reasoning_reach_the_template(tokenizer: ChatTokenizer) -> None:
    text = rendered(tokenizer, [HI, CALLED, RESULT], tools=TOOLS)
    assert text.startswith("<|im_start|>system\n" + json.dumps(TOOLS[0]) + "\n")
    assert '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {"word": "tide"}}' in text
    assert "<tool_response>\nsea\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def test_settings_of_the_template_are_the_callers(tokenizer: ChatTokenizer) -> None:
    off = rendered(tokenizer, [HI], chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("assistant\n<think>\n\n</think>\n\n")
    assert rendered(tokenizer, [HI], add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_a_last_message_can_be_gone_on_from(tokenizer: ChatTokenizer) -> None:
    text = rendered(tokenizer, [HI, {"role": "assistant", "content": "Well, "}], continue_final_message=True)
    assert text.endswith("</think>\n\nWell, ")


def test_a_template_that_joins_arguments_gets_them_as_text(tmp_path: Path) -> None:
    joins = "{% for m in messages %}{% for c in m.tool_calls %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert rendered(tokenizer_with(tmp_path, joins), [HI, CALLED]) == 'x{"word":"tide"}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for m in range(10 ** 12) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
    ],
)
def test_what_a_template_refuses_is_the_callers_fault(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidInputError, match="template"):
        rendered(tokenizer_with(tmp_path, template, tool_parser="none", reasoning_parser="none"), [HI])


@pytest.mark.parametrize(
    ("messages", "fields", "error"),
    [
        ([HI], {"tools": [{"type": "function"}]}, "tools"),
        ([HI], {"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools"),
        ([HI], {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
        ([HI], {"tools": [TOOLS[0]] * 1025}, "tools"),
        ([HI], {"continue_final_message": True}, "continue_final_message"),
        ([HI, CALLED], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([HI], {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ([HI], {"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ([HI], {"chat_template_kwargs": {f"k{number}": 1 for number in range(33)}}, "chat_template_kwargs"),
        ([HI], {"chat_template_kwargs": {"long": "x" * 20_000}}, "chat_template_kwargs"),
        ([HI], {"append": "fork"}, "append"),
        ([HI], {"prior_token_ids": []}, "prior_token_ids"),
        ([CALLED], {"prior_token_ids": [1], "continue_final_message": True}, "prior_token_ids"),
        ([{"role": "system", "content": "x"}], {"prior_token_ids": [1]}, "messages"),
        ([CALLED], {"prior_token_ids": [1]}, "messages"),
        (
            [{**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, HI],
            {},
            "messages",
        ),
    ],
)
def test_what_contradicts_itself_or_is_too_much_is_refused_by_name(
    messages: list[Any], fields: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        conversation(read(messages, **fields))
    assert refused.value.message.startswith(error)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_calls_cannot_be_demanded(choice: object) -> None:
    with pytest.raises(UnsupportedError, match="tool_choice"):
        chat_wanted(read([HI], tools=TOOLS, tool_choice=choice))


def test_no_setting_reaches_an_argument_of_the_library() -> None:
    taken = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    taken |= {*inspect.signature(render_jinja_template).parameters}
    for name in taken - {"kwargs"}:
        with pytest.raises(InvalidInputError):
            conversation(read([HI], chat_template_kwargs={name: 1}))


def test_calls_are_looked_for_where_tools_are_given() -> None:
    think, hermes = REASONING_FORMATS["think"], TOOL_FORMATS["hermes"]
    assert parsing(read([HI], tools=TOOLS), think, hermes).tools is hermes
    assert parsing(read([HI], tools=TOOLS, tool_choice="none"), think, hermes).tools is None
    assert parsing(read([HI]), think, hermes).tools is None
    assert parsing(read([HI]), None, hermes).reader("<think>") is None


@pytest.mark.parametrize(
    ("begun", "thought"), [("<think>a", "b"), ("<think>a</think>c", ""), ("", ""), ("</think><think>", "b")]
)
def test_reasoning_in_a_message_that_is_gone_on_from_goes_on(begun: str, thought: str) -> None:
    body = read([HI, {"role": "assistant", "content": begun}], continue_final_message=True)
    reader = parsing(body, REASONING_FORMATS["think"], None).reader("x")
    assert reader
    assert said(reader.push("b</think>"))[:2] == ((thought, "") if thought else ("", "b</think>"))


def test_a3_14_a3_16_a_next_prompt_is_the_ids_so_far_and_what_the_template_adds(tokenizer: ChatTokenizer) -> None:
    first = list(tokenizer.render([HI]))
    # Cut otherwise than the tokenizer would: bytes alone, no merged pairs. And reasoning that the template leaves out.
    said = [*b'hm</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>', IM_END]
    prior = first + said
    ids = appended(tokenizer, prior, [RESULT], tools=TOOLS)
    assert list(ids[: len(prior)]) == prior
    bridge = "\n<|im_start|>user\n<tool_response>\nsea\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert shown(tokenizer, ids[len(prior) :]) == bridge
    again = appended(tokenizer, [*ids, *b"ok", IM_END], [HI], chat_template_kwargs={"enable_thinking": False})
    assert ids == again[: len(ids)]
    assert shown(tokenizer, again).endswith("ok<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n" + OFF)
    whole = tokenizer.render([HI, {"role": "assistant", "content": "x", "reasoning_content": "hm"}, HI])
    assert whole[: len(first)] != tuple(first)  # what appending is for


OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_an_answer_that_was_cut_is_ended_by_the_template(plain: ChatTokenizer) -> None:
    prior = [*plain.render([HI]), *b"cut"]
    ids = appended(plain, prior, [HI])
    assert list(ids[: len(prior)]) == prior
    assert shown(plain, ids[len(prior) :]) == "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_ended_otherwise_than_the_template_ends_it_is_a_fork(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}))
    tokenizer = tokenizer_with(tmp_path, TINY_CHAT_TEMPLATE)
    prior = [IM_START, 65, END_OF_TEXT]
    with pytest.raises(ForkError, match=r"prior_token_ids .*first 2 ids") as parted:
        appended(tokenizer, prior, [HI])
    assert parted.value.fork == 2
    told = fault(parted.value)
    assert (told.code, told.param, told.fork, STATUS[told.type]) == ("fork", "prior_token_ids", 2, 409)
    again = rebuild(told)
    assert isinstance(again, ForkError)
    assert (again.fork, pickle.loads(pickle.dumps(again)).fork) == (2, 2)
    ids = appended(tokenizer, prior, [HI], append="fork")
    assert ids[:3] == (IM_START, 65, IM_END)
    assert kept(tuple(prior), ids) == 2


@pytest.mark.parametrize(
    "template",
    ["{{ messages[-1].content }}", "{{ messages[:2] | map(attribute='content') | join }}"],
)
def test_a_template_that_drops_answers_cannot_be_gone_on_with(tmp_path: Path, template: str) -> None:
    with pytest.raises(UnsupportedError, match="prior_token_ids"):
        appended(tokenizer_with(tmp_path, template), [1], [HI])


def test_a_bridge_that_cannot_fit_is_refused_before_it_is_encoded(plain: ChatTokenizer) -> None:
    with pytest.raises(ContextLengthError):
        plain.extend((1,), [{"role": "user", "content": "x" * 1000}], window=8)


IDS = st.lists(st.integers(0, 4), min_size=1, max_size=8).map(tuple)


@given(prior=IDS, bridge=IDS, special=st.frozensets(st.integers(0, 4)), ends=st.frozensets(st.integers(0, 4)))
def test_a_prompt_extends_the_prior_ids_or_says_where_it_parts(
    prior: tuple[int, ...], bridge: tuple[int, ...], special: frozenset[int], ends: frozenset[int]
) -> None:
    try:
        ids = extended(prior, bridge, special=special, ends=ends, forks=False)
    except ForkError as parted:
        fork = parted.fork
        assert prior[-1] in ends
        assert fork == len(prior) - 1
        forked = extended(prior, bridge, special=special, ends=ends, forks=True)
        assert forked == prior[:-1] + bridge
        assert kept(prior, forked) in (len(prior) - 1, len(prior))
    else:
        assert ids[: len(prior)] == prior
        assert kept(prior, ids) == len(prior)
        assert ids[len(prior) :] in (bridge, bridge[1:])
