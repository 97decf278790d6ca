"""Requests as they arrive: OpenAI's fields, vLLM's names for extras, and ours. `asking` checks their meaning."""

import re
from types import MappingProxyType
from typing import Final, Literal, TypeVar

import msgspec

from slackwater.errors import InvalidInputError, UnsupportedError

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest request body."""


class PolicyField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which policy versions may answer; see `slackwater.rollout.request.PolicyConstraint`."""

    min_version: int | None = None
    exact_version: int | None = None
    kv: Literal["same", "any"] | None = None
    """Whose KV may be reused for the prompt: of the version that samples the first token, or of any."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: object = None

    def plain(self) -> dict[str, str]:
        """As chat templates expect it.

        Raises:
            UnsupportedError: It has parts that are not text, or tool calls.
        """
        if self.tool_calls:
            raise UnsupportedError("messages with tool_calls aren't supported", hint="render them as text")
        parts = self.content if isinstance(self.content, tuple) else ()
        if any(part.type != "text" for part in parts):
            raise UnsupportedError("messages with parts other than text aren't supported", hint="send text alone")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that other servers honour and this one doesn't: all but neutral values are refused by name."""

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    response_format: object = None
    logit_bias: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    web_search_options: object = None
    reasoning_effort: object = None
    verbosity: object = None
    suffix: object = None
    echo: object = None
    best_of: object = None
    min_p: object = None
    min_tokens: object = None
    ignore_eos: object = None
    bad_words: object = None
    prompt_logprobs: object = None
    structured_outputs: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    lora_adapter: object = None

    def refuse(self) -> None:
        """Raises UnsupportedError that names the first field which asks for something."""
        for name in Refused.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value not in _NEUTRAL.get(name, _EMPTY):
                raise UnsupportedError(f"{name} isn't supported", hint="leave it out")


_EMPTY: Final[tuple[object, ...]] = ([], {}, False, 0, "")
_NEUTRAL: Final = MappingProxyType[str, tuple[object, ...]](
    {
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (False, True),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "repetition_penalty": (1,),
        "modalities": (["text"],),
        "best_of": (1,),
        "add_generation_prompt": (True,),
    }
)


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
    engine_data: bool | None = None


class ChatBody(Sampled, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: tuple[Message, ...]
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

_CHAT: Final = msgspec.json.Decoder(ChatBody)
_TEXT: Final = msgspec.json.Decoder(TextBody)
_ABORT: Final = msgspec.json.Decoder(AbortBody)


def read_chat(body: bytes) -> ChatBody:
    """Decode a body. Unknown fields are ignored.

    Raises:
        InvalidInputError: It isn't JSON, or a field has the wrong type.
    """
    return _read(_CHAT, body)


def read_text(body: bytes) -> TextBody:
    """As `read_chat`."""
    return _read(_TEXT, body)


def read_abort(body: bytes) -> AbortBody:
    """As `read_chat`."""
    return _read(_ABORT, body)


_Body = TypeVar("_Body", bound=msgspec.Struct)


def _read(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("$.")
        field = re.split(r"[.\[]", place)[0] or "the body"
        where = f", at {place}" if place not in ("", field) else ""
        raise InvalidInputError(f"{field} is wrong: {problem}{where}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the body is no JSON: {error}", hint="send one JSON object in UTF-8") from error
