"""What an answer has to look like: a JSON schema, a regular expression or a grammar, as its author wrote it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slackwater.errors import InvalidInputError

MAX_GRAMMAR_CHARACTERS: Final = 65_536
"""Longest source of a grammar."""


class GrammarKind(StrEnum):
    """The language that a source is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema: the answer is a value that it admits."""
    REGEX = "regex"
    """A regular expression that the whole answer matches, without look-around and back references."""
    EBNF = "ebnf"
    """A context-free grammar: Lark's syntax where it has a rule ``start:``, else GBNF with a rule ``root ::=``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What an answer has to look like. Whether the source has a meaning is for the engine to find out."""

    kind: GrammarKind
    source: str
    """1 to `MAX_GRAMMAR_CHARACTERS` characters."""

    def __post_init__(self) -> None:
        if any("\ud800" <= character <= "\udfff" for character in self.source):
            raise InvalidInputError("grammar has half a surrogate pair", hint="send whole characters")
        if not 1 <= len(self.source) <= MAX_GRAMMAR_CHARACTERS:
            raise InvalidInputError(
                f"grammar has {len(self.source)} characters", hint=f"send 1 to {MAX_GRAMMAR_CHARACTERS}"
            )
