"""Follow a run's head by its number."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final, Protocol

from slackwater.clock import Clock
from slackwater.delivery.fetcher import HeadView
from slackwater.errors import AuthError, SlackwaterError, UnavailableError
from slackwater.ids import Version

LONGEST_WAIT_S: Final = 60.0
"""Back-off ends here, or at the poll's own interval where that is longer."""

_log = logging.getLogger(__name__)


class HeadSource(Protocol):
    """What a watcher asks; `slackwater.delivery.fetcher.Fetcher` is one."""

    def look(self, known: Version | None) -> HeadView:
        """See `slackwater.delivery.fetcher.Fetcher.look`; blocks."""
        ...


class Watcher:
    """Emits each newer head as it is seen. Versions that came and went between two looks are left out.

    A store that doesn't answer or refuses the credentials is asked again with back-off: what serves goes on.
    A head that goes back is refused.

    Args:
        source: Where to look.
        clock: What waits.
        poll_s: Seconds between two looks.
    """

    def __init__(self, source: HeadSource, clock: Clock, poll_s: float) -> None:
        self._source = source
        self._clock = clock
        self._poll_s = poll_s
        self._trouble: SlackwaterError | None = None
        self._receded = False
        self._looked_at: float | None = None

    @property
    def trouble(self) -> SlackwaterError | None:
        """Why the last look failed; None where it didn't."""
        return self._trouble

    @property
    def receded(self) -> bool:
        """Whether the bucket was set back below the version known."""
        return self._receded

    @property
    def looked_at(self) -> float | None:
        """When the last look that was answered began, in monotonic seconds; None before the first."""
        return self._looked_at

    def __aiter__(self) -> AsyncIterator[Version]:
        """Every head from the first one found: ``versions(None)``."""
        return self.versions(None)

    async def versions(self, after: Version | None) -> AsyncIterator[Version]:
        """Newer heads than ``after``, rising, without end; cancel it to stop.

        Raises:
            NotFoundError: No such bucket.
        """
        known = after
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                view = await asyncio.to_thread(self._source.look, known)
            except (UnavailableError, AuthError) as error:
                self._trouble = error
                failures += 1
                wait_s = back_off(self._poll_s, failures)
                _log.warning("can't look for new versions, again in %.0f s: %s", wait_s, error)
                await self._clock.sleep(wait_s)
                continue
            self._trouble, failures, self._looked_at = None, 0, began
            self._note_receded(view, known)
            if view.version is not None and (known is None or view.version > known):
                known = view.version
                yield known
            else:
                await self._clock.sleep(self._poll_s)

    def _note_receded(self, view: HeadView, known: Version | None) -> None:
        backwards = view.version is not None and known is not None and view.version < known
        receded = view.receded or backwards
        if receded and not self._receded:
            _log.error("the bucket went back below version %s: refused, version %s stays", known, known)
        self._receded = receded


def back_off(poll_s: float, failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling from one poll to `LONGEST_WAIT_S`."""
    return min(poll_s * 2.0 ** min(failures, 32), max(poll_s, LONGEST_WAIT_S))
