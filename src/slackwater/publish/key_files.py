"""Keys from files: the private one that signs, and the public ones that are trusted. Their bytes are told to nobody."""

import logging
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.errors import InvalidInputError
from slackwater.publish.small_file import read_small

_MAX_KEY_BYTES: Final = 65_536
_PUBLIC: Final = b"PUBLIC KEY-----"
_PRIVATE: Final = b"PRIVATE KEY-----"
"""How labels of PEM end (RFC 7468), also with a password or of one algorithm."""
_DIGITS: Final = re.compile(rb"[0-9A-Fa-f]{64}")
_LOG: Final = logging.getLogger(__name__)


def read_signer(path: Path | str) -> Signer:
    """Read a private key in PEM, without a password. One that others may read is taken, and the log says so.

    Raises:
        InvalidInputError: There is no such file, or it holds no Ed25519 private key; or that has a password.
        AuthError: It may not be read.
    """
    path = Path(path)
    body = _read(path)
    if _is_locked(body):
        raise InvalidInputError(
            f"{path} holds a private key with a password, and none is asked for",
            hint="write one without: openssl pkey -in OLD -out NEW && chmod 600 NEW",
        )
    if _PUBLIC in body or _DIGITS.fullmatch(body.strip()):
        raise InvalidInputError(
            f"{path} holds a public key, and a private one signs",
            hint="name the private key's file; the public one goes to readers",
        )
    try:
        signer = Signer.from_pem(body)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}", hint=error.hint) from error
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _LOG.warning("%s can be read by others than its owner: chmod 600 keeps it secret", path)
    return signer


def read_trusted(paths: Iterable[Path | str] | Path | str) -> TrustedKeys:
    """Read public keys: a file each, which holds PEM or 64 hex digits.

    Args:
        paths: The files, or a single one.

    Raises:
        InvalidInputError: There is no such file, or it holds no Ed25519 public key; or no file is named.
        AuthError: It may not be read.
    """
    several = [paths] if isinstance(paths, Path | str) else paths
    return TrustedKeys([_read_public(Path(path)) for path in several])


def _is_locked(body: bytes) -> bool:
    return b"ENCRYPTED" in body and _PRIVATE in body


def _read_public(path: Path) -> str:
    body = _read(path)
    if _PRIVATE in body:
        raise InvalidInputError(
            f"{path} holds a private key, and what is trusted is its public half",
            hint="write that: openssl pkey -in KEY -pubout -out KEY.pub; the private key stays with the trainer",
        )
    text = body.decode("utf-8", "replace").strip()
    try:
        TrustedKeys([text])
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.message}", hint=error.hint) from error
    return text


def _read(path: Path) -> bytes:
    body = read_small(path, "the key file", _MAX_KEY_BYTES)
    if len(body) > _MAX_KEY_BYTES:
        raise InvalidInputError(f"{path} is larger than any key", hint="name a file that holds one key")
    return body
