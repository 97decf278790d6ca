"""Which experts a model's routers chose: what there is to choose, and the choices of a run of positions."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from slackwater.errors import InvalidInputError

MAX_EXPERTS: Final = 65_536
"""Most experts of a layer: their numbers have 16 bits."""
_SMALL: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What a model's routers choose from.

    An expert's number is the *logical* one, by which the checkpoint names its weights. An engine that places experts
    elsewhere, or several times, as load balancers do, tells and takes logical numbers all the same.
    """

    layers: tuple[int, ...]
    """Numbers of the layers that have a router, rising; at least one."""
    experts: int
    """Of each such layer, those that every token visits left out."""
    per_token: int
    """Experts chosen for a token, all different."""

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip((-1, *self.layers), self.layers, strict=False))
        if not (self.layers and rising and 1 <= self.per_token <= self.experts <= MAX_EXPERTS):
            raise InvalidInputError(
                f"no routers choose {self.per_token} of {self.experts} experts in the layers {self.layers[:8]}",
                hint=f"layers rise from 0; 1 to {MAX_EXPERTS} experts, of which a token has at least one",
            )

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        """Of an expert's number."""
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
        ids = np.frombuffer(rows, dtype=np.dtype(self.dtype).newbyteorder("<"))
        if ids.size and ids.max() >= self.experts:
            raise InvalidInputError(
                f"routes name expert {ids.max()}, there are {self.experts}", hint="experts count from 0"
            )
        chosen = np.sort(ids.reshape(-1, self.per_token), axis=1)
        if np.any(chosen[:, 1:] == chosen[:, :-1]):
            raise InvalidInputError("routes name an expert twice for one token", hint="each expert at most once")
        return len(rows) // self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteRows:
    """Rows of adjacent positions."""

    end: int
    """The position after the last of them."""
    data: bytes
    """As `Routing` lays them out."""
