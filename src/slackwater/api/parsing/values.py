"""Arguments of calls: JSON as it stands, fields between marks, and values whose type the tool's schema tells."""

import re
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from slackwater.api.parsing.formats import Properties

_BLANK: Final = re.compile(r"\s*")
_ESCAPE: Final = re.compile(r"\\.", re.DOTALL)
_PYTHON: Final = {"True": True, "False": False, "None": None}
"""How templates write what Python's `str` makes of them."""
_KINDS: Final = (
    ("null", type(None)), ("boolean", bool), ("integer", int), ("number", float), ("number", int),
    ("array", list), ("object", dict),
)  # fmt: skip


def json_value(text: str) -> object:
    """Decode JSON.

    Raises:
        ValueError: It is none, or nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError("no JSON") from error


def json_object(text: str) -> str | None:
    """The text without blanks around it where it is one JSON object; None where it isn't."""
    try:
        return text.strip() if isinstance(json_value(text), dict) else None
    except ValueError:
        return None


def in_json_string(text: str) -> bool:
    """Whether a string of this beginning of a JSON text is still open."""
    return _ESCAPE.sub("", text).count('"') % 2 == 1


def written(arguments: Mapping[str, object]) -> str:
    """As JSON text."""
    return msgspec.json.encode(arguments).decode()


def fields(text: str, opener: str, middle: str, closer: str) -> list[tuple[str, str]] | None:
    """All of ``opener KEY middle VALUE closer``, with blanks between them; None where the text is anything else, or a
    key comes twice.
    """
    found: dict[str, str] = {}
    at = _after_blank(text, 0)
    while at < len(text):
        begin = at + len(opener)
        split = text.find(middle, begin)
        end = text.find(closer, split + len(middle))
        key = text[begin:split].strip()
        if not text.startswith(opener, at) or min(split, end) < 0 or not key or key in found:
            return None
        found[key] = text[split + len(middle) : end]
        at = _after_blank(text, end + len(closer))
    return list(found.items())


def _after_blank(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def typed(text: str, schema: object) -> object:
    """The value that a family without types means: a string, unless the schema admits what the text is as JSON.

    Args:
        text: As the model wrote it.
        schema: JSON schema of the parameter; None where the tool has none: any JSON is taken for what it is.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else json_value(text)
    except ValueError:
        return text
    return value if kinds is None or any(name in kinds and isinstance(value, kind) for name, kind in _KINDS) else text


def _kinds(schema: object) -> set[str] | None:
    """Types that a schema and its alternatives name; None where they name none."""
    if not isinstance(schema, dict):
        return None
    own = cast("dict[str, object]", schema)
    branches = [own, *_listed(own.get("anyOf")), *_listed(own.get("oneOf"))]
    named = [cast("dict[str, object]", branch).get("type") for branch in branches if isinstance(branch, dict)]
    kinds = {kind for name in named for kind in ([name] if isinstance(name, str) else _listed(name))}
    return {kind for kind in kinds if isinstance(kind, str)} or None


def _listed(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def arguments_of(pairs: list[tuple[str, str]], properties: Properties) -> str:
    """Fields of a family without types, as one JSON object."""
    return written({key: typed(value, properties.get(key)) for key, value in pairs})
