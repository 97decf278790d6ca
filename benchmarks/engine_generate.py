"""transformers' `generate` on whole batches, each full before it begins. See `engine_load.Driver`."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from engine_load import Load, Reply


def model(folder: Path, settings: Mapping[str, Any]) -> Any:
    """A model by ``settings``: ``threads``, ``dtype``, ``attention``."""
    torch.set_num_threads(settings["threads"])
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, settings["dtype"]),
        attn_implementation=settings["attention"],
        local_files_only=True,
    )
    # No end tokens: the folder's would come back from the model's own configuration.
    loaded.generation_config = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    loaded.generation_config.pad_token_id = 0
    return loaded.eval().requires_grad_(False)


class _Tap(BaseStreamer):
    """Sees each step's logits, then its tokens."""

    def __init__(self) -> None:
        self.tokens: Final[list[Tensor]] = []
        self.logprobs: Final[list[Tensor]] = []
        self.at: Final[list[float]] = []
        self._scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002 - transformers looks for this name
        """Hold a step's logits, ``[batch, vocabulary]``: it is a logits processor, too."""
        self._scores = scores
        return scores

    def put(self, value: Tensor) -> None:
        """Take a step's tokens, ``[batch]``; the first call brings the prompts, before there are logits."""
        if self._scores is None:
            return
        self.logprobs.append(self._scores.gather(1, value[:, None])[:, 0] - self._scores.logsumexp(dim=-1))
        self.tokens.append(value)
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""

    def replies(self) -> list[Reply]:
        """One for each row of the batch."""
        tokens, logprobs = torch.stack(self.tokens, dim=1).tolist(), torch.stack(self.logprobs, dim=1).tolist()
        return [Reply(token_ids=ids, logprobs=told, at=self.at) for ids, told in zip(tokens, logprobs, strict=True)]


@dataclass(kw_only=True, slots=True)
class _Batch:
    prompts: list[list[int]] = field(default_factory=list)
    done: asyncio.Future[list[Reply]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Generate:
    """Gathers the prompts of all readers, which ask at once and have equal lengths, then generates."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._model: Final = model(folder, settings)
        self._batch: _Batch | None = None

    async def begin(self, load: Load) -> None:
        """See `Driver.begin`."""

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        """See `Driver.answer`."""
        batch = self._batch = self._batch or _Batch()
        row = len(batch.prompts)
        batch.prompts.append(prompt)
        if len(batch.prompts) == load.streams:
            self._batch = None
            batch.done.set_result(await asyncio.to_thread(self._generate, batch.prompts, load.new_tokens))
        return (await batch.done)[row]

    async def end(self) -> None:
        """See `Driver.end`."""

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[Reply]:
        tap, ids = _Tap(), torch.tensor(prompts)
        processors: Any = transformers.LogitsProcessorList([tap])
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            streamer=tap,
            logits_processor=processors,
        )
        return tap.replies()


def driver(folder: Path, settings: Mapping[str, Any]) -> Generate:
    """See `engine_load.Driver`."""
    return Generate(folder, settings)
