"""Look again, slice by slice, at weights that serve: memory that changes by itself is found."""

from collections.abc import Iterator
from typing import Final

from slackwater.checkpoint.outline import Outline
from slackwater.clock import Clock
from slackwater.replica.exchange import Exchange
from slackwater.replica.prepare import memory_spoilt

SLICE_BYTES: Final = 8 * 1024 * 1024
"""Of weights that are read at once, or one tile where that is larger."""


async def scrub(exchange: Exchange, clock: Clock, period_s: float) -> None:
    """Compare every tile with its digest in the manifest of the version in place, evenly over ``period_s``, for ever.

    Raises:
        SpoiltError: A tile differs.
    """
    outline = exchange.table.outline
    while True:
        for tiles, share in slices(outline):
            await clock.sleep(period_s * share)
            wrong = await exchange.look_at(tiles)
            if wrong is not None:
                raise memory_spoilt(f"{wrong}, and no swap wrote it")


def slices(outline: Outline) -> Iterator[tuple[range, float]]:
    """Numbers of tiles that are read together, and their share of all bytes."""
    whole, begin, held = max(1, int(outline.tile_bytes.sum())), 0, 0
    for number, num_bytes in enumerate(outline.tile_bytes.tolist()):
        held += num_bytes
        if held >= SLICE_BYTES or number + 1 == outline.num_tiles:
            yield range(begin, number + 1), held / whole
            begin, held = number + 1, 0
