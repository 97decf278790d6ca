"""GLM 4.5 to 5.3: ``<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``, blanks between."""

from typing import Final

from slackwater.api.parsing.formats import Call, Schemas, ToolFormat, is_name
from slackwater.api.parsing.values import arguments_of, fields

_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"


def _read(text: str, schemas: Schemas) -> Call | None:
    head, key, rest = text.partition(_KEY)
    name = head.strip()
    pairs = fields(key + rest, _KEY, _KEY_END, _VALUE_END)
    if pairs is None or not is_name(name):
        return None
    values = [(key, value.lstrip()) for key, value in pairs]
    if not all(value.startswith(_VALUE) for _, value in values):
        return None
    bare = [(key, value.removeprefix(_VALUE)) for key, value in values]
    return Call(name=name, arguments=arguments_of(bare, schemas.get(name, {})))


def _is_open(text: str) -> bool:
    return text.rfind(_VALUE) > text.rfind(_VALUE_END)


GLM: Final = ToolFormat(
    opener="<tool_call>",
    closer="</tool_call>",
    read=_read,
    is_open=_is_open,
    inner=(_KEY, _KEY_END, _VALUE, _VALUE_END),
)
