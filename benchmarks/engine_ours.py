"""Our engine under a load. See `engine_load.Driver`."""

import time
from collections.abc import Mapping
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, Final

from engine_load import Load, Reply
from slackwater.engine.torch.engine import TorchEngine
from slackwater.errors import InternalError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.request import CompletionRequest, SamplingSpec


class Ours:
    """`TorchEngine` with as many slots as the load has streams, or asks for.

    Args:
        folder: The model, in the dtype that it is served in.
        settings: ``threads``, ``batch_invariant``.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder: Final = folder
        self._settings: Final = {name: settings[name] for name in ("threads", "batch_invariant")}
        self._engine: TorchEngine | None = None
        self._opened = (0, 0)
        self._numbers: Final = count()

    async def begin(self, load: Load) -> None:
        """See `Driver.begin`."""
        wanted = (load.slots or load.streams, load.window)
        if self._engine is not None and self._opened == wanted:
            return
        await self.end()
        origin: dict[str, Any] = {"run": RunId("bench"), "replica": ReplicaId("r0"), "boot": BootId("b0")}
        sizes: dict[str, Any] = {"slots": wanted[0], "window": load.window, **self._settings}
        self._engine = await TorchEngine.open(self._folder, version=Version(0), **origin, **sizes)
        self._opened = wanted

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        """See `Driver.answer`."""
        if self._engine is None:
            raise InternalError("no load has begun", hint="call begin first")
        reply = Reply(token_ids=[], logprobs=[], at=[])
        answer = await self._engine.generate(self._request(prompt, load))
        async with aclosing(answer):
            async for step in answer:
                reply.token_ids.append(step.token_id)
                reply.logprobs.append(step.logprob)
                reply.at.append(time.perf_counter())
        return reply

    async def end(self) -> None:
        """See `Driver.end`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def _request(self, prompt: list[int], load: Load) -> CompletionRequest:
        number = next(self._numbers)
        sampling = SamplingSpec(
            max_tokens=load.new_tokens,
            temperature=0.0 if load.greedy else 1.0,
            seed=number,
            ignore_eos=True,
            raw_logprobs=load.all_evidence,
            top_logprobs=int(load.all_evidence),
        )
        return CompletionRequest(request_id=RequestId(f"r{number}"), prompt_ids=tuple(prompt), sampling=sampling)


def driver(folder: Path, settings: Mapping[str, Any]) -> Ours:
    """See `engine_load.Driver`."""
    return Ours(folder, settings)
