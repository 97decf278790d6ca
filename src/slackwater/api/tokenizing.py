"""``POST /v1/tokenize`` and ``POST /v1/detokenize``: text to ids and back, by the model's own tokenizer."""

import asyncio
from dataclasses import replace
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.asking import chat_wanted, check_model
from slackwater.api.bodies import read_known, read_with
from slackwater.api.conversation import conversation
from slackwater.api.respond import json_reply, read_body
from slackwater.api.schema import HINTS, ChatBody
from slackwater.api.serving import Serving
from slackwater.errors import ContextLengthError, InvalidInputError


class TokenizeText(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/tokenize`` of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    """Whether the special tokens come along that the tokenizer adds to texts."""
    return_token_strs: bool = False


class TokenizeChat(ChatBody, frozen=True, kw_only=True):
    """``POST /v1/tokenize`` of a conversation: what the chat route takes. Sampling fields have no effect."""

    add_special_tokens: bool = False
    return_token_strs: bool = False


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``POST /v1/tokenize``."""

    count: int
    max_model_len: int
    """The window, of prompt and completion together."""
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/detokenize``."""

    tokens: tuple[int, ...]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``POST /v1/detokenize``."""

    prompt: str
    """Special tokens included; bytes that are no character as U+FFFD."""


_TEXT: Final = msgspec.json.Decoder(TokenizeText)
_CHAT: Final = msgspec.json.Decoder(TokenizeChat)
_BACK: Final = msgspec.json.Decoder(DetokenizeBody)
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def routes(serving: Serving) -> list[Route]:
    """The routes, for `slackwater.api.app.create_app`. Normative page: docs/rl-api.md."""
    made = _Tokenizing(serving)
    return [
        Route("/v1/tokenize", made.tokenize, methods=["POST"]),
        Route("/v1/detokenize", made.detokenize, methods=["POST"]),
    ]


class _Tokenizing:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """``POST /v1/tokenize``."""
        data = await read_body(request)
        if "messages" in read_with(_KEYS, data):
            return json_reply(
                await self._of_chat(read_known(_CHAT, data, frozenset(TokenizeChat.__struct_fields__), HINTS))
            )
        return json_reply(await self._of_text(read_known(_TEXT, data, frozenset(TokenizeText.__struct_fields__))))

    async def _of_text(self, body: TokenizeText) -> Tokens:
        check_model(body.model or "", self._serving.model)
        ids = await asyncio.to_thread(
            self._serving.tokenizer.encode,
            body.prompt,
            window=self._serving.completer.window(),
            special=body.add_special_tokens,
        )
        return self._tokens(ids, names=body.return_token_strs)

    async def _of_chat(self, body: TokenizeChat) -> Tokens:
        chat_wanted(body)
        check_model(body.model, self._serving.model)
        if body.add_special_tokens:
            raise InvalidInputError("add_special_tokens doesn't fit messages", hint="the template writes them itself")
        return self._tokens(await self._serving.rendered(conversation(body)), names=body.return_token_strs)

    def _tokens(self, ids: tuple[int, ...], *, names: bool) -> Tokens:
        table = self._serving.tokenizer.table
        return Tokens(
            count=len(ids),
            max_model_len=self._serving.completer.window(),
            tokens=ids,
            token_strs=tuple(table.piece(one).decode("utf-8", "backslashreplace") for one in ids) if names else None,
        )

    async def detokenize(self, request: Request) -> Response:
        """``POST /v1/detokenize``."""
        body = read_known(_BACK, await read_body(request), frozenset(DetokenizeBody.__struct_fields__))
        check_model(body.model or "", self._serving.model)
        window, table = self._serving.completer.window(), self._serving.tokenizer.table
        if len(body.tokens) > window:
            raise ContextLengthError(f"tokens has {len(body.tokens)} ids and the window {window}", hint="send less")
        if not all(0 <= token_id < len(table.pieces) for token_id in body.tokens):
            raise InvalidInputError("tokens is out of range", hint=f"ids count from 0 to {len(table.pieces) - 1}")
        shown = replace(table, special=frozenset[int]())
        return json_reply(Detokenized(prompt=await asyncio.to_thread(shown.decode, body.tokens)))
