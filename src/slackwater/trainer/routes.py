"""Routes for router replay: read from ``engine_data``, checked, and put together over the turns of an episode."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slackwater.api.routed import RoutedExperts
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.rollout.routes import Routing

Experts = npt.NDArray[np.uint8 | np.uint16]
"""Logical numbers of experts, of shape [rows, layers, experts per token]."""
Positions = npt.NDArray[np.int64]
"""Positions in prompt and completion, rising."""

_Number = TypeVar("_Number", bound=np.integer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routes:
    """Which experts processed which positions. A position that nobody told of has no row: none is padded."""

    routing: Routing
    """Names the layers of the second axis."""
    experts: Experts
    """One row for each of ``positions``. Read-only."""
    positions: Positions
    """Read-only."""

    def before(self, position: int) -> "Routes":
        """The rows of earlier positions."""
        count = int(np.searchsorted(self.positions, position))
        return replace(self, experts=self.experts[:count], positions=self.positions[:count])

    def followed_by(self, later: "Routes", *, start: int) -> "Routes":
        """The rows of this turn as far as another one, which asked for those from ``start`` on, shares them, and then
        its own.

        Raises:
            InvalidInputError: They are of different routers, or ``later`` has rows before ``start``.
        """
        if self.routing != later.routing or (later.positions.size and later.positions[0] < start):
            raise InvalidInputError(
                f"routes don't go on from position {start}", hint="both turns need one model, and the start asked for"
            )
        kept = self.before(start)
        return Routes(
            routing=self.routing,
            experts=_frozen(np.concatenate([kept.experts, later.experts])),
            positions=_frozen(np.concatenate([kept.positions, later.positions])),
        )


def read_routes(told: RoutedExperts) -> Routes:
    """Decode and check ``routed_experts``.

    Raises:
        CorruptError: Its data doesn't fit its shape, it names an expert that there isn't or one twice for a token, or
            its missing spans contradict each other.
    """
    raw = told.raw()
    try:
        routing = Routing(layers=told.layers, experts=told.experts, per_token=told.shape[-1] if told.shape else 0)
        rows = routing.check(raw)
    except InvalidInputError as error:
        raise CorruptError(f"routed_experts is wrong: {error.message}") from error
    if told.dtype != routing.dtype or told.shape != (rows, len(routing.layers), routing.per_token):
        raise CorruptError(f"routed_experts is {told.dtype} of shape {told.shape}, and has {rows} rows")
    ids = np.frombuffer(raw, dtype=np.dtype(routing.dtype).newbyteorder("<")).reshape(told.shape)
    return Routes(routing=routing, experts=ids, positions=_frozen(_positions(told, rows)))


def _positions(told: RoutedExperts, rows: int) -> Positions:
    lacks = sum(end - start for start, end in told.missing)
    end = told.start + rows + lacks
    bounds = [told.start, *(bound for span in told.missing for bound in span), end]
    starts = [start for start, _ in told.missing]
    rises = all(low <= high for low, high in pairwise(bounds)) and all(start < stop for start, stop in told.missing)
    if told.start < 0 or not rises or starts != sorted(set(starts)):
        raise CorruptError(f"routed_experts lacks rows at {told.missing[:8]}, which can't be")
    present = np.ones(end - told.start, dtype=np.bool_)
    for start, stop in told.missing:
        present[start - told.start : stop - told.start] = False
    return np.flatnonzero(present) + told.start


def _frozen(made: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    made.flags.writeable = False
    return made
