"""How commands print: sizes as people read them, one JSON object, a console that cuts nothing where nobody looks."""

import sys
from typing import Final

import msgspec
from rich.console import Console
from rich.filesize import decimal

_WIDE: Final = 1000
"""Columns where nobody looks."""


def size_text(num_bytes: int) -> str:
    """Bytes in decimal units: ``41.95 MB``."""
    return decimal(num_bytes, precision=2)


def counted(number: int, what: str) -> str:
    """A number and what it counts: ``1 tile``, ``1,024 tiles``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def write_json(value: object) -> None:
    """Write one JSON object to standard output, in one line."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def plain(text: str) -> str:
    """Text of a stranger's, such as a tensor's name, with its control characters made visible: one line stays one."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def console() -> Console:
    """Standard output, with nothing in it taken for markup."""
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(width=_WIDE, highlight=False, markup=False, emoji=False)
