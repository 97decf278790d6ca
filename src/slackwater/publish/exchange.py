"""How the ranks of one trainer talk while they publish: messages to rank 0, and its answer to all."""

import threading
from typing import Final, Protocol

from slackwater.errors import UnavailableError


class Exchange(Protocol):
    """Collective calls: every rank makes the same ones in the same order."""

    def gather(self, body: bytes) -> list[bytes] | None:
        """Send bytes to rank 0; returns those of all ranks there, by rank, and None elsewhere.

        Raises:
            UnavailableError: A rank is gone.
        """
        ...

    def broadcast(self, body: bytes | None) -> bytes:
        """Receive what rank 0 sends; the others' ``body`` is None.

        Raises:
            UnavailableError: A rank is gone.
        """
        ...


class _Table:
    """What the threads share."""

    def __init__(self, world: int, patience_s: float) -> None:
        self.slots: list[bytes] = [b""] * world
        self.barrier: Final = threading.Barrier(world, timeout=patience_s)


class ThreadExchange:
    """Ranks that are threads of one process. Made by `thread_exchanges`."""

    def __init__(self, rank: int, table: _Table) -> None:
        self._rank: Final = rank
        self._table: Final = table

    def gather(self, body: bytes) -> list[bytes] | None:
        """See `Exchange.gather`."""
        self._table.slots[self._rank] = body
        self._meet()
        gathered = list(self._table.slots) if self._rank == 0 else None
        self._meet()
        return gathered

    def broadcast(self, body: bytes | None) -> bytes:
        """See `Exchange.broadcast`."""
        if body is not None:
            self._table.slots[0] = body
        self._meet()
        received = self._table.slots[0]
        self._meet()
        return received

    def leave(self) -> None:
        """Let the others know that this rank is gone."""
        self._table.barrier.abort()

    def _meet(self) -> None:
        try:
            self._table.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise UnavailableError(f"rank {self._rank} waited for another, which is gone") from error


def thread_exchanges(world: int, patience_s: float = 600.0) -> list[ThreadExchange]:
    """An exchange for each rank of one process; calls wait so many seconds for the slowest."""
    table = _Table(world, patience_s)
    return [ThreadExchange(rank, table) for rank in range(world)]
