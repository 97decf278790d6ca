"""Loading a Hugging Face folder into a model that generates: no network, no code from the checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.placement import place
from slackwater.engine.torch.architectures import MEMORY, Memory
from slackwater.engine.torch.arena import gather
from slackwater.engine.torch.attention import ATTENTION, LANES
from slackwater.errors import CorruptError, NotFoundError, UnsupportedError
from slackwater.rollout.routes import Routing

SUPPORTED: Final = tuple(MEMORY)
"""Architectures that are served."""

_LEAST_WINDOW: Final = 2
_MISFITS: Final = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers and torch raise for a config of wrong types or sizes: few of its fields are checked."""
_DTYPES: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in memory, and what the engine needs to know of it."""

    module: nn.Module
    """The causal language model: in evaluation mode, no gradients."""
    architecture: str
    parameters: Mapping[str, torch.Tensor]
    """By canonical name, tied ones once; contiguous, the very memory that the forward pass reads."""
    specs: Mapping[str, TensorSpec]
    """Of ``parameters``."""
    dtype: torch.dtype
    vocab_size: int
    window: int
    """Most positions: the config's, cut to its sliding window if it has one."""
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
        libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
        kernels = f"cpu {torch.backends.cpu.get_cpu_capability()}, own attention, {_DTYPES[self.dtype]}"
        return f"{libraries}; {kernels}; {shapes}"


def load(folder: Path) -> LoadedModel:
    """Load the model in ``folder`` in the dtype that its config names.

    Raises:
        NotFoundError: The folder holds no ``config.json`` or no safetensors file.
        CorruptError: A file can't be parsed.
        UnsupportedError: The architecture isn't one of `SUPPORTED`, the config makes no model of it, or the
            tensors don't fit it.
    """
    architecture = _architecture(folder)
    ends = _generation_ends(folder)
    stored = _stored_specs(folder)
    module = _from_pretrained(folder)
    config: Any = module.config
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    specs = {name: _spec(name, tensor) for name, tensor in parameters.items()}
    place(stored, specs, ties=_ties(module))
    return LoadedModel(
        module=module,
        architecture=architecture,
        parameters=parameters,
        specs=specs,
        dtype=cast("torch.dtype", config.dtype),
        vocab_size=int(config.vocab_size),
        window=_window(folder, config),
        layers=int(config.num_hidden_layers),
        kv_heads=int(config.num_key_value_heads),
        head_dim=_head_dim(config),
        eos_token_ids=_listed(config.eos_token_id) if ends is None else ends,
        memory=MEMORY[architecture],
    )


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} holds no config.json", hint="give the path of a Hugging Face folder")
    named = _read_json(path).get("architectures")
    found = ", ".join(str(item) for item in cast("list[Any]", named)) if isinstance(named, list) else "none"
    if found not in SUPPORTED:
        raise UnsupportedError(
            f"{path}: the architecture {found} is not supported", hint=f"one of {', '.join(SUPPORTED)}"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON: {error}", hint="fetch the folder again") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{path} holds no JSON object", hint="fetch the folder again")
    return cast("dict[str, Any]", value)


def _stored_specs(folder: Path) -> dict[str, TensorSpec]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFoundError(f"{folder} holds no safetensors file", hint="pickled checkpoints are refused")
    specs: dict[str, TensorSpec] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                    part = opened.get_slice(name)
                    shape = tuple(int(extent) for extent in part.get_shape())
                    specs[name] = TensorSpec(name=name, dtype=str(part.get_dtype()), shape=shape)
        except SafetensorError as error:
            raise CorruptError(f"{file}: {error}", hint="fetch the file again") from error
    return specs


def _from_pretrained(folder: Path) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except _MISFITS as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UnsupportedError(
            f"transformers makes no model of {folder / 'config.json'}: {cause}",
            hint="check its fields' types, and its sizes against the tensors' shapes",
        ) from error
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad = False
    # Weights are patched in place: they must lie in plain memory of ours, not in a mapping of the file.
    gather(list(module.parameters()))
    return module


def _ties(module: nn.Module) -> dict[str, str]:
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: canonical[id(parameter)] for name, parameter in every if canonical[id(parameter)] != name}


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(f"{name}: dtype {tensor.dtype} can't be served", hint="use BF16, F16 or F32")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))


def _head_dim(config: Any) -> int:
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if size % LANES:
        raise UnsupportedError(f"heads of {size} dimensions can't be served", hint=f"a multiple of {LANES} can")
    return size


def _window(folder: Path, config: Any) -> int:
    longest = int(config.max_position_embeddings)
    window = min(longest, int(getattr(config, "sliding_window", None) or longest))
    if window < _LEAST_WINDOW:
        raise UnsupportedError(
            f"{folder / 'config.json'}: max_position_embeddings or sliding_window leaves a window of {window}",
            hint=f"it takes {_LEAST_WINDOW} positions for a prompt and an answer",
        )
    return window


def _generation_ends(folder: Path) -> tuple[int, ...] | None:
    """End tokens that ``generation_config.json`` names; None where it is silent."""
    path = folder / "generation_config.json"
    named: Any = _read_json(path).get("eos_token_id") if path.is_file() else None
    if named is None:
        return None
    ends = _listed(named)
    if any(type(token) is not int for token in ends):
        raise CorruptError(f"{path}: eos_token_id {named!r} is no token id", hint="name a number, or a list of them")
    return ends


def _listed(named: Any) -> tuple[int, ...]:
    """None, one or a list, as transformers writes it, as a tuple."""
    if named is None:
        return ()
    return tuple(cast("list[int]", named)) if isinstance(named, list) else (named,)
