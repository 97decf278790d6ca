"""Keys from files: the private one that signs, and the public ones that are trusted. Their bytes are told to nobody."""

import logging
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.errors import AuthError, InvalidInputError

_MAX_KEY_BYTES: Final = 65_536
_LOG: Final = logging.getLogger(__name__)


def read_signer(path: Path) -> Signer:
    """Read a private key in PEM, without a password. One that others may read is taken, and the log says so.

    Raises:
        InvalidInputError: There is no such file, or it holds no Ed25519 private key.
        AuthError: It may not be read.
    """
    body = _read(path)
    try:
        signer = Signer.from_pem(body)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}", hint=error.hint) from error
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _LOG.warning("%s can be read by others than its owner: chmod 600 keeps it secret", path)
    return signer


def read_trusted(paths: Iterable[Path]) -> TrustedKeys:
    """Read public keys: a file each, which holds PEM or 64 hex digits.

    Raises:
        InvalidInputError: There is no such file, or it holds no Ed25519 public key; or no file is named.
        AuthError: It may not be read.
    """
    return TrustedKeys([_read_public(path) for path in paths])


def _read_public(path: Path) -> str:
    text = _read(path).decode("utf-8", "replace").strip()
    try:
        TrustedKeys([text])
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}", hint=error.hint) from error
    return text


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_KEY_BYTES + 1)
    except PermissionError as error:
        raise AuthError(f"the key file {path} may not be read", hint="give this user the right to it") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidInputError(f"the key file {path} can't be read: {reason}", hint="check its path") from error
    if len(body) > _MAX_KEY_BYTES:
        raise InvalidInputError(f"{path} is larger than any key", hint="name a file that holds one key")
    return body
