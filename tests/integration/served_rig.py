"""The embedded engine behind an API, with nothing between."""

from slackwater.engine.torch.engine import TorchEngine
from slackwater.rollout.completer import Answer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing


class Served:
    """An engine as a completer, with nothing between."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def window(self) -> int:
        return self._engine.describe().window

    def routing(self) -> Routing | None:
        return self._engine.describe().routing

    async def complete(self, request: CompletionRequest) -> Answer:
        return await self._engine.generate(request)
