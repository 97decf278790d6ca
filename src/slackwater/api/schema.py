"""Requests as they arrive: OpenAI's fields, vLLM's names for extras, and ours. `asking` checks their meaning."""

from types import MappingProxyType
from typing import ClassVar, Final, Literal

import msgspec

from slackwater.api.arrays import Array
from slackwater.api.bodies import read_known, read_with
from slackwater.api.structured import Choices, ResponseFormat, Schema, StructuredOutputs, the_one
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.rollout.grammar import Grammar

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest request body."""


class PolicyField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which policy versions may answer; see `slackwater.rollout.request.PolicyConstraint`."""

    min_version: int | None = None
    exact_version: int | None = None
    max_lag: int | None = None
    """Versions behind the newest committed one."""
    kv: Literal["same", "any"] | None = None
    """Whose KV may be reused for the prompt: of the version that samples the first token, or of any."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool call calls."""

    name: str
    arguments: str | dict[str, object] = "{}"
    """One JSON object, as text or as it is."""

    def decoded(self) -> dict[str, object]:
        """The arguments as chat templates expect them.

        Raises:
            InvalidInputError: They are no JSON object.
        """
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            return _OBJECT.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidInputError(
                f"messages is wrong: the arguments of a call of {self.name[:80]!r} are no JSON object",
                hint="send the arguments as the reply had them",
            ) from error


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, object]:
        """As chat templates expect it."""
        named = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.decoded()}
        return {**named, "type": "function", "function": function}


_OBJECT: Final = msgspec.json.Decoder(dict[str, object])


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, object]:
        """As chat templates expect it.

        Raises:
            InvalidInputError: The arguments of a call are no JSON object.
            UnsupportedError: It has parts that are not text.
        """
        parts = self.content if isinstance(self.content, tuple) else ()
        if any(part.type != "text" for part in parts):
            raise UnsupportedError("messages with parts other than text aren't supported", hint="send text alone")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        extras = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        calls = {"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {}
        present = {key: value for key, value in extras.items() if value is not None}
        return {"role": self.role, "content": content, **present, **calls}


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that other servers honour and this one doesn't: all but neutral values are refused by name."""

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    web_search_options: object = None
    reasoning_effort: object = None
    verbosity: object = None
    suffix: object = None
    echo: object = None
    best_of: object = None
    bad_words: object = None
    prompt_logprobs: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    lora_adapter: object = None

    honoured: ClassVar[frozenset[str]] = frozenset()
    """Those of the fields that a route takes after all."""

    def refuse(self) -> None:
        """Raises UnsupportedError that names the first field which asks for something."""
        for name in Refused.__struct_fields__:
            value = getattr(self, name)
            if name not in self.honoured and value is not None and value not in _NEUTRAL.get(name, _EMPTY):
                raise UnsupportedError(f"{name} isn't supported", hint="leave it out")


_EMPTY: Final[tuple[object, ...]] = ([], {}, False, 0, "")
_NEUTRAL: Final = MappingProxyType[str, tuple[object, ...]](
    {
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (False, True),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "best_of": (1,),
        "add_generation_prompt": (True,),
    }
)


class RoutesField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which routes are wanted."""

    start: int = 0
    """Of positions of the prompt from this one on, and of all later ones."""


class EngineDataField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``engine_data`` has besides what it always has."""

    raw_logprobs: bool = False
    sampling_mask: bool = False
    routed_experts: bool | RoutesField = False


class NvextField(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's way to ask for it."""

    extra_fields: tuple[Literal["engine_data", "raw_logprobs", "sampling_mask", "routed_experts"], ...] = ()


class Sampled(Refused, frozen=True, kw_only=True):
    """What both completion routes accept. None means absent."""

    model: str = ""
    """Empty: the model that is served."""
    request_id: str | None = None
    """The caller's name for the request, for as long as it is under way."""
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep all."""
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    policy: PolicyField | None = None
    forced_token_ids: tuple[int, ...] | None = None
    return_token_ids: bool | None = None
    engine_data: bool | EngineDataField | None = None
    nvext: NvextField | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id, in decimals."""
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    """vLLM's older names for the parts of ``structured_outputs``; empty ones ask for nothing."""
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    """KV is shared among requests with the same one alone."""
    forced_routes: Array | None = None
    """Router replay: the experts of the first positions; see `slackwater.api.routed.forced_rows`."""

    def grammar(self) -> Grammar | None:
        """What the answers have to look like, by any of its names.

        Raises:
            InvalidInputError: There are several, or one is empty, too long or lacks its schema.
        """
        form = self.response_format.grammar() if self.response_format else None
        guided = StructuredOutputs(
            json=None if self.guided_json == "" else self.guided_json,
            regex=self.guided_regex or None,
            choice=self.guided_choice,
            grammar=self.guided_grammar or None,
        )
        asked = [("response_format", form)] if form else []
        for prefix, field in (("structured_outputs.", self.structured_outputs), ("guided_", guided)):
            asked += [(prefix + name, one) for name, one in (field.grammars() if field else ())]
        return the_one(asked)

    def evidence(self) -> EngineDataField | None:
        """What is asked of ``engine_data``, by either name; None: it isn't wanted."""
        names = self.nvext.extra_fields if self.nvext else ()
        asked = self.engine_data if isinstance(self.engine_data, EngineDataField) else EngineDataField()
        if not (names or self.engine_data):
            return None
        fields = EngineDataField.__struct_fields__
        return EngineDataField(**{name: getattr(asked, name) or name in names for name in fields})


class ChatBody(Sampled, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    honoured: ClassVar[frozenset[str]] = frozenset(
        ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    )

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] | None = None
    """As chat templates expect them: whatever each has is rendered."""
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prior_token_ids: tuple[int, ...] | None = None
    """The episode so far: ``messages`` are what is new since."""
    append: Literal["exact", "fork"] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TextBody(Sampled, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | tuple[int, ...]
    logprobs: int | None = None
    """None: no log-probabilities; 0: those of the sampled tokens; more: alternatives too."""


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/abort``."""

    request_id: str = ""


FIELDS: Final = frozenset((*ChatBody.__struct_fields__, *TextBody.__struct_fields__))
"""Every field of a request that has a meaning here."""
HINTS: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
})  # fmt: skip
"""Fields of OpenAI and vLLM that change no draw, and have no effect here."""

_CHAT: Final = msgspec.json.Decoder(ChatBody)
_TEXT: Final = msgspec.json.Decoder(TextBody)
_ABORT: Final = msgspec.json.Decoder(AbortBody)
_CHAT_FIELDS: Final = frozenset(ChatBody.__struct_fields__)
_TEXT_FIELDS: Final = frozenset(TextBody.__struct_fields__)


def read_chat(body: bytes) -> ChatBody:
    """Decode a body.

    Raises:
        InvalidInputError: It isn't JSON, or a field has the wrong type.
        UnsupportedError: A field that isn't known here asks for something.
    """
    return read_known(_CHAT, body, _CHAT_FIELDS, HINTS)


def read_text(body: bytes) -> TextBody:
    """As `read_chat`."""
    return read_known(_TEXT, body, _TEXT_FIELDS, HINTS)


def read_abort(body: bytes) -> AbortBody:
    """Decode a body. Unknown fields are ignored.

    Raises:
        InvalidInputError: It isn't JSON, or a field has the wrong type.
    """
    return read_with(_ABORT, body)
