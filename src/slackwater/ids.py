"""Names of things: small distinct types, and the grammar of the names that travel through keys and URLs."""

import re
from typing import Final, NewType

from slackwater.errors import InvalidInputError

Version = NewType("Version", int)
"""A policy version: its number inside one lineage, from 0, without gaps."""

RunId = NewType("RunId", str)
"""A lineage: one training run. Its names are never used again."""

ReplicaId = NewType("ReplicaId", str)
"""One inference replica, stable over its restarts."""

BootId = NewType("BootId", str)
"""One start of one replica."""

RequestId = NewType("RequestId", str)
"""One request, unique in its gateway."""

StateDigest = NewType("StateDigest", str)
"""SHA-256 in hex over a version's tensors: two equal states have equal digests, whoever computed them."""

ObjectDigest = NewType("ObjectDigest", str)
"""SHA-256 in hex of an object's bytes."""

_MAX_DIGITS: Final = 12
_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def run_id(text: str) -> RunId:
    """Check a lineage's name: one path segment of letters, digits, dot, dash and underscore.

    Raises:
        InvalidInputError: The text is no such segment.
    """
    if not _SEGMENT.fullmatch(text) or ".." in text:
        raise InvalidInputError(
            f"{text[:80]!r} can't name a run",
            hint="use 1 to 128 letters, digits, '.', '_' and '-', starting with a letter or digit",
        )
    return RunId(text)


def snapshot_name(run: RunId, version: Version) -> str:
    """Name a snapshot for people and APIs: ``<run>/<version>``."""
    return f"{run}/{version}"


def parse_snapshot(text: str) -> tuple[RunId, Version]:
    """Read ``<run>/<version>`` back.

    Raises:
        InvalidInputError: The text is no snapshot name.
    """
    run, slash, number = text.partition("/")
    if not slash or not number.isascii() or not number.isdigit() or len(number) > _MAX_DIGITS:
        raise InvalidInputError(f"{text[:80]!r} is no snapshot", hint="write <run>/<version>, such as demo/12")
    return run_id(run), Version(int(number))
