"""Runs of a model whose routes are recorded, and go where they have to."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from slackwater.engine.torch.batch import Batch
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.routing import RouteStore
from slackwater.engine.torch.tap import RouterTap


class Recorder:
    """What a runner keeps of routes.

    Args:
        model: Whose routers choose them.
        slots: Answers at once.
        window: Most positions of one.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int) -> None:
        self.routes: Final = RouteStore(model.routing, slots=slots, window=window) if model.routing else None
        self._tap: Final = RouterTap(model.routers, model.routing) if model.routing else None

    @contextmanager
    def recording(self, batch: Batch, *, known: int = 0) -> Generator[None]:
        """Have the block's one run of ``batch`` send tokens where ``routes`` say, and record there where they went.

        Args:
            batch: What runs.
            known: How many of its first tokens were recorded before.

        Raises:
            InternalError: See `RouterTap.watching`.
        """
        if self._tap is None or self.routes is None:
            yield
            return
        with self._tap.watching(self.routes.forced(batch.slots, batch.places)) as seen:
            yield
        chosen = seen.chosen(len(batch.slots))
        self.routes.put(batch.slots[known:], batch.places[known:], chosen[known:])

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """Give ``slot`` the routes of the first ``count`` tokens of ``source``, another one."""
        if self.routes and slot != source:
            self.routes.copy(slot, source=source, count=count)
