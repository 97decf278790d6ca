"""From a chat body to what a chat template is given, and to how its answers are taken apart. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from slackwater.api.parsing.formats import ReasoningFormat, Schemas, ToolFormat
from slackwater.api.parsing.reader import ReplyReader
from slackwater.api.schema import ChatBody
from slackwater.errors import InvalidInputError

MAX_TOOLS: Final = 1024
"""Most tools of one request."""
MAX_SETTINGS: Final = 32
"""Most entries of ``chat_template_kwargs``."""
MAX_SETTING_BYTES: Final = 16_384
"""Most bytes of ``chat_template_kwargs`` as JSON."""
_SETTING: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RESERVED: Final = frozenset(
    (
        "messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "raise_exception", "strftime_now",
    )
)  # fmt: skip
"""What a template is given by us, and what the library that renders it takes for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """What a conversation is rendered with besides its messages."""

    tools: tuple[Mapping[str, object], ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """``chat_template_kwargs``: names that the template knows."""
    opens_answer: bool = True
    """Whether the opening of the assistant's turn comes at the end."""
    continues: bool = False
    """Whether the last message stays open, for the answer to go on with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a prompt is made of."""

    messages: tuple[Mapping[str, object], ...]
    style: Style
    prior_ids: tuple[int, ...] = ()
    """Ids that the prompt goes on from; ``messages`` are what comes after them. Empty: nothing came before."""
    forks: bool = False
    """Whether the last of them may be given up where it doesn't fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsing:
    """How the answers to one request are taken apart."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict[str, Mapping[str, object]])
    begun: str = ""
    """The part of the answer that the prompt has already."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What must be seen of special tokens."""
        return tuple(mark for made in (self.reasoning, self.tools) if made is not None for mark in made.marks)

    def reader(self, prompt_end: str) -> ReplyReader | None:
        """A fresh reader of one answer; None where its text stays as it is.

        Args:
            prompt_end: The last characters of the prompt, special tokens included.
        """
        if self.reasoning is None and self.tools is None:
            return None
        is_open = self.reasoning is not None and (
            prompt_end.rstrip().endswith(self.reasoning.opener)
            or self.begun.rfind(self.reasoning.opener) > self.begun.rfind(self.reasoning.closer)
        )
        return ReplyReader(self.reasoning, self.tools, self.schemas, is_open=is_open)


def conversation(body: ChatBody) -> Conversation:
    """Read what a chat body says.

    Raises:
        InvalidInputError: Its fields contradict each other, or a bound is exceeded.
        UnsupportedError: A message has parts that are not text.
    """
    continues = bool(body.continue_final_message)
    if continues and (body.add_generation_prompt or body.messages[-1].role != "assistant"):
        raise InvalidInputError(
            "continue_final_message fits an assistant's message at the end", hint="leave out add_generation_prompt"
        )
    for tool in body.tools or ():
        _tool_name(tool)
    if len(body.tools or ()) > MAX_TOOLS:
        raise InvalidInputError("tools is out of range", hint=f"at most {MAX_TOOLS}")
    _check_prior(body)
    style = Style(
        tools=body.tools or (),
        settings=_settings(body.chat_template_kwargs or {}),
        opens_answer=not continues and body.add_generation_prompt is not False,
        continues=continues,
    )
    return Conversation(
        messages=tuple(message.plain() for message in body.messages),
        style=style,
        prior_ids=body.prior_token_ids or (),
        forks=body.append == "fork",
    )


def _check_prior(body: ChatBody) -> None:
    if body.prior_token_ids is None:
        if body.append is not None:
            raise InvalidInputError("append needs prior_token_ids", hint="send the ids of the episode so far")
        return
    if not body.prior_token_ids or body.continue_final_message:
        raise InvalidInputError(
            "prior_token_ids must have ids, and no message to continue", hint="use /v1/completions to go on from ids"
        )
    if any(message.role not in ("user", "tool") for message in body.messages):
        raise InvalidInputError(
            "messages after prior_token_ids are of users and tools", hint="send those alone that are new since"
        )


def _settings(given: Mapping[str, object]) -> Mapping[str, object]:
    for name in given:
        if not _SETTING.fullmatch(name) or name in _RESERVED:
            raise InvalidInputError(f"chat_template_kwargs can't set {name[:80]!r}", hint="see the model's template")
    if len(given) > MAX_SETTINGS or len(msgspec.json.encode(given)) > MAX_SETTING_BYTES:
        raise InvalidInputError(
            "chat_template_kwargs is out of range", hint=f"at most {MAX_SETTINGS} of {MAX_SETTING_BYTES} bytes together"
        )
    return given


def parsing(body: ChatBody, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Parsing:
    """How answers to a body are taken apart, given the model's formats. Calls are looked for only where tools are
    given and ``tool_choice`` isn't ``none``.
    """
    calls = bool(body.tools) and body.tool_choice != "none"
    last = body.messages[-1].plain()["content"] if body.continue_final_message else ""
    return Parsing(
        reasoning=reasoning,
        tools=tools if calls else None,
        schemas={_tool_name(tool): _properties(tool) for tool in body.tools or ()} if calls else {},
        begun=str(last),
    )


def _tool_name(tool: Mapping[str, object]) -> str:
    name = _entry(tool.get("function"), "name")
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise InvalidInputError(
            "tools is wrong: each is a function with a name", hint='{"type": "function", "function": {"name": ...}}'
        )
    return name


def _properties(tool: Mapping[str, object]) -> Mapping[str, object]:
    """Schemas of a tool's parameters; none where they aren't told as JSON schemas tell them."""
    found: object = tool
    for key in ("function", "parameters", "properties"):
        found = _entry(found, key)
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _entry(value: object, key: str) -> object:
    return cast("dict[str, object]", value).get(key) if isinstance(value, dict) else None


def with_text_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with the arguments of its calls as JSON text, for templates that join them to text."""
    calls = cast("list[dict[str, dict[str, object]]]", message.get("tool_calls", []))
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_text(call["function"])} for call in calls]}


def _with_text(function: Mapping[str, object]) -> dict[str, object]:
    return {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}
