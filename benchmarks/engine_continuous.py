"""transformers' continuous batching. See `engine_load.Driver`."""

import asyncio
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache

from engine_generate import model
from engine_load import Load, Reply
from slackwater.errors import InternalError

_BLOCK_TOKENS: Final = 32
_SPARE_BLOCKS: Final = 64
_BATCH_TOKENS: Final = 512


class Continuous:
    """A manager for each load, as `generate_batch` makes one for its prompts; prefixes are shared by blocks."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._model: Final = model(folder, settings)
        self._manager: Any = None
        self._sized: tuple[int, int] = (0, 0)
        self._numbers: Final = count()

    async def begin(self, load: Load) -> None:
        """See `Driver.begin`."""
        wanted = (load.streams, load.window)
        if self._manager is not None and self._sized == wanted:
            return
        await self.end()
        self._manager = self._model.init_continuous_batching(
            generation_config=self._model.generation_config,
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True,
                page_size=_BLOCK_TOKENS,
                num_blocks=load.streams * -(-load.window // _BLOCK_TOKENS) + _SPARE_BLOCKS,
                max_batch_tokens=_BATCH_TOKENS,
                max_requests_per_batch=load.streams,
            ),
        )
        self._manager.warmup()
        self._manager.start()
        self._sized = wanted

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        """See `Driver.answer`. Tokens count as read when they were made: nothing is lost on streaming them."""
        name = f"r{next(self._numbers)}"
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._manager.register_result_handler(name, lambda told: done.set_result(told) if told.is_finished() else None)
        self._manager.add_request(prompt, request_id=name, max_new_tokens=load.new_tokens, record_timestamps=True)
        told = await done
        if told.error is not None:
            raise InternalError(f"continuous batching failed: {told.error}", hint="read its log")
        return Reply(token_ids=told.generated_tokens, logprobs=told.logprobs, at=told.timestamps)

    async def end(self) -> None:
        """See `Driver.end`."""
        manager, self._manager = self._manager, None
        if manager is not None:
            await asyncio.to_thread(manager.stop, block=True)
            manager.destroy()


def memory() -> tuple[torch.device, int, int, int]:
    """Device, all memory, what this process holds, twice: transformers would ask psutil, which isn't installed."""
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * page
    return torch.device("cpu"), os.sysconf("SC_PHYS_PAGES") * page, resident, resident


def driver(folder: Path, settings: Mapping[str, Any]) -> Continuous:
    """See `engine_load.Driver`."""
    module: Any = cache
    module.get_device_and_memory_breakdown = memory
    return Continuous(folder, settings)
