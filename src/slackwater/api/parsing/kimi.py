"""Kimi: K2's sections of JSON calls with ids of their own, and K3's nested channels with typed arguments."""

import re
from typing import Final

from slackwater.api.parsing.formats import Call, ReasoningFormat, Schemas, ToolFormat, is_name
from slackwater.api.parsing.values import fields, in_json_string, json_object, json_value, written

_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_NATIVE_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


def _read_k2(text: str, schemas: Schemas) -> Call | None:
    del schemas
    head, marked, rest = text.partition(_ARGUMENTS)
    native = _NATIVE_ID.fullmatch(head.strip())
    arguments = json_object(rest)
    if not marked or native is None or arguments is None or not is_name(native["name"]):
        return None
    return Call(name=native["name"], arguments=arguments, id=head.strip())


KIMI_K2: Final = ToolFormat(
    opener="<|tool_call_begin|>",
    closer="<|tool_call_end|>",
    read=_read_k2,
    is_open=in_json_string,
    inner=(_ARGUMENTS,),
    scaffold=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)

_SEP: Final = "<|sep|>"
_ARGUMENT: Final = "<|open|>argument "
_ARGUMENT_END: Final = "<|close|>argument<|sep|>"
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')


def _read_k3(text: str, schemas: Schemas) -> Call | None:
    del schemas
    head, marked, rest = text.partition(_SEP)
    name = _attributes(head).get("tool", "")
    pairs = fields(rest, _ARGUMENT, _SEP, _ARGUMENT_END)
    if not marked or pairs is None or not is_name(name):
        return None
    try:
        arguments = dict(_k3_argument(_attributes(head), value) for head, value in pairs)
    except (ValueError, KeyError):
        return None
    return Call(name=name, arguments=written(arguments)) if len(arguments) == len(pairs) else None


def _k3_argument(attributes: dict[str, str], text: str) -> tuple[str, object]:
    return attributes["key"], text if attributes["type"] == "string" else json_value(text)


def _attributes(text: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}


def _is_open_k3(text: str) -> bool:
    return text.rfind(_ARGUMENT) > text.rfind(_ARGUMENT_END)


KIMI_K3: Final = ToolFormat(
    opener="<|open|>call ",
    closer="<|close|>call<|sep|>",
    read=_read_k3,
    is_open=_is_open_k3,
    inner=(_ARGUMENT, _ARGUMENT_END),
    scaffold=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
)
K3_CHANNELS: Final = ReasoningFormat(
    opener="<|open|>think<|sep|>",
    closer="<|close|>think<|sep|>",
    scaffold=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
