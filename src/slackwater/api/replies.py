"""Replies in OpenAI's shapes, with vLLM's names for token ids and our ``engine_data``."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from slackwater.api.engine_data import EngineData
from slackwater.api.routed import RoutedExperts
from slackwater.rollout.evidence import Finish


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative at one position."""

    token: str
    """Its text; bytes that are no whole character as ``\\xNN``."""
    logprob: float
    bytes: tuple[int, ...]
    """Its true bytes."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled token at one position."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``logprobs`` of a chat choice: one entry per token."""

    content: tuple[TokenLogprob, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``logprobs`` of a completion choice: lists of equal length."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...] | None
    text_offset: tuple[int, ...]


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the usage."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one reply, over all its choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool call calls."""

    name: str
    arguments: str
    """One JSON object, as text."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a call: first its name, then pieces of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One call's part of a chunk; ``id`` and ``type`` come with the name."""

    index: int
    """Which of the choice's calls."""
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a conversation."""

    content: str | None
    """None where it says nothing besides reasoning and calls."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    """In the first chunk of a choice."""
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What any choice shows on request."""

    index: int
    finish_reason: Finish | Literal["tool_calls"] | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    engine_data: EngineData | UnsetType = UNSET
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Of a chunk alone: the rows that came with its tokens. A whole choice has them in ``engine_data``."""


class ChatChoice(Extras, frozen=True, kw_only=True):
    """One choice of a chat reply."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatDelta(Extras, frozen=True, kw_only=True):
    """One choice's part of a chat chunk."""

    delta: Delta
    logprobs: ChatLogprobs | None


class TextChoice(Extras, frozen=True, kw_only=True):
    """One choice of a completion reply, whole or a chunk's part."""

    text: str
    logprobs: TextLogprobs | None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply or one chunk; ``object`` says which."""

    id: str
    object: str
    created: int
    """Seconds since the epoch."""
    model: str
    choices: tuple[ChatChoice | ChatDelta | TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    """On request; in a stream, of its first chunk alone."""
    prior_kept: int | UnsetType = UNSET
    """Of a request with ``prior_token_ids``: how many of them the prompt begins with. Where ``prompt_token_ids`` is."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/abort``."""

    request_id: str
    aborted: int
    """Choices that this call ended."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "slackwater"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"
