"""Arrays of digests inside JSON: base64 of little-endian 64-bit words, a third of the size of hex in a list."""

import base64
import binascii

import numpy as np

from slackwater.checkpoint.tensor import Words
from slackwater.errors import CorruptError


def to_column(words: Words) -> str:
    """Words as text."""
    return base64.b64encode(words.astype("<u8").tobytes()).decode()


def from_column(text: str, count: int, field: str) -> Words:
    """Undo `to_column`: exactly ``count`` words, read-only.

    Raises:
        CorruptError: It is another number of words, or no base64; the message names ``field``.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptError(f"manifest field {field}: it is no base64") from error
    if len(data) != 8 * count:
        raise CorruptError(f"manifest field {field}: {len(data)} bytes instead of {8 * count}")
    if base64.b64encode(data).decode() != text:
        raise CorruptError(f"manifest field {field}: its base64 isn't in the form that has no other")
    return np.frombuffer(data, dtype=np.uint64)
