"""A source that tells how far its reading is."""

import itertools
from collections.abc import Callable, Mapping

from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.weights.source import TensorSource


class Watched:
    """A `slackwater.weights.source.TensorSource` whose tiles are read one by one, in any order.

    Args:
        source: Where they come from.
        progress: Told how many are read, and of how many, from the threads that read.
    """

    def __init__(self, source: TensorSource, progress: Callable[[int, int], None]) -> None:
        self._source = source
        self._progress = progress
        self._total = Outline(source.specs().values()).num_tiles
        self._count = itertools.count(1)

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `slackwater.weights.source.TensorSource.specs`."""
        return self._source.specs()

    def bits(self, name: str) -> Bits:
        """See `slackwater.weights.source.TensorSource.bits`. One call stands for one tile."""
        self._progress(next(self._count), self._total)
        return self._source.bits(name)
