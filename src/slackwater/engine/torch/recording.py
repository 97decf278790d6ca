"""A run of a model whose routes are recorded, and go where they have to."""

from collections.abc import Generator
from contextlib import contextmanager

from slackwater.engine.torch.batch import Batch
from slackwater.engine.torch.routing import RouteStore
from slackwater.engine.torch.tap import RouterTap


@contextmanager
def recording(tap: RouterTap | None, routes: RouteStore | None, batch: Batch, *, known: int = 0) -> Generator[None]:
    """Have the block's one run of ``batch`` send tokens where ``routes`` say, and record there where they went.

    Args:
        tap: On the model's routers; None: it has none.
        routes: Likewise.
        batch: What runs.
        known: How many of its first tokens were recorded before.

    Raises:
        InternalError: See `RouterTap.watching`.
    """
    if tap is None or routes is None:
        yield
        return
    with tap.watching(routes.forced(batch.slots, batch.places)) as seen:
        yield
    chosen = seen.chosen(len(batch.slots))
    routes.put(batch.slots[known:], batch.places[known:], chosen[known:])
