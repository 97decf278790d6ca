"""The grammar of keys and ranges, held by every bucket before a key reaches a path or a URL."""

import re
from typing import Final

from slackwater.errors import InvalidInputError

MAX_KEY: Final = 512
"""Most characters of a key."""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def check_key(key: str) -> str:
    """Return ``key`` if it is one: segments of letters, digits, ``._-``, joined by ``/``.

    No segment starts with a dot: ``..`` walks out of a directory, and ``.name`` is where half-written
    files wait.

    Raises:
        InvalidInputError: It is no key.
    """
    if len(key) > MAX_KEY or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidInputError(
            f"{key[:80]!r} is no object key",
            hint=f"use at most {MAX_KEY} letters, digits, '.', '_', '-' and '/', no part starting with '.'",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` without a closing slash; empty stands for the whole bucket.

    Raises:
        InvalidInputError: It is neither empty nor a key.
    """
    return check_key(prefix.removesuffix("/")) if prefix else prefix


def check_range(start: int, length: int) -> None:
    """Check that a range counts forward from 0.

    Raises:
        InvalidInputError: A bound is negative.
    """
    if start < 0 or length < 0:
        raise InvalidInputError(f"{length} bytes from {start} are no range", hint="count from 0, forward")
