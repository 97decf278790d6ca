"""The way of one engine from version to version: which swap comes next, and what a failed one teaches."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.errors import CanaryError, SlackwaterError, SwapError
from slackwater.ids import Version
from slackwater.replica.exchange import Exchange
from slackwater.replica.extent import fitting
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.route import Route
from slackwater.replica.status import SwapReport

_log = logging.getLogger(__name__)


class Journey:
    """Takes an exchange towards a target that may move meanwhile. One `step` at a time.

    Args:
        exchange: What swaps.
        route: Knows the lineage.
        limits: Of a swap.
        reports: How many swaps are remembered.
    """

    def __init__(self, exchange: Exchange, route: Route, limits: ExchangeLimits, reports: int) -> None:
        self.refused: Version | None = None
        """The version whose canary was off last."""
        self._exchange = exchange
        self._route = route
        self._limits = limits
        self._swaps: deque[SwapReport] = deque(maxlen=reports)
        self._singly = False

    @property
    def swaps(self) -> tuple[SwapReport, ...]:
        """The most recent ones, oldest first."""
        return tuple(self._swaps)

    def arrived(self) -> None:
        """The target is reached: what was learnt of its swaps is forgotten."""
        self._singly = False

    async def step(self, target: Callable[[], Version]) -> None:
        """One exchange towards the target: an anchor, or all the deltas that fit into one. None if the target moves.

        Raises:
            SlackwaterError: As `Exchange.move_to` and `Route.next` do.
        """
        exchange, goal = self._exchange, target()
        if goal == exchange.swap.previous:
            self._swaps.append(await exchange.roll_back())
            return
        chain = await asyncio.to_thread(self._next, exchange.swap.version, goal, exchange.table.outline)
        if goal != target():
            return
        try:
            report = await exchange.move_to(chain)
        except SlackwaterError as error:
            self._learn(chain, error)
            raise
        if report is not None:
            self._route.trust()
            self._swaps.append(report)
            _log.info("version %d is in place and serves, from %d", report.version, report.from_version)

    def _next(self, held: Version, target: Version, outline: Outline) -> tuple[Manifest, ...]:
        most = 1 if self._singly else self._limits.max_deltas
        return fitting(self._route.next(held, target, most), outline, self._limits.max_bytes)

    def _learn(self, chain: tuple[Manifest, ...], error: SlackwaterError) -> None:
        self._route.detour(chain[0].version, error)
        if isinstance(error, CanaryError):
            self.refused = chain[-1].version
        elif isinstance(error, SwapError):
            # What took the engine too long, or more than it has, may go in smaller steps.
            self._singly = True
