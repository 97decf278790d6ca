"""What is typed on the command line, read: choices whose slips are told, and ``--version``."""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

import typer


def one_of(*choices: str) -> Callable[[str], str]:
    """What reads one of a few words; a slip is told with the nearest of them."""

    def read(text: str) -> str:
        if text in choices:
            return text
        near = get_close_matches(text.lower(), choices, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(f"{text!r} is none of {', '.join(choices)}{meant}")

    return read


def tell_version(*, wanted: bool) -> None:
    """Print the version and end, where that is ``wanted``."""
    if not wanted:
        return
    try:
        found = version("slackwater")
    except PackageNotFoundError:
        found = "not installed"
    sys.stdout.write(f"slackwater {found}\n")
    raise typer.Exit
