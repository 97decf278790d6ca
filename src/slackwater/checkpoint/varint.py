"""Small counts in few bytes: unsigned LEB128, seven bits a byte, the lowest first; a set highest bit: more follow.

As in DWARF 5, section 7.6, and Protocol Buffers.
"""

from typing import Final

from slackwater.errors import CorruptError

_MOST_BYTES: Final = 5
"""Enough for 32 bits."""
_BITS: Final = 7
_MORE: Final = 1 << _BITS


def varint(number: int) -> bytes:
    """A number below 2**32 in its shortest form."""
    result = bytearray()
    while number >= _MORE:
        result.append(number % _MORE | _MORE)
        number >>= _BITS
    return bytes((*result, number))


def read_varint(where: str, body: memoryview, begin: int) -> tuple[int, int]:
    """Undo `varint`: the number that begins at a byte, and the byte after it.

    Args:
        where: The body's place, for messages.
        body: Hostile.
        begin: Where the number begins.

    Raises:
        CorruptError: The body ends inside it, it has more than 32 bits, or it has a shorter form.
    """
    number = 0
    for index, byte in enumerate(body[begin : begin + _MOST_BYTES]):
        number |= byte % _MORE << _BITS * index
        if byte < _MORE:
            if number >> 32 or (index and byte == 0):
                break
            return number, begin + index + 1
    raise CorruptError(
        f"{where}: varint at byte {begin}: it is cut, too long or too large", hint="fetch the object again"
    )
