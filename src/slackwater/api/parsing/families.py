"""The formats by the names that settings give them, and which of them a chat template tells of."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from slackwater.api.parsing.deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V41
from slackwater.api.parsing.formats import ReasoningFormat, ToolFormat
from slackwater.api.parsing.glm import GLM
from slackwater.api.parsing.hermes import HERMES
from slackwater.api.parsing.kimi import K3_CHANNELS, KIMI_K2, KIMI_K3
from slackwater.api.parsing.qwen_xml import QWEN_XML
from slackwater.errors import InvalidInputError

AUTO: Final = "auto"
"""The format that the chat template tells plainly, or none."""
NONE: Final = "none"
"""Text stays text."""

TOOL_FORMATS: Final[Mapping[str, ToolFormat | None]] = MappingProxyType(
    {
        NONE: None,
        "hermes": HERMES,
        "qwen3_xml": QWEN_XML,
        "glm47": GLM,
        "kimi_k2": KIMI_K2,
        "kimi_k3": KIMI_K3,
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "deepseek_v32": DEEPSEEK_V32,
        "deepseek_v4": DEEPSEEK_V4,
        "deepseek_v41": DEEPSEEK_V41,
    }
)
"""By the names that vLLM has for them."""
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat | None]] = MappingProxyType(
    {NONE: None, "think": ReasoningFormat(opener="<think>", closer="</think>"), "kimi_k3": K3_CHANNELS}
)
"""``think`` is that of Qwen, GLM, DeepSeek and Kimi K2."""

_TOOL_SIGNS: Final = (
    ("kimi_k3", ("<|open|>", "<|sep|>", "call")),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("deepseek_v41", ("\uff5cDSML\uff5c calls",)),
    ("deepseek_v4", ("\uff5cDSML\uff5ctool_calls",)),
    ("deepseek_v32", ("\uff5cDSML\uff5cfunction_calls",)),
    ("deepseek_v3", ("<\uff5ctool\u2581sep\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool\u2581sep\uff5c>",)),
    ("glm47", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>", '"name"', '"arguments"')),
)
"""What a template of the format has in it; the first that fits is meant."""
_REASONING_SIGNS: Final = (("kimi_k3", ("<|open|>", "<|sep|>", "think")), ("think", ("</think>",)))


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of calls, by a setting.

    Args:
        name: A key of `TOOL_FORMATS`, or `AUTO`.
        template: The model's chat template; empty where it has none.

    Raises:
        InvalidInputError: There is no such format.
    """
    return _named("tool parser", name, TOOL_FORMATS, _TOOL_SIGNS, template)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """As `tool_format`, of `REASONING_FORMATS`."""
    return _named("reasoning parser", name, REASONING_FORMATS, _REASONING_SIGNS, template)


_Format = TypeVar("_Format")


def _named(
    what: str,
    name: str,
    formats: Mapping[str, _Format],
    signs: tuple[tuple[str, tuple[str, ...]], ...],
    template: str,
) -> _Format:
    if name == AUTO:
        plain = template.replace('\\"', '"')
        fitting = (known for known, words in signs if all(word in plain for word in words))
        return formats[next(fitting, NONE)]
    if name not in formats:
        raise InvalidInputError(f"there is no {what} {name[:80]!r}", hint=f"known: {', '.join((AUTO, *formats))}")
    return formats[name]
