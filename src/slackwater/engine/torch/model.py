"""Loading a Hugging Face folder into a model that generates: no network, no code from the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.torch import nemo, pretrained
from slackwater.engine.torch.architectures import MEMORY, Memory
from slackwater.engine.torch.attention import ATTENTION, LANES
from slackwater.engine.torch.built import Built
from slackwater.engine.torch.folder import DTYPES, end_tokens, listed, read_config, read_specs, spec_of
from slackwater.engine.torch.kernels import tiles
from slackwater.errors import UnsupportedError
from slackwater.rollout.routes import Routing

SUPPORTED: Final = tuple(MEMORY)
"""Architectures that are served."""

_LEAST_WINDOW: Final = 2

Builder = Callable[[Path, str, Mapping[str, TensorSpec]], Built]
"""Of a folder, its architecture and what its files hold."""

_BUILDERS: Final[Mapping[Memory, Builder]] = {
    Memory.ROWS: partial(pretrained.build, attention=ATTENTION),
    Memory.STATES: partial(pretrained.build, attention="sdpa"),
    Memory.NOTHING: nemo.build,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in memory, and what the engine needs to know of it."""

    module: nn.Module
    """The causal language model: in evaluation mode, no gradients."""
    architecture: str
    code: str
    """Whose modelling code it is: libraries and their versions."""
    parameters: Mapping[str, torch.Tensor]
    """By canonical name, tied ones once; contiguous, the very memory that the forward pass reads."""
    specs: Mapping[str, TensorSpec]
    """Of ``parameters``."""
    dtype: torch.dtype
    vocab_size: int
    window: int
    """Most positions: the config's, cut to its sliding window if our attention runs it."""
    layers: int
    kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    memory: Memory
    """What its layers keep between passes."""
    routing: Routing | None = None
    """What its routers choose from; None: it has none."""
    routers: Mapping[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    """By number of layer, rising: modules that return, among other things, ``[tokens, per_token]`` int64 expert ids."""

    def numerics(self, shapes: str) -> str:
        """Fingerprint of the arithmetic; ``shapes`` says in which shapes the caller runs it."""
        libraries = f"torch {torch.__version__}, {self.code}"
        attention = "own" if self.memory is Memory.ROWS else "its"
        quick = attention == "own" and self.dtype == torch.bfloat16 and tiles.available()
        cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}{', own kernels for AMX' if quick else ''}"
        return f"{libraries}; {cpu}, {attention} attention, {DTYPES[self.dtype]}; {shapes}"


def load(folder: Path) -> LoadedModel:
    """Load the model in ``folder`` in the dtype that its config names.

    Raises:
        NotFoundError: The folder holds no ``config.json`` or no safetensors file.
        CorruptError: A file can't be parsed.
        UnsupportedError: The architecture isn't one of `SUPPORTED`, the config makes no model of it, or the
            tensors don't fit it.
    """
    architecture, _ = read_config(folder, supported=SUPPORTED)
    ends = end_tokens(folder)
    memory = MEMORY[architecture]
    built = _BUILDERS[memory](folder, architecture, read_specs(folder))
    text = built.text
    return LoadedModel(
        module=built.module,
        architecture=architecture,
        code=built.code,
        parameters=built.tensors,
        specs={name: spec_of(name, tensor) for name, tensor in built.tensors.items()},
        dtype=cast("torch.dtype", text.dtype),
        vocab_size=int(text.vocab_size),
        window=_window(folder, text, memory),
        layers=int(text.num_hidden_layers),
        kv_heads=int(text.num_key_value_heads),
        head_dim=_head_dim(text, memory),
        eos_token_ids=listed(text.eos_token_id) if ends is None else ends,
        memory=memory,
        routing=built.routing,
        routers=built.routers,
    )


def _head_dim(config: Any, memory: Memory) -> int:
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if memory is Memory.ROWS and size % LANES:
        raise UnsupportedError(f"heads of {size} dimensions can't be served", hint=f"a multiple of {LANES} can")
    return size


def _window(folder: Path, config: Any, memory: Memory) -> int:
    longest = int(config.max_position_embeddings)
    # Our attention sees all that came before; other code slides windows of its own.
    sliding = getattr(config, "sliding_window", None) if memory is Memory.ROWS else None
    window = min(longest, int(sliding or longest))
    if window < _LEAST_WINDOW:
        raise UnsupportedError(
            f"{folder / 'config.json'}: max_position_embeddings or sliding_window leaves a window of {window}",
            hint=f"it takes {_LEAST_WINDOW} positions for a prompt and an answer",
        )
    return window
