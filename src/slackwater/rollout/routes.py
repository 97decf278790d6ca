"""Which experts a model's routers chose: what there is to choose, and the choices of a run of positions."""

import struct
from dataclasses import dataclass
from typing import Final, Literal

from slackwater.errors import InvalidInputError

_SMALL: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What a model's routers choose from."""

    layers: tuple[int, ...]
    """Numbers of the layers that have a router, rising."""
    experts: int
    """Of each such layer, those that every token visits left out."""
    per_token: int
    """Experts chosen for a token."""

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        """Of an expert's number: the logical one, as the checkpoint counts."""
        return "uint8" if self.experts <= _SMALL else "uint16"

    @property
    def row_bytes(self) -> int:
        """Bytes of one position: ``[layers, per_token]``, little-endian."""
        return len(self.layers) * self.per_token * (1 if self.dtype == "uint8" else 2)

    def check(self, rows: bytes) -> int:
        """How many positions ``rows`` tells of.

        Raises:
            InvalidInputError: It is no whole number of them, or names an expert that there isn't, or one twice for a
                token in a layer.
        """
        if len(rows) % self.row_bytes:
            raise InvalidInputError(
                f"routes of {len(rows)} bytes are no whole rows of {self.row_bytes}",
                hint=f"send {self.dtype} [positions, {len(self.layers)}, {self.per_token}]",
            )
        ids = rows if self.dtype == "uint8" else struct.unpack(f"<{len(rows) // 2}H", rows)
        if ids and max(ids) >= self.experts:
            raise InvalidInputError(
                f"routes name expert {max(ids)}, there are {self.experts}", hint="experts count from 0"
            )
        k = self.per_token
        if any(len(set(ids[at : at + k])) < k for at in range(0, len(ids), k)):
            raise InvalidInputError("routes name an expert twice for one token", hint="each expert at most once")
        return len(rows) // self.row_bytes
