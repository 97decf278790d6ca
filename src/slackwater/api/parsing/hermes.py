"""Hermes and Qwen up to 3: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``."""

from typing import Final

import msgspec

from slackwater.api.parsing.formats import Call, Schemas, ToolFormat, is_name
from slackwater.api.parsing.values import in_json_string, json_object


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_DECODER: Final = msgspec.json.Decoder(_Written)


def _read(text: str, schemas: Schemas) -> Call | None:
    del schemas
    try:
        call = _DECODER.decode(text)
        arguments = json_object(bytes(call.arguments).decode())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return Call(name=call.name, arguments=arguments) if arguments is not None and is_name(call.name) else None


HERMES: Final = ToolFormat(opener="<tool_call>", closer="</tool_call>", read=_read, is_open=in_json_string)
