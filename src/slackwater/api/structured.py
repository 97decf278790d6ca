"""Structured output: the names that OpenAI, vLLM and SGLang have for a grammar, made into one. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec

from slackwater.errors import InvalidInputError
from slackwater.rollout.grammar import Grammar, GrammarKind

MAX_GRAMMAR_CHOICES: Final = 1024
"""Most texts that an answer is one of."""
_META: Final = frozenset(r"\.+*?()|[]{}^$#&-~/")
_ANY_OBJECT: Final = '{"type":"object"}'
Schema = str | bool | dict[str, object]
"""A JSON schema, as text or as it is."""
Choices = Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHOICES)]


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``json_schema``. With ``strict`` or without, every answer keeps to it."""

    schema: bool | dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def grammar(self) -> Grammar | None:
        """What it asks for.

        Raises:
            InvalidInputError: It lacks its schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return _schema(_ANY_OBJECT)
        if self.json_schema is None:
            raise InvalidInputError("response_format is wrong: json_schema is missing", hint="add it, with its schema")
        return _schema(self.json_schema.schema)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of these."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def grammars(self) -> Iterator[tuple[str, Grammar]]:
        """All that it asks for, each with its field.

        Raises:
            InvalidInputError: A source is empty or too long.
        """
        if self.json is not None:
            yield "json", _schema(self.json)
        if self.regex is not None:
            yield "regex", Grammar(kind=GrammarKind.REGEX, source=self.regex)
        if self.choice is not None:
            yield "choice", Grammar(kind=GrammarKind.REGEX, source="|".join(map(_literal, self.choice)))
        if self.grammar is not None:
            yield "grammar", Grammar(kind=GrammarKind.EBNF, source=self.grammar)
        if self.json_object:
            yield "json_object", _schema(_ANY_OBJECT)


def the_one(asked: Sequence[tuple[str, Grammar]]) -> Grammar | None:
    """The grammar of a request that may name several, each with its field.

    Raises:
        InvalidInputError: It does.
    """
    if len(asked) > 1:
        raise InvalidInputError(f"{asked[1][0]} is one grammar too many beside {asked[0][0]}", hint="send one")
    return asked[0][1] if asked else None


def _schema(given: Schema) -> Grammar:
    source = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=source)


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character in _META:
        return "\\" + character
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"
