"""Files that people name and that hold little: read within a bound, with errors that say which one and why."""

from pathlib import Path

from slackwater.errors import AuthError, InvalidInputError


def read_small(path: Path, what: str, most: int) -> bytes:
    """The bytes of ``path``, at most one more than ``most``: who gets that many refuses the file.

    Args:
        path: The file.
        what: What it is, for errors, such as ``the key file``.
        most: Bytes that it may have.

    Raises:
        AuthError: It may not be read.
        InvalidInputError: It can't be.
    """
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except PermissionError as error:
        raise AuthError(f"{what} {path} may not be read", hint="give this user the right to it") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidInputError(f"{what} {path} can't be read: {reason}", hint="check its path") from error
