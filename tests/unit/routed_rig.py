"""A replica over the stamp engine, behind a router."""

import asyncio

from stamp_rig import World

from slackwater.errors import ReplicaLostError
from slackwater.rollout.completer import Answer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing
from slackwater.router.pool import ProbeReport


class Routed:
    """A world's replica as a router sees it. ``freeze`` is SIGSTOP: connections stay, and nothing answers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._thawed = asyncio.Event()
        self._thawed.set()

    def freeze(self) -> None:
        self._thawed.clear()
        self.world.engine.hold()

    def thaw(self) -> None:
        self._thawed.set()
        self.world.engine.release()

    async def complete(self, request: CompletionRequest) -> Answer:
        return await self.world.replica.complete(request)

    def window(self) -> int:
        return self.world.replica.window()

    def routing(self) -> Routing | None:
        return self.world.replica.routing()

    async def probe(self) -> ProbeReport:
        await self._thawed.wait()
        status = self.world.replica.status()
        return ProbeReport(status=status.state.value, version=status.version, boot=status.boot_id, window=self.window())

    def sever(self) -> None:
        for run in self.world.engine._runs:
            run.end(None, ReplicaLostError("severed"))

    async def aclose(self) -> None:
        await self.world.close()
