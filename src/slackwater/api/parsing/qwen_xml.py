"""Qwen3.5 and Qwen3-Coder: ``<tool_call><function=f><parameter=key>value</parameter></function></tool_call>``."""

from typing import Final

from slackwater.api.parsing.formats import Call, Schemas, ToolFormat, is_name
from slackwater.api.parsing.values import arguments_of, fields

_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


def _read(text: str, schemas: Schemas) -> Call | None:
    body = text.strip()
    if not (body.startswith(_FUNCTION) and body.endswith(_FUNCTION_END)):
        return None
    name, closed, rest = body[len(_FUNCTION) : -len(_FUNCTION_END)].partition(">")
    pairs = fields(rest, _PARAMETER, ">", _PARAMETER_END)
    if not closed or pairs is None or not is_name(name):
        return None
    # The template writes each value on lines of its own.
    trimmed = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
    return Call(name=name, arguments=arguments_of(trimmed, schemas.get(name, {})))


def _is_open(text: str) -> bool:
    return text.rfind(_PARAMETER) > text.rfind(_PARAMETER_END)


QWEN_XML: Final = ToolFormat(opener="<tool_call>", closer="</tool_call>", read=_read, is_open=_is_open)
