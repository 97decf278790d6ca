"""vLLM's asynchronous engine, in vLLM's own interpreter. See `engine_load.Driver`."""

import importlib
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from engine_load import Load, Reply

_MOST_STREAMS: Final = 64


class Vllm:
    """One engine for all loads. ``settings``: ``dtype``, ``eager``, ``window``."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder: Final = folder
        self._settings: Final = settings
        self._engine: Any = None
        self._vllm: Any = importlib.import_module("vllm")
        self._numbers: Final = count()

    async def begin(self, load: Load) -> None:  # noqa: ARG002 - one engine carries all
        """See `Driver.begin`."""
        if self._engine is not None:
            return
        arguments: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(
            model=str(self._folder),
            dtype=self._settings["dtype"],
            enforce_eager=self._settings["eager"],
            max_model_len=self._settings["window"],
            max_num_seqs=_MOST_STREAMS,
        )
        self._engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        """See `Driver.answer`."""
        reply = Reply(token_ids=[], logprobs=[], at=[])
        sampling = self._sampling(load)
        asked = {"prompt_token_ids": prompt}
        async for told in self._engine.generate(asked, sampling, request_id=f"r{next(self._numbers)}"):
            made = told.outputs[0]
            reply.token_ids.extend(made.token_ids)
            chosen = zip(made.token_ids, made.logprobs, strict=True)
            reply.logprobs.extend(float(found[token].logprob) for token, found in chosen)
            reply.at.extend([time.perf_counter()] * len(made.token_ids))
        return reply

    async def end(self) -> None:
        """See `Driver.end`."""
        if self._engine is not None:
            self._engine.shutdown()

    def _sampling(self, load: Load) -> Any:
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        return self._vllm.SamplingParams(
            temperature=1.0,
            max_tokens=load.new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=kinds.DELTA,
        )


def driver(folder: Path, settings: Mapping[str, Any]) -> Vllm:
    """See `engine_load.Driver`."""
    return Vllm(folder, settings)
