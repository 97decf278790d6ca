"""A source that lacks tensors, completed from what was committed: those are unchanged."""

from collections.abc import Callable, Mapping
from typing import Final

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.weights.source import TensorSource


class CompletedSource:
    """A whole model: a source's tensors, and for those that it lacks the ones held.

    Args:
        source: Some tensors of the model.
        specs: All of them.
        held: Bits of those that the source lacks.
    """

    def __init__(self, source: TensorSource, specs: Mapping[str, TensorSpec], held: Callable[[str], Bits]) -> None:
        self._source: Final = source
        self._specs: Final = dict(sorted(specs.items()))
        self._held: Final = held

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self._specs

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`."""
        return self._source.bits(name) if name in self._source.specs() else self._held(name)
