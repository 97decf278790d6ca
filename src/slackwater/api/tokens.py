"""The model's tokenizer: renders conversations by its chat template, encodes text, and knows each token's bytes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec
from transformers import AutoTokenizer

from slackwater.api.appending import BEFORE, bridge_of, extended
from slackwater.api.conversation import Style, with_text_arguments
from slackwater.api.parsing.families import AUTO, reasoning_format, tool_format
from slackwater.api.text import TextStream, TokenTable, byte_level_table, sentencepiece_table
from slackwater.errors import ContextLengthError, InvalidInputError, NotFoundError, UnsupportedError

_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What templates raise over messages that they weren't written for."""


class ChatTokenizer:
    """A tokenizer from a local folder; safe to use from several threads.

    Nothing is downloaded, and no code of the folder runs but its chat template, in the sandbox that transformers
    gives it.

    Args:
        folder: Hugging Face folder with ``tokenizer.json`` and, for chat, a template.
        tool_parser: Name of the format of tool calls: see `slackwater.api.parsing.families`.
        reasoning_parser: Likewise, of reasoning.

    Raises:
        InvalidInputError: There is no format of such a name.
        NotFoundError: The folder holds no tokenizer.
        UnsupportedError: Its decoder is neither byte-level nor SentencePiece with byte fallback.
    """

    def __init__(self, folder: Path, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        try:
            self._templates: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise NotFoundError(
                f"{folder} holds no tokenizer that transformers can read", hint="it needs tokenizer.json"
            ) from error
        # The backend is used without the wrapper, which switches settings of the shared object on each call.
        self._backend: Any = self._templates.backend_tokenizer
        self.table = _table(self._backend)
        """The bytes of every token."""
        self._longest = self.table.longest()
        self._ends = _ends(folder, self._templates.eos_token_id)
        template = _template_text(self._templates.chat_template)
        self.tool_format = tool_format(tool_parser, template)
        """How the model writes tool calls; None: text stays text."""
        self.reasoning_format = reasoning_format(reasoning_parser, template)
        """How it marks reasoning; None: text stays text."""

    def render(
        self, messages: Sequence[Mapping[str, object]], *, style: Style | None = None, window: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation.

        Args:
            messages: Each with ``role`` and ``content``, and perhaps what templates know besides; arguments of tool
                calls are objects.
            style: Tools and settings; the opening of the assistant's turn at the end, and no more, by default.
            window: Most tokens of use: a text that must have more is refused before it is encoded. None: any number.

        Raises:
            InvalidInputError: The template refuses these messages, or their text can't fit.
            UnsupportedError: The model has no chat template.
        """
        return self._encode(self._text(messages, style or Style()), window, special=False)

    def extend(
        self,
        prior: tuple[int, ...],
        messages: Sequence[Mapping[str, object]],
        *,
        style: Style | None = None,
        forks: bool = False,
        window: int | None = None,
    ) -> tuple[int, ...]:
        """Token ids of an episode that goes on: ``prior``, exactly, and what the template writes after it.

        Args:
            prior: Ids of prompt and completion so far; at least one.
            messages: What is new since then: of users and tools.
            style: As in `render`.
            forks: Whether to give up the last prior id where the template goes on from another one.
            window: As in `render`.

        Raises:
            ForkError: The template goes on from another id, and ``forks`` is false.
            InvalidInputError: As in `render`.
            UnsupportedError: As in `render`, or the template leaves out earlier answers.
        """
        text = bridge_of(self._text((*BEFORE, *messages), style or Style()))
        bridge = self._encode(text, window, special=False)
        return extended(prior, bridge, special=self.table.special, ends=self._ends, forks=forks)

    def _text(self, messages: Sequence[Mapping[str, object]], style: Style) -> str:
        if not self._templates.chat_template:
            raise UnsupportedError("this model has no chat template", hint="use /v1/completions")
        forms = [messages]
        if any("tool_calls" in message for message in messages):  # some templates join arguments, which must be text
            forms.append([with_text_arguments(message) for message in messages])
        problems: list[Exception] = []
        for form in forms:
            try:
                return self._applied(form, style)
            except _TEMPLATE_ERRORS as error:
                problems.append(error)
        problem = problems[0]
        raise InvalidInputError(f"messages don't fit the model's chat template: {problem}") from problem

    def _applied(self, messages: Sequence[Mapping[str, object]], style: Style) -> str:
        text: str = self._templates.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in style.tools] or None,
            tokenize=False,
            add_generation_prompt=style.opens_answer,
            continue_final_message=style.continues,
            **style.settings,
        )
        return text

    def encode(self, text: str, *, window: int | None = None, special: bool = True) -> tuple[int, ...]:
        """Token ids of a text.

        Args:
            text: Any.
            window: As in `render`.
            special: Whether the special tokens come along that the model's own tokenizer adds.

        Raises:
            InvalidInputError: The text can't fit.
        """
        return self._encode(text, window, special=special)

    def _encode(self, text: str, window: int | None, *, special: bool) -> tuple[int, ...]:
        if window is not None:
            self._check_fits(text, window)
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return tuple(ids)

    def _check_fits(self, text: str, window: int) -> None:
        # Encoding holds the interpreter's lock: megabytes that can't fit would stop the whole process for seconds.
        size = len(text.encode())
        if size > window * self._longest:
            raise ContextLengthError(
                f"the prompt has {size} bytes, more than {window} tokens, the window, can hold",
                hint="shorten the prompt",
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; special tokens are skipped."""
        return self.table.decode(token_ids)

    def stream(self, stops: Sequence[str] = (), marks: Sequence[str] = ()) -> TextStream:
        """A fresh incremental decoder. Special tokens that are part of ``marks`` make text."""
        return TextStream(self.table.showing(marks) if marks else self.table, stops)


def _table(backend: Any) -> TokenTable:
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
    parts = _decoder_parts(backend)
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return byte_level_table(vocabulary, special)
    if "ByteFallback" in kinds:
        strips = any(part.get("type") == "Strip" and part.get("start") for part in parts)
        return sentencepiece_table(vocabulary, special, strips_first_space=strips)
    raise UnsupportedError(
        f"this tokenizer decodes with {sorted(map(str, kinds))}",
        hint="byte-level and SentencePiece-with-byte-fallback tokenizers are supported",
    )


def _template_text(template: str | Mapping[str, str] | None) -> str:
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def _ends(folder: Path, end_token: int | None) -> frozenset[int]:
    """Ids that end an answer, as tokenizer and ``generation_config.json`` tell."""
    path = folder / "generation_config.json"
    try:
        config = (
            msgspec.json.decode(path.read_bytes(), type=_GenerationConfig) if path.is_file() else _GenerationConfig()
        )
    except (msgspec.DecodeError, OSError) as error:
        raise NotFoundError(f"{path} can't be read", hint="it is a JSON object") from error
    named = config.eos_token_id
    more = (named,) if isinstance(named, int) else named or ()
    return frozenset(more if end_token is None else (end_token, *more))


class _GenerationConfig(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


def _decoder_parts(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    settings: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return settings.get("decoders", [settings])
