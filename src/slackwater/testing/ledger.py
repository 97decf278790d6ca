"""Ledgers for tests: one in memory, and one whose process dies at a chosen write."""

from collections.abc import Mapping

from slackwater.errors import UnavailableError
from slackwater.hotload.operation import Operation
from slackwater.hotload.witness import FleetEvent


class MemoryLedger:
    """The reference: a `slackwater.hotload.ledger.Ledger` in this process's memory, without bounds."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        self._events: list[FleetEvent] = []
        self._modes: dict[str, str] = {}

    def save(self, *operations: Operation) -> None:
        """See `slackwater.hotload.ledger.Ledger.save`."""
        self._operations.update({operation.id: operation for operation in operations})

    def newest(self, limit: int) -> tuple[Operation, ...]:
        """See `slackwater.hotload.ledger.Ledger.newest`."""
        known = tuple(reversed(self._operations.values()))
        return tuple(each for number, each in enumerate(known) if number < limit or not each.ended)

    def by_key(self, key: str) -> Operation | None:
        """See `slackwater.hotload.ledger.Ledger.by_key`."""
        return next((each for each in self._operations.values() if each.idempotency_key == key), None)

    def note(self, *events: FleetEvent) -> None:
        """See `slackwater.hotload.ledger.Ledger.note`."""
        self._events.extend(events)

    def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """See `slackwater.hotload.ledger.Ledger.events`."""
        return tuple(reversed(self._events))[:limit]

    def configure(self, modes: Mapping[str, str]) -> None:
        """See `slackwater.hotload.ledger.Ledger.configure`."""
        self._modes = dict(modes)

    def configured(self) -> Mapping[str, str]:
        """See `slackwater.hotload.ledger.Ledger.configured`."""
        return dict(self._modes)

    def close(self) -> None:
        """See `slackwater.hotload.ledger.Ledger.close`."""


class DyingLedger(MemoryLedger):
    """Its process dies after ``writes`` writes: what comes later never reaches the disk, and no call tells.

    Args:
        writes: How many writes are kept.
        tells: Whether later ones raise UnavailableError, as a full disk does, instead of vanishing.
    """

    def __init__(self, writes: int, *, tells: bool = False) -> None:
        super().__init__()
        self._left = writes
        self._tells = tells

    def save(self, *operations: Operation) -> None:
        """See `MemoryLedger.save`."""
        if self._alive():
            super().save(*operations)

    def note(self, *events: FleetEvent) -> None:
        """See `MemoryLedger.note`."""
        if self._alive():
            super().note(*events)

    def configure(self, modes: Mapping[str, str]) -> None:
        """See `MemoryLedger.configure`."""
        if self._alive():
            super().configure(modes)

    def revive(self) -> None:
        """Write again from now on: the next process."""
        self._left = 1_000_000

    def _alive(self) -> bool:
        self._left -= 1
        if self._left >= 0:
            return True
        if self._tells:
            raise UnavailableError("the ledger's disk is full")
        return False
