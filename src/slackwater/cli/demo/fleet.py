"""What the demo sees of its replicas, through the routes that every operator has."""

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from slackwater.cli.demo.claims import SwapRecord
from slackwater.cli.demo.view import ReplicaView
from slackwater.errors import CorruptError

_TIMEOUT = ClientTimeout(total=5.0)
_HASH_TIMEOUT = ClientTimeout(total=60.0)


class _Swap(msgspec.Struct):
    version: int
    prepare_s: float
    pause_s: float


class _Status(msgspec.Struct):
    state: str
    in_flight: int
    version: int | None = None
    target: int | None = None
    swaps: list[_Swap] = []


class _Weights(msgspec.Struct):
    version: int
    state_digest: str


class FleetWatch:
    """Asks replicas for their status and remembers every swap. One event loop.

    Args:
        urls: Base URL by replica name.
        key: The control key.
    """

    def __init__(self, urls: dict[str, str], key: str) -> None:
        self._urls = urls
        self._session = ClientSession(headers={"Authorization": f"Bearer {key}"})
        self._swaps: dict[tuple[str, int], SwapRecord] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    @property
    def swaps(self) -> tuple[SwapRecord, ...]:
        """Every swap seen so far, by replica and version."""
        return tuple(self._swaps[key] for key in sorted(self._swaps))

    async def look(self, name: str) -> ReplicaView:
        """One replica's status now; a replica that does not answer is ``away``."""
        try:
            async with self._session.get(f"{self._urls[name]}/control/v1/status", timeout=_TIMEOUT) as answer:
                status = msgspec.json.decode(await answer.read(), type=_Status)
        except (ClientError, TimeoutError, msgspec.DecodeError):
            return ReplicaView(name=name, state="away", version=None, target=None, in_flight=0, swaps=self._of(name))
        for swap in status.swaps:
            self._swaps[name, swap.version] = SwapRecord(
                replica=name, version=swap.version, prepare_s=swap.prepare_s, pause_s=swap.pause_s
            )
        return ReplicaView(
            name=name,
            state=status.state,
            version=status.version,
            target=status.target,
            in_flight=status.in_flight,
            swaps=self._of(name),
        )

    async def weights(self, name: str) -> tuple[int, str]:
        """Version and state digest, recomputed from the replica's memory.

        Raises:
            CorruptError: The replica does not give them.
        """
        try:
            async with self._session.get(f"{self._urls[name]}/control/v1/weights", timeout=_HASH_TIMEOUT) as answer:
                weights = msgspec.json.decode(await answer.read(), type=_Weights)
        except (ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise CorruptError(f"{name} did not give its weights' digest: {error}", hint="read its log") from error
        return weights.version, weights.state_digest

    def _of(self, name: str) -> tuple[SwapRecord, ...]:
        return tuple(swap for swap in self.swaps if swap.replica == name)
