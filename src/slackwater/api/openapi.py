"""``GET /openapi.json``: the routes of the inference key as an OpenAPI document, made from the types that they read and
write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.capabilities import API_VERSION, Capabilities
from slackwater.api.faults import Envelope
from slackwater.api.replies import Aborted, ChatChoice, ChatDelta, ModelList, Reply, TextChoice
from slackwater.api.respond import json_reply
from slackwater.api.schema import AbortBody, ChatBody, TextBody
from slackwater.api.score import ScoreBody, Scores
from slackwater.api.serving import Serving
from slackwater.api.sglang_shapes import Generated, SglangBody
from slackwater.api.stream import NDJSON, SSE
from slackwater.api.tokenizing import DetokenizeBody, Detokenized, TokenizeChat, TokenizeText, Tokens
from slackwater.api.vllm import GenerateBody, GeneratedReply
from slackwater.api.wire import EndLine, ErrorLine, KvLine, MaskLine, OriginLine, RoutesLine, TokenLine
from slackwater.rollout.request import CompletionRequest

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"


def _reply(name: str, choice: type) -> type:
    # One type of reply has choices of three kinds, without a tag, and ends that are words of two kinds. Nobody decodes
    # them; the document names each kind of reply by itself, and the ends as text.
    told = _with(choice.__name__, choice, ("finish_reason", str | None))
    return _with(name, Reply, ("choices", tuple[told, ...]))


def _with(name: str, base: type, changed: tuple[str, Any]) -> type:
    return msgspec.defstruct(name, [changed], bases=(base,), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    path: str
    says: str
    body: tuple[Any, ...] = ()
    """The types that a request's body may have; none: there is no body."""
    replies: Mapping[str, tuple[Any, ...]]
    """The types that a reply, or one event or line of it, may have, by its media type."""

    @property
    def types(self) -> tuple[Any, ...]:
        """All of them."""
        return (*self.body, *(one for types in self.replies.values() for one in types))


_LINES: Final = (OriginLine, KvLine, MaskLine, RoutesLine, TokenLine, EndLine, ErrorLine)
_TEXT_REPLY: Final = _reply("TextReply", TextChoice)
_OPERATIONS: Final = (
    _Operation(
        path="/v1/chat/completions",
        says="Answer a conversation.",
        body=(ChatBody,),
        replies={_JSON: (_reply("ChatReply", ChatChoice),), SSE: (_reply("ChatChunk", ChatDelta),)},
    ),
    _Operation(
        path="/v1/completions",
        says="Go on from a text, or from ids.",
        body=(TextBody,),
        replies={_JSON: (_TEXT_REPLY,), SSE: (_TEXT_REPLY,)},
    ),
    _Operation(
        path="/v1/generate",
        says="Tokens in, tokens out, line by line.",
        body=(CompletionRequest,),
        replies={NDJSON: _LINES},
    ),
    _Operation(path="/v1/score", says="Score given tokens.", body=(ScoreBody,), replies={_JSON: (Scores,)}),
    _Operation(path="/v1/abort", says="End a request by its name.", body=(AbortBody,), replies={_JSON: (Aborted,)}),
    _Operation(
        path="/v1/tokenize",
        says="Text or a conversation to ids.",
        body=(TokenizeText, TokenizeChat),
        replies={_JSON: (Tokens,)},
    ),
    _Operation(path="/v1/detokenize", says="Ids to text.", body=(DetokenizeBody,), replies={_JSON: (Detokenized,)}),
    _Operation(path="/v1/models", says="The model that is served.", replies={_JSON: (ModelList,)}),
    _Operation(path="/v1/capabilities", says="What this server does.", replies={_JSON: (Capabilities,)}),
    _Operation(
        path="/inference/v1/generate",
        says="Tokens in, tokens out, as vLLM has it.",
        body=(GenerateBody,),
        replies={_JSON: (GeneratedReply,), SSE: (GeneratedReply,)},
    ),
    _Operation(
        path="/generate",
        says="One prompt or a batch, as SGLang has it.",
        body=(SglangBody,),
        replies={_JSON: (Generated, tuple[Generated, ...]), SSE: (Generated,)},
    ),
)


def routes(serving: Serving) -> list[Route]:
    """The route, for `slackwater.api.app.create_app`."""
    made = document()

    async def openapi(request: Request) -> Response:
        del request
        return json_reply(made)

    del serving
    return [Route("/openapi.json", openapi)]


def document() -> dict[str, Any]:
    """An OpenAPI 3.2 document of every route here: bodies, replies, errors and the key."""
    types = (*(one for operation in _OPERATIONS for one in operation.types), Envelope)
    schemas, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REF)
    known = dict(zip(map(repr, types), schemas, strict=True))
    return {
        "openapi": "3.2.0",
        "info": {"title": "Slackwater rollout API", "version": str(API_VERSION)},
        "security": [{"key": []}],
        "paths": {operation.path: _path(operation, known) for operation in _OPERATIONS},
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _anything(kind: type) -> dict[str, object]:
    # Fields whose values are looked at later, or refused unless they ask for nothing.
    return {"description": "any value"} if kind is object else {"type": "integer"}


def _path(operation: _Operation, known: Mapping[str, object]) -> dict[str, object]:
    told: dict[str, object] = {
        "summary": operation.says,
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {kind: _content(kind, _any_of(types, known)) for kind, types in operation.replies.items()},
            },
            "default": {
                "description": "An error.",
                "content": {_JSON: {"schema": _any_of((Envelope,), known)}},
            },
        },
    }
    if not operation.body:
        return {"get": told}
    body = {"required": True, "content": {_JSON: {"schema": _any_of(operation.body, known)}}}
    return {"post": {**told, "requestBody": body}}


def _content(kind: str, schema: object) -> dict[str, object]:
    if kind == NDJSON:
        return {"itemSchema": schema}
    if kind != SSE:
        return {"schema": schema}
    told = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [schema, _ref(Envelope)]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, told]}
    return {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _any_of(types: Sequence[Any], known: Mapping[str, object]) -> object:
    found = [known[repr(one)] for one in types]
    return found[0] if len(found) == 1 else {"anyOf": found}
