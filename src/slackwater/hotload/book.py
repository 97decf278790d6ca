"""The operations of a conductor: in memory to be read, and written to the ledger behind it, in order.

A ledger that can't be written is a warning: nothing that is served waits for it or rests on it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from slackwater.clock import Clock
from slackwater.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.hotload.ledger import Ledger
from slackwater.hotload.operation import Operation
from slackwater.hotload.target import TargetStatus
from slackwater.hotload.witness import FleetEvent, changes

if TYPE_CHECKING:
    from slackwater.ids import ReplicaId

T = TypeVar("T")

_PATIENCE_S: Final = 10.0
"""How long a call waits for the ledger's disk."""

_log = logging.getLogger(__name__)


class Book:
    """What is known of operations and replicas. All calls from one event loop.

    Args:
        ledger: Owned: `close` closes it.
        clock: Gives events their time.
        history: Operations in memory; the oldest ended one leaves first, and stays in the ledger.
    """

    def __init__(self, ledger: Ledger, clock: Clock, history: int) -> None:
        self._ledger = ledger
        self._clock = clock
        self._history = history
        self._operations: dict[str, Operation] = {}
        self._seen: dict[ReplicaId, TargetStatus] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._last: asyncio.Future[None] | None = None

    async def load(self) -> Mapping[str, str]:
        """Read the ledger; the modes that groups were configured with when it was written."""
        known = await self._ask(lambda: self._ledger.newest(self._history), ())
        self._operations = {operation.id: operation for operation in reversed(known)}
        return await self._ask(self._ledger.configured, {})

    def get(self, operation_id: str) -> Operation:
        """One operation, as it stands.

        Raises:
            NotFoundError: There is none of that id, or it was forgotten.
        """
        if operation_id not in self._operations:
            raise NotFoundError(f"there is no hot-load {operation_id[:80]!r}", hint="list them")
        return self._operations[operation_id]

    def newest(self) -> Sequence[Operation]:
        """Those remembered, newest first."""
        return tuple(reversed(self._operations.values()))

    async def by_key(self, key: str) -> Operation | None:
        """The operation of that idempotency key, remembered or in the ledger.

        Raises:
            UnavailableError: The ledger hangs.
        """
        for operation in self._operations.values():
            if operation.idempotency_key == key:
                return operation
        return await self._ask(lambda: self._ledger.by_key(key), None)

    def put(self, *operations: Operation) -> None:
        """Keep operations as they are now. Readers see it at once; `written` tells when the ledger has it."""
        news = [each for each in operations if self._operations.get(each.id) != each]
        if not news:
            return
        self._operations.update({each.id: each for each in news})
        ended = [each.id for each in self._operations.values() if each.ended]
        for old in ended[: max(0, len(self._operations) - self._history)]:
            del self._operations[old]
        self._write(lambda: self._ledger.save(*news))

    def saw(self, status: TargetStatus, operation_id: str | None = None) -> None:
        """Note what has become of a replica since it was last seen."""
        found = changes(self._seen.get(status.replica), status, self._clock.wall(), operation_id)
        self._seen[status.replica] = status
        self.note(*found)

    def last(self, replica: "ReplicaId") -> TargetStatus | None:
        """What a replica said when it last answered this process; None where it never did."""
        return self._seen.get(replica)

    def note(self, *events: FleetEvent) -> None:
        """Append events to the ledger."""
        if events:
            self._write(lambda: self._ledger.note(*events))

    def configure(self, modes: Mapping[str, str]) -> None:
        """Keep the configured modes of groups."""
        self._write(lambda: self._ledger.configure(modes))

    async def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """The newest events, newest first."""
        return await self._ask(lambda: self._ledger.events(limit), ())

    async def written(self) -> None:
        """Return once everything that was put is in the ledger, or has been given up with a warning."""
        if self._last is not None and not await self._patiently(self._last):
            _log.warning("the ledger hangs; it is gone on without waiting for it")

    async def close(self) -> None:
        """Write what is left and close the ledger. Idempotent; nothing is put afterwards."""
        await asyncio.to_thread(self._thread.shutdown)
        self._ledger.close()

    def _write(self, work: Callable[[], None]) -> None:
        self._last = asyncio.get_running_loop().run_in_executor(self._thread, _tried, work, None)

    async def _ask(self, work: Callable[[], T], otherwise: T) -> T:
        found = asyncio.get_running_loop().run_in_executor(self._thread, _tried, work, otherwise)
        if await self._patiently(found):
            return found.result()
        raise UnavailableError(f"the ledger didn't answer within {_PATIENCE_S:g} s", hint="look at its disk")

    async def _patiently(self, work: asyncio.Future[T]) -> bool:
        """Wait for the ledger's thread; whether it was done in time. It goes on in either case."""
        timer = asyncio.ensure_future(self._clock.sleep(_PATIENCE_S))
        try:
            await asyncio.wait((work, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return work.done()


def _tried(work: Callable[[], T], otherwise: T) -> T:
    try:
        return work()
    except SlackwaterError as error:
        _log.warning("the ledger can't be used, and is gone on without: %s", error)
        return otherwise
