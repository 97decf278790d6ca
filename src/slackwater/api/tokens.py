"""The model's tokenizer: renders conversations by its chat template, encodes text, and knows each token's bytes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from slackwater.api.text import TextStream, TokenTable, byte_level_table, sentencepiece_table
from slackwater.errors import ContextLengthError, InvalidInputError, NotFoundError, UnsupportedError


class ChatTokenizer:
    """A tokenizer from a local folder; safe to use from several threads.

    Nothing is downloaded, and no code of the folder runs but its chat template, in the sandbox that transformers
    gives it.

    Args:
        folder: Hugging Face folder with ``tokenizer.json`` and, for chat, a template.

    Raises:
        NotFoundError: The folder holds no tokenizer.
        UnsupportedError: Its decoder is neither byte-level nor SentencePiece with byte fallback.
    """

    def __init__(self, folder: Path) -> None:
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

    def render(self, messages: Sequence[Mapping[str, str]], *, window: int | None = None) -> tuple[int, ...]:
        """Token ids of a conversation, with the opening of the assistant's turn at the end.

        Args:
            messages: Each with ``role`` and ``content``.
            window: Most tokens of use: a text that must have more is refused before it is encoded. None: any number.

        Raises:
            InvalidInputError: The template refuses these messages, or their text can't fit.
            UnsupportedError: The model has no chat template.
        """
        if not self._templates.chat_template:
            raise UnsupportedError("this model has no chat template", hint="use /v1/completions")
        try:
            text: str = self._templates.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidInputError(f"messages don't fit the model's chat template: {error}") from error
        return self._encode(text, window, special=False)

    def encode(self, text: str, *, window: int | None = None) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the model's own tokenizer adds.

        Args:
            text: Any.
            window: As in `render`.

        Raises:
            InvalidInputError: The text can't fit.
        """
        return self._encode(text, window, special=True)

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

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self.table, stops)


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


def _decoder_parts(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    settings: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return settings.get("decoders", [settings])
