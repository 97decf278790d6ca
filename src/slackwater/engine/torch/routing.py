"""Routes as the engine holds them: beside the KV, a row per slot and position."""

from typing import Final

import numpy as np
import numpy.typing as npt

from slackwater.rollout.routes import Routing

_Ids = npt.NDArray[np.int64]


class RouteStore:
    """Which experts every position's token was sent to, and to which it has to be sent.

    Memory is touched only as far as it is used.

    Args:
        routing: What there is to choose from.
        slots: Rows.
        window: Most positions.
    """

    def __init__(self, routing: Routing, *, slots: int, window: int) -> None:
        self.routing: Final = routing
        dtype = np.dtype(routing.dtype).newbyteorder("<")
        self._rows: Final = np.zeros((slots, window, len(routing.layers), routing.per_token), dtype=dtype)
        self._forced: Final[dict[int, npt.NDArray[np.integer]]] = {}

    def put(self, slots: _Ids, places: _Ids, chosen: _Ids) -> None:
        """Record what routers chose.

        Args:
            slots: ``[tokens]``.
            places: ``[tokens]``: positions.
            chosen: ``[tokens, layers, per_token]``.
        """
        self._rows[slots, places] = chosen

    def told(self, slot: int, begin: int, end: int) -> bytes:
        """The rows of positions ``[begin, end)``."""
        return self._rows[slot, begin:end].tobytes()

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """Give ``slot`` the first ``count`` rows of ``source``."""
        self._rows[slot, :count] = self._rows[source, :count]

    def force(self, slot: int, rows: bytes) -> None:
        """Have the first positions of ``slot`` sent where ``rows`` say, from now on; none where there are no rows."""
        self._forced.pop(slot, None)
        if rows:
            self._forced[slot] = np.frombuffer(rows, dtype=self._rows.dtype).reshape(-1, *self._rows.shape[2:])

    def forced(self, slots: _Ids, places: _Ids) -> _Ids | None:
        """Where tokens have to be sent: ``[tokens, layers, per_token]``, rows of -1 where routers choose. None: they
        choose everywhere.
        """
        if not self._forced:
            return None
        ids = np.full((len(slots), *self._rows.shape[2:]), -1, dtype=np.int64)
        for at, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
            rows = self._forced.get(slot)
            if rows is not None and place < len(rows):
                ids[at] = rows[place]
        return ids if (ids >= 0).any() else None
