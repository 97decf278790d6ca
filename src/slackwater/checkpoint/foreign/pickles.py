"""What only unpickling could read is refused by its first bytes or its name, with the way out in the message."""

import struct
from typing import Final, NoReturn

from slackwater.checkpoint.shards import MAX_HEADER_BYTES
from slackwater.errors import UnsupportedError

_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_STARTS: Final = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
"""A zip as torch writes it; a pickle of protocol 2 to 5."""
_ARC_V3: Final = b"ARC3_ENVELOPE\0"
"""Before the pickle in a body of arc_v3."""
_LENGTH: Final = struct.Struct("<Q")


def refuse_pickled_name(file: str) -> None:
    """Refuse a file whose name says that it is a pickle.

    Raises:
        UnsupportedError: It does.
    """
    if file.endswith(_SUFFIXES):
        _refuse(file)


def refuse_pickled_file(file: str, buffer: memoryview) -> None:
    """Refuse a pickle in the place of a safetensors file.

    Raises:
        UnsupportedError: It is one.
    """
    # The two bytes that begin a pickle can begin the length of a header too, but of none that safetensors allows.
    if len(buffer) >= _LENGTH.size and _LENGTH.unpack_from(buffer)[0] > MAX_HEADER_BYTES:
        refuse_pickled_body(file, buffer)


def refuse_pickled_body(where: str, body: memoryview) -> None:
    """Refuse a pickle in the place of a compressed body.

    Raises:
        UnsupportedError: It is one.
    """
    start = bytes(body[: len(_ARC_V3)])
    if start.startswith(_ARC_V3):
        raise arc_v3_refused(where)
    if start.startswith(_STARTS):
        _refuse(where)


def arc_v3_refused(where: str) -> UnsupportedError:
    """The error for Fireworks' third layout."""
    return UnsupportedError(
        f"{where} is arc_v3, which holds pickles; unpickling runs whatever their writer put there",
        hint="write the delta as arc_v2",
    )


def _refuse(where: str) -> NoReturn:
    raise UnsupportedError(
        f"{where} is a pickle; unpickling runs whatever its writer put there", hint="export safetensors"
    )
