"""Bodies of requests, decoded: unknown fields are refused by name, and wrong ones tell what to send. Pure."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Final, TypeVar

import msgspec
from msgspec import inspect

from slackwater.errors import InvalidInputError, UnsupportedError

_Body = TypeVar("_Body")
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING: Final = frozenset({b"null", b"false", b"0", b'""', b"[]", b"{}"})
_STEP: Final = re.compile(r"\w+|\[[^\]]*\]")
_EXPECTED: Final = re.compile(r"Expected (.+?)(?:, got .*)?")
_NAMED: Final = re.compile(r"Object (missing required|contains unknown) field `(.*)`")


def read_with(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a body. Fields that its shape lacks are ignored, unless the shape forbids them.

    Raises:
        InvalidInputError: It isn't JSON, or a field has the wrong type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise misfit(error, decoder.type) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the body is no JSON: {error}", hint="send one JSON object in UTF-8") from error


def read_known(
    decoder: msgspec.json.Decoder[_Body], body: bytes, known: Collection[str], hints: Collection[str] = ()
) -> _Body:
    """Decode a body whose every field must have a meaning here.

    Args:
        decoder: Of the body's shape.
        body: JSON.
        known: The fields of that shape.
        hints: Fields that may be there without effect, whatever their values.

    Raises:
        InvalidInputError: It isn't JSON, or a field has the wrong type.
        UnsupportedError: Another field asks for something.
    """
    for name, value in read_with(_KEYS, body).items():
        if name not in known and name not in hints and bytes(value) not in _NOTHING:
            close = get_close_matches(name[:80], known, n=1)
            hint = f"leave it out, or was {close[0]} meant?" if close else "leave it out"
            raise UnsupportedError(f"{name[:80]} isn't supported", hint=hint)
    return read_with(decoder, body)


def misfit(error: msgspec.ValidationError, shape: object) -> InvalidInputError:
    """Say which field of a body has the wrong type, and what it may be.

    Args:
        error: Of decoding the body.
        shape: What it was decoded as.
    """
    problem, _, path = str(error).partition(" - at ")
    place = path.strip("`").removeprefix("$").removeprefix(".")
    named = _NAMED.fullmatch(problem)
    field = re.split(r"[.\[]", place)[0] or (named[2] if named else "the body")
    where = f", at {place}" if place not in ("", field) else ""
    return InvalidInputError(f"{field} is wrong: {problem}{where}", hint=_way_out(problem, place, shape))


def _way_out(problem: str, place: str, shape: object) -> str:
    if expected := _EXPECTED.fullmatch(problem):
        return f"send {expected[1].replace('`', '').replace(' | ', ' or ')}"
    if named := _NAMED.fullmatch(problem):
        known = ", ".join(field.encode_name for one in _standing(shape, place) for field in _fields(one))
        return f"add {named[2]}" if named[1].startswith("missing") else f"leave it out; there are: {known}"
    words = [str(word) for one in _standing(shape, place) for word in _words(one)]
    return f"one of: {', '.join(words)}" if words else "see docs/rl-api.md"


def _standing(shape: object, place: str) -> list[inspect.Type]:
    """What may stand at a place of a shape."""
    found = list(_each(inspect.type_info(shape)))
    for step in _STEP.findall(place):
        found = [choice for one in found for inner in _inside(one, step) for choice in _each(inner)]
    return found


def _each(one: inspect.Type) -> Iterator[inspect.Type]:
    match one:
        case inspect.UnionType(types=types):
            for choice in types:
                yield from _each(choice)
        case inspect.Metadata(type=inner):
            yield from _each(inner)
        case _:
            yield one


def _inside(one: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match one:
        case inspect.VarTupleType(item_type=item) if step.startswith("["):
            yield item
        case _:
            yield from (field.type for field in _fields(one) if field.encode_name == step)


def _fields(one: inspect.Type) -> tuple[inspect.Field, ...]:
    return one.fields if isinstance(one, inspect.StructType) else ()


def _words(one: inspect.Type) -> tuple[object, ...]:
    match one:
        case inspect.LiteralType(values=values):
            return values
        case inspect.EnumType(cls=members):
            return tuple(member.value for member in members)
        case _:
            return ()
