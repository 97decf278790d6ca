"""What a command has that a person waits for: bars, temporary folders, and a clean end by Ctrl-C."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from slackwater.cli.ending import Ending
from slackwater.cli.progress import Bars
from slackwater.cli.scratch import Scratch
from slackwater.errors import AuthError, UnavailableError
from slackwater.publish.delta import Progress

_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Attended:
    """See the module."""

    scratch: Scratch
    tell: Progress
    """Moves the bar of a stage."""


@contextmanager
def attended(ending: Ending) -> Generator[Attended]:
    """Do a command's work within the block. A signal takes bars and folders away and ends the process at once.

    Args:
        ending: Of this process, without grace.

    Raises:
        AuthError: A file may not be read or written.
        UnavailableError: The disk is full, or fails.
    """
    scratch, bars = Scratch(), Bars()

    def end() -> None:
        bars.stop()
        scratch.end()

    with ending.in_order(end), scratch, bars, _disk_errors():
        yield Attended(scratch=scratch, tell=bars.tell)


@contextmanager
def _disk_errors() -> Generator[None]:
    """Where errors of the disk that no package foresaw become ours."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename or 'the disk'}: {error.strerror or type(error).__name__}"
        if error.errno in _REFUSED:
            raise AuthError(message, hint="give this user the right to it") from error
        raise UnavailableError(message, hint="check the disk and its free space, and try again") from error
