"""What the core runs passes with: a model, and what its layers remember of every slot."""

from typing import Protocol

from torch import Tensor

from slackwater.engine.torch.batch import Pass
from slackwater.engine.torch.routing import RouteStore


class Runner(Protocol):
    """One thread calls every method, under torch's inference mode.

    A slot remembers the tokens of the pieces that it was given, each of which begins where the one before it ended. A
    piece that begins at 0 makes it forget what was there. The model's `Memory` says what `copy` can give: any number
    of first tokens; those that were marked and all that there are; nothing.
    """

    @property
    def routes(self) -> RouteStore | None:
        """Routes of what the slots remember; None where the model has no router."""
        ...

    def run(self, work: Pass) -> Tensor:
        """Compute.

        Returns:
            ``[len(wanted), vocab]``: logits after the last tokens of the wanted pieces.
        """
        ...

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """Make ``slot`` remember what ``source`` does of its first ``count`` tokens, and no more.

        Raises:
            InternalError: ``source`` can't give so many.
        """
        ...

    def mark(self, slot: int) -> None:
        """Have what is remembered now at hand for `copy`, whatever follows; until the next mark of this slot."""
        ...

    def close(self) -> None:
        """End the threads that it has."""
        ...
