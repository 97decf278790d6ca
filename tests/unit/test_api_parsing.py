"""What a model says, taken apart: the same at any cut, calls only where they are whole, and nothing lost."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slackwater.api.parsing.families import (
    AUTO,
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from slackwater.api.parsing.formats import Call, Schemas
from slackwater.api.parsing.reader import ReplyReader, said
from slackwater.errors import InvalidInputError

THINK: Final = REASONING_FORMATS["think"]
K3: Final = REASONING_FORMATS["kimi_k3"]
DSML: Final = "\uff5cDSML\uff5c"
FAMILIES: Final = [name for name, made in TOOL_FORMATS.items() if made]
Said = tuple[str, str, tuple[Call, ...]]


def taken_apart(
    pieces: Sequence[str],
    *,
    reasoning: str = "none",
    tools: str = "none",
    schemas: Schemas | None = None,
    is_open: bool = False,
) -> Said:
    reader = ReplyReader(REASONING_FORMATS[reasoning], TOOL_FORMATS[tools], schemas or {}, is_open=is_open)
    return said([item for piece in pieces for item in reader.push(piece)] + reader.flush())


def kind(value: object) -> str:
    """As JSON schemas name it."""
    names = {
        "str": "string",
        "bool": "boolean",
        "int": "integer",
        "NoneType": "null",
        "list": "array",
        "dict": "object",
    }
    return names[type(value).__name__]


def tagged(arguments: dict[str, object], form: str) -> str:
    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return "".join(form.replace("KEY", key).replace("VALUE", text(value)) for key, value in arguments.items())


def dsml(blank: str, section: str) -> Callable[[str, dict[str, object]], str]:
    def write(name: str, arguments: dict[str, object]) -> str:
        fields = "".join(
            f'<{DSML}{blank}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</{DSML}{blank}parameter>\n"
            for key, value in arguments.items()
        )
        call = f'<{DSML}{blank}invoke name="{name}">\n{fields}</{DSML}{blank}invoke>'
        return f"<{DSML}{blank}{section}>\n{call}\n</{DSML}{blank}{section}>"

    return write


def kimi_k3(name: str, arguments: dict[str, object]) -> str:
    fields = "".join(
        f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>'
        f"{value if isinstance(value, str) else json.dumps(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{fields}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


def marked(form: str) -> Callable[[str, dict[str, object]], str]:
    def write(name: str, arguments: dict[str, object]) -> str:
        call = form.replace("NAME", name).replace("JSON", json.dumps(arguments))
        begin, end = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
        return f"{begin}<\uff5ctool\u2581call\u2581begin\uff5c>{call}<\uff5ctool\u2581call\u2581end\uff5c>{end}"

    return write


WRITERS: Final[dict[str, Callable[[str, dict[str, object]], str]]] = {
    "hermes": lambda name, arguments: (
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    ),
    "qwen3_xml": lambda name, arguments: (
        f"<tool_call>\n<function={name}>\n"
        + tagged(arguments, "<parameter=KEY>\nVALUE\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "glm47": lambda name, arguments: (
        f"<tool_call>{name}" + tagged(arguments, "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>") + "</tool_call>"
    ),
    "kimi_k2": lambda name, arguments: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": kimi_k3,
    "deepseek_v3": marked("function<\uff5ctool\u2581sep\uff5c>NAME\n```json\nJSON\n```"),
    "deepseek_v31": marked("NAME<\uff5ctool\u2581sep\uff5c>JSON"),
    "deepseek_v32": dsml("", "function_calls"),
    "deepseek_v4": dsml("", "tool_calls"),
    "deepseek_v41": dsml(" ", "calls"),
}
"""A call as each family's template writes it."""

KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
STRINGS = st.text(st.characters(exclude_characters="<>|", exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | STRINGS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)


def cut(text: str, marks: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(mark % (len(text) + 1) for mark in marks)})
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("family", FAMILIES)
@given(arguments=ARGUMENTS, cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_a_call_comes_back_as_its_family_writes_it_at_any_cut(
    family: str, arguments: dict[str, object], cuts: list[int]
) -> None:
    schemas = {"look_up": {key: {"type": kind(value)} for key, value in arguments.items()}}
    text = "First this.\n" + WRITERS[family]("look_up", arguments) + "\n"
    thoughts, content, (call,) = taken_apart(cut(text, cuts), tools=family, schemas=schemas)
    assert (thoughts, content, call.name) == ("", "First this.", "look_up")
    assert json.loads(call.arguments) == arguments
    assert call.id == ("functions.look_up:0" if family == "kimi_k2" else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_are_two_and_the_blanks_around_them_no_content(family: str) -> None:
    text = "\n".join(["", WRITERS[family]("a", {"x": "1"}), WRITERS[family]("b.c-d", {}), ""])
    _, content, calls = taken_apart(list(text), tools=family)
    assert content == ""
    assert [call.name for call in calls] == ["a", "b.c-d"]
    assert json.loads(calls[1].arguments) == {}


def fragments(family: str) -> st.SearchStrategy[str]:
    made, thought = TOOL_FORMATS[family], REASONING_FORMATS["kimi_k3" if family == "kimi_k3" else "think"]
    assert made
    assert thought
    marks = [*made.marks, *thought.marks]
    parts = [*marks, *(mark[:-1] for mark in marks), WRITERS[family]("f", {"x": '</tool_call>"'})]
    junk = ["f", "\n", " ", '"', "\\", "{", "}", ">", "functions.f:0", "<function=f>", "</function>", "x\n\n"]
    return st.lists(st.sampled_from(parts + junk), max_size=14).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), cuts=st.lists(st.integers(0, 10_000), max_size=12), is_open=st.booleans())
def test_any_text_says_the_same_at_any_cut(family: str, data: st.DataObject, cuts: list[int], *, is_open: bool) -> None:
    text = data.draw(fragments(family))
    reasoning = "kimi_k3" if family == "kimi_k3" else "think"
    whole = taken_apart([text], reasoning=reasoning, tools=family, is_open=is_open)
    for pieces in (cut(text, cuts), list(text)):
        assert taken_apart(pieces, reasoning=reasoning, tools=family, is_open=is_open) == whole


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_what_is_no_call_stays_text_to_the_last_character(family: str, data: st.DataObject, cuts: list[int]) -> None:
    made = TOOL_FORMATS[family]
    assert made
    text = data.draw(fragments(family))
    reader = ReplyReader(None, replace(made, read=lambda _, __: None, scaffold=()), {})
    assert said([item for piece in cut(text, cuts) for item in reader.push(piece)] + reader.flush()) == ("", text, ())


@given(text=st.text("<>/think \nab", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
@example(text="<think>\na\n\nb\n</think>\n\nc</think>", cuts=[8, 10, 11])
def test_reasoning_is_what_an_answer_begins_with(text: str, cuts: list[int]) -> None:
    thoughts, content, calls = taken_apart(cut(text, cuts), reasoning="think")
    assert calls == ()
    if not text.lstrip().startswith("<think>"):
        assert (thoughts, content) == ("", text)
        return
    inner, closed, rest = text.lstrip().removeprefix("<think>").partition("</think>")
    assert thoughts == inner.strip("\n")
    assert content == rest.lstrip("\n")
    assert closed or not content


def test_reasoning_that_the_prompt_opened_goes_on_to_its_end() -> None:
    assert taken_apart(["\nI think\n</th", "ink>\n\nYes"], reasoning="think", is_open=True) == ("I think", "Yes", ())
    assert taken_apart(["cut off"], reasoning="think", is_open=True) == ("cut off", "", ())
    assert taken_apart(["<think>cut"], reasoning="think") == ("cut", "", ())


def test_later_and_nested_marks_of_reasoning_are_text() -> None:
    text = "<think>a <think>b</think> c</think><think>d</think>"
    assert taken_apart(list(text), reasoning="think") == ("a <think>b", " c</think><think>d</think>", ())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_only_thought_of_is_none(family: str) -> None:
    call = WRITERS[family]("f", {})
    thoughts, content, calls = taken_apart(["<think>", call, "</think>", call], reasoning="think", tools=family)
    assert (thoughts, content, [made.name for made in calls]) == (call, "", ["f"])


def test_kimi_k3_says_its_answer_in_channels() -> None:
    call = kimi_k3("f", {"q": 'a "b" & <c>', "n": 3})
    text = f"<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>{call}"
    thoughts, content, (made,) = taken_apart(
        list(text + "<|close|>message<|sep|>"), reasoning="kimi_k3", tools="kimi_k3"
    )
    assert (thoughts, content, json.loads(made.arguments)) == ("hm", "Yes.", {"q": 'a "b" & <c>', "n": 3})


HERMES_WRONG: Final = [
    "{",
    "null",
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": 1}} and more',
    '{"name": "a b", "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "query<|channel|>", "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": ' + "[" * 50_000 + "}",
    '{"name": "f", "arguments": {"x": ' + "[" * 50_000 + "]" * 50_000 + "}}",
]


@pytest.mark.parametrize("inner", HERMES_WRONG, ids=range(len(HERMES_WRONG)))
def test_a3_25_malformed_calls_are_content(inner: str) -> None:
    text = f"a <tool_call>{inner}</tool_call> b"
    assert taken_apart([text], tools="hermes") == ("", text, ())


K3_TOOLS: Final = "<|open|>tools<|sep|>"
CALL_31: Final = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>"
)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_xml", f"<tool_call><function=f>{'<parameter=a>1</parameter>' * 2}</function></tool_call>"),
        ("qwen3_xml", "<tool_call><function=f>stray</function></tool_call>"),
        ("qwen3_xml", '<tool_call>{"name": "f"}</tool_call>'),
        ("glm47", "<tool_call>f<arg_key>a</arg_key>1</arg_value></tool_call>"),
        ("glm47", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("kimi_k3", kimi_k3("f", {"a": 1}).replace(' type="integer"', "")[len(K3_TOOLS) : -len(K3_TOOLS) - 1]),
        ("deepseek_v3", CALL_31),
        ("deepseek_v4", f'<{DSML}invoke name="f">x</{DSML}invoke>'),
    ],
)  # fmt: skip
def test_each_familys_malformed_calls_are_content(family: str, text: str) -> None:
    assert taken_apart(list(text), tools=family) == ("", text, ())


def test_a_closing_mark_within_a_value_ends_no_call() -> None:
    value = 'print("</tool_call>") \\ "'
    for family in ("hermes", "glm47", "qwen3_xml"):
        _, content, (call,) = taken_apart(
            list(WRITERS[family]("f", {"code": value})), tools=family, schemas={"f": {"code": {"type": "string"}}}
        )
        assert (content, json.loads(call.arguments)) == ("", {"code": value})


def test_a_whole_call_after_a_broken_one_is_one() -> None:
    broken, whole = '<tool_call>{"name": "f", "argu', WRITERS["hermes"]("g", {})
    _, content, calls = taken_apart(list(broken + whole), tools="hermes")
    assert (content, [call.name for call in calls]) == (broken, ["g"])
    unquoted = '<tool_call>{"name": "f</tool_call>\n'
    _, content, calls = taken_apart(list(unquoted + whole), tools="hermes")
    assert (content, [call.name for call in calls]) == (unquoted.rstrip(), ["g"])


def test_a_call_that_is_cut_off_is_content() -> None:
    for family in FAMILIES:
        text = WRITERS[family]("f", {"x": "y"})
        made = TOOL_FORMATS[family]
        assert made
        whole = text[: text.index(made.closer) + len(made.closer) - 1]
        shown = whole
        for mark in made.scaffold:
            shown = shown.replace(mark, "")
        assert taken_apart(list(whole), tools=family) == ("", shown, ())


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("five", {"type": "integer"}, "five"),
        ("[1", {"type": "array"}, "[1"),
        ("5", None, 5),
        ("word", None, "word"),
        ("5", {"type": 5}, 5),
        ("5", {"anyOf": 5, "type": "string"}, "5"),
    ],
)
def test_values_without_types_take_those_of_the_tools_schema(text: str, schema: object, value: object) -> None:
    for family in ("glm47", "qwen3_xml"):
        written = WRITERS[family]("f", {"x": text})
        _, _, (call,) = taken_apart([written], tools=family, schemas={"f": {"x": schema}} if schema else {})
        assert json.loads(call.arguments) == {"x": value}


HUGE: Final = [
    "<tool_call>" + "x" * 300_000,
    "<tool_call>" * 30_000 + "</tool_call>" * 30_000,
    '<tool_call>{"name": "f", "arguments": {"x": "' + "</tool_call>" * 30_000,
    "<tool_call" * 30_000,
    "<think>" + "</think" * 30_000,
    "\n" * 60_000,
]


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
@pytest.mark.parametrize("family", ["hermes", "qwen3_xml", "glm47"])
def test_huge_texts_take_time_in_proportion(text: str, family: str) -> None:
    began = time.process_time()
    pieces = [text[at : at + 40] for at in range(0, len(text), 40)]
    thoughts, content, calls = taken_apart(pieces, reasoning="think", tools=family)
    assert not calls
    assert len(thoughts) + len(content) >= len(text) - len("<think>")
    assert time.process_time() - began < 10


SIGNS: Final = {
    "hermes": '<tool_call>\\n{"name": <n>, "arguments": <a>}\\n</tool_call>',
    "qwen3_xml": "<tool_call>\\n<function=f>\\n<parameter=p>\\n1\\n</parameter>\\n</function>\\n</tool_call>",
    "glm47": "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "kimi_k3": "<|open|>call tool=<|sep|>",
    "deepseek_v3": "<\uff5ctool\u2581sep\uff5c>' + name + '\\n```json",
    "deepseek_v31": "<\uff5ctool\u2581sep\uff5c>",
    "deepseek_v32": f"<{DSML}function_calls>",
    "deepseek_v4": f"<{DSML}tool_calls>",
    "deepseek_v41": f"<{DSML} calls>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_tells_its_family_plainly_is_enough(family: str) -> None:
    assert tool_format(AUTO, SIGNS[family]) is TOOL_FORMATS[family]


def test_other_templates_tell_nothing_and_settings_are_names() -> None:
    assert tool_format(AUTO, "{{ messages }}") is tool_format("none", SIGNS["hermes"]) is None
    assert reasoning_format(AUTO, "{{ messages }}") is None
    assert reasoning_format(AUTO, "'<think>\\n\\n</think>\\n'") is THINK
    assert reasoning_format(AUTO, "<|open|>think<|sep|>") is K3
    assert tool_format("glm47", "") is TOOL_FORMATS["glm47"]
    with pytest.raises(InvalidInputError, match="hermes"):
        tool_format("hermse", "")
