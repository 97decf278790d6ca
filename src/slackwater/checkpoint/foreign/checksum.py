"""The checksums by which foreign layouts prove a tensor's new bytes.

Adler-32 finds accidents, and not all: of tensors with a few changed weights, one in some thousands keeps its
checksum (two neighbours up, two down). So it never decides alone that a tensor *is* new already: the result of
the patch is asked first.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError, UnsupportedError, WrongBaseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """One kind, as text."""

    name: str
    form: str
    """What its text looks like, in words."""
    pattern: re.Pattern[str]
    digest: Callable[[memoryview], str]


def _adler32_hex(data: memoryview) -> str:
    return f"{zlib.adler32(data):08x}"


def _adler32_decimal(data: memoryview) -> str:
    return str(zlib.adler32(data))


ADLER32_DECIMAL: Final = Checksum(
    name="adler32", form="a decimal number", pattern=re.compile(r"[0-9]{1,10}"), digest=_adler32_decimal
)
"""As Fireworks writes it."""

CHECKSUMS: Final[Mapping[str, Checksum]] = {
    "adler32": Checksum(name="adler32", form="8 hex digits", pattern=re.compile(r"[0-9a-f]{8}"), digest=_adler32_hex),
    "xxh3-128": Checksum(
        name="xxh3-128",
        form="32 hex digits",
        pattern=re.compile(r"[0-9a-f]{32}"),
        digest=xxhash.xxh3_128_hexdigest,
    ),
}
"""By the name that slime's ``checksum_format`` has for them."""


def find_checksum(name: str) -> Checksum:
    """The checksum of a name.

    Raises:
        UnsupportedError: None of `CHECKSUMS` has this name.
    """
    found = CHECKSUMS.get(name)
    if found is None:
        raise UnsupportedError(f"the checksum {name[:40]!r} can't be verified", hint=f"one of {', '.join(CHECKSUMS)}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What one tensor's new bytes have to give."""

    checksum: Checksum
    expected: str

    @classmethod
    def read(cls, where: str, checksum: Checksum, text: str) -> "Proof":
        """Take the text that a file gives for a tensor.

        Raises:
            CorruptError: It doesn't have the checksum's form.
        """
        if not checksum.pattern.fullmatch(text):
            raise CorruptError(f"{where}: its {checksum.name} is {text[:40]!r}, not {checksum.form}")
        return cls(checksum=checksum, expected=text)

    def settle(self, where: str, old: Bits, new: Bits) -> Bits:
        """The bits that hold: ``new`` as made; ``old`` where only that is what the delta makes.

        Raises:
            WrongBaseError: Neither is.
        """
        if self._holds(new):
            return new
        if self._holds(old):
            return old
        raise WrongBaseError(
            f"{where}: the result hasn't the {self.checksum.name} {self.expected} that the delta names: "
            "the tensor held isn't what the delta was made on, or the body is damaged",
            hint="catch up from a full snapshot",
        )

    def _holds(self, bits: Bits) -> bool:
        return digest_of(self.checksum, bits) == self.expected


def digest_of(checksum: Checksum, bits: Bits) -> str:
    """The checksum of a tensor's little-endian bytes, as text."""
    return checksum.digest(np.ascontiguousarray(bits).view(np.uint8).data)
