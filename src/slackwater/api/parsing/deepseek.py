"""DeepSeek: V3's and V3.1's marks around JSON, and the DSML of V3.2, V4 and V4.1, whose parameters tell strings."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from slackwater.api.parsing.formats import Call, Schemas, ToolFormat, is_name
from slackwater.api.parsing.values import fields, in_json_string, json_object, json_value, written

_SEP: Final = "<\uff5ctool\u2581sep\uff5c>"
_FENCE: Final = "```"


def _read_v31(text: str, schemas: Schemas) -> Call | None:
    """``f<sep>{...}``."""
    del schemas
    name, marked, rest = text.partition(_SEP)
    arguments = json_object(rest)
    if not marked or arguments is None or not is_name(name.strip()):
        return None
    return Call(name=name.strip(), arguments=arguments)


def _read_v3(text: str, schemas: Schemas) -> Call | None:
    """``function<sep>f``, then JSON in a fence."""
    kind, _, rest = text.partition(_SEP)
    name, _, fenced = rest.partition("\n")
    body = fenced.strip()
    if kind.strip() != "function" or not (body.startswith(_FENCE + "json") and body.endswith("\n" + _FENCE)):
        return None
    return _read_v31(name + _SEP + body.removeprefix(_FENCE + "json").removesuffix(_FENCE), schemas)


def _marked(read: Callable[[str, Schemas], Call | None]) -> ToolFormat:
    return ToolFormat(
        opener="<\uff5ctool\u2581call\u2581begin\uff5c>",
        closer="<\uff5ctool\u2581call\u2581end\uff5c>",
        read=read,
        is_open=in_json_string,
        inner=(_SEP,),
        scaffold=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    )


DEEPSEEK_V3: Final = _marked(_read_v3)
DEEPSEEK_V31: Final = _marked(_read_v31)

_DSML: Final = "\uff5cDSML\uff5c"
_HEAD: Final = re.compile(r'(?P<key>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*')


def _dsml(blank: str, section: str) -> ToolFormat:
    """The dialect with ``blank`` after the mark."""
    begin, end = f"<{_DSML}{blank}", f"</{_DSML}{blank}"
    parameter, parameter_end = f'{begin}parameter name="', f"{end}parameter>"
    return ToolFormat(
        opener=f'{begin}invoke name="',
        closer=f"{end}invoke>",
        read=partial(_read_dsml, parameter, parameter_end),
        is_open=lambda text: text.rfind(parameter) > text.rfind(parameter_end),
        inner=(parameter, parameter_end),
        scaffold=(f"{begin}{section}>", f"{end}{section}>"),
    )


def _read_dsml(parameter: str, parameter_end: str, text: str, schemas: Schemas) -> Call | None:
    del schemas
    name, marked, rest = text.partition('">')
    pairs = fields(rest, parameter, ">", parameter_end)
    if not marked or pairs is None or not is_name(name):
        return None
    heads = [_HEAD.fullmatch(head) for head, _ in pairs]
    arguments = {head["key"]: _value(head, value) for head, (_, value) in zip(heads, pairs, strict=True) if head}
    return Call(name=name, arguments=written(arguments)) if len(arguments) == len(pairs) else None


def _value(head: re.Match[str], text: str) -> object:
    if head["string"] == "true":
        return text
    try:
        return json_value(text)
    except ValueError:
        return text


DEEPSEEK_V32: Final = _dsml("", "function_calls")
DEEPSEEK_V4: Final = _dsml("", "tool_calls")
DEEPSEEK_V41: Final = _dsml(" ", "calls")
