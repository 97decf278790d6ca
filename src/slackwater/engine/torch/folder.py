"""What lies in a Hugging Face folder: its config, its end tokens, and its tensors by the names of the files."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError, NotFoundError, UnsupportedError

DTYPES: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""Of tensors that can be served, as safetensors names them."""
DTYPE_OF: Final = {name: dtype for dtype, name in DTYPES.items()}
"""The same, the other way round."""

_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


def read_config(folder: Path, *, supported: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The architecture that ``config.json`` names, one of ``supported``, and all that it says.

    Raises:
        NotFoundError: There is none.
        CorruptError: It is no JSON object.
        UnsupportedError: The architecture isn't supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} holds no config.json", hint="give the path of a Hugging Face folder")
    config = _read_json(path)
    named = config.get("architectures")
    found = ", ".join(str(item) for item in cast("list[Any]", named)) if isinstance(named, list) else "none"
    if found not in supported:
        raise UnsupportedError(
            f"{path}: the architecture {found} is not supported", hint=f"one of {', '.join(supported)}"
        )
    return found, config


def end_tokens(folder: Path) -> tuple[int, ...] | None:
    """End tokens that ``generation_config.json`` names; None where it is silent.

    Raises:
        CorruptError: It is no JSON object, or they are no token ids.
    """
    path = folder / "generation_config.json"
    named: Any = _read_json(path).get("eos_token_id") if path.is_file() else None
    if named is None:
        return None
    ends = listed(named)
    if any(type(token) is not int for token in ends):
        raise CorruptError(f"{path}: eos_token_id {named!r} is no token id", hint="name a number, or a list of them")
    return ends


def listed(named: Any) -> tuple[int, ...]:
    """None, one or a list, as transformers writes it, as a tuple."""
    if named is None:
        return ()
    return tuple(cast("list[int]", named)) if isinstance(named, list) else (named,)


def read_specs(folder: Path) -> dict[str, TensorSpec]:
    """Of all tensors in the folder's safetensors files, by name.

    Raises:
        NotFoundError: There is no such file.
        CorruptError: One can't be read.
    """
    return {name: _spec(name, opened.get_slice(name)) for name, opened in _stored(folder)}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Of a tensor in memory.

    Raises:
        UnsupportedError: Its dtype isn't one of `DTYPES`.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(f"{name}: dtype {tensor.dtype} can't be served", hint="use BF16, F16 or F32")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))


def empty(spec: TensorSpec) -> torch.Tensor:
    """Memory for a tensor.

    Raises:
        UnsupportedError: Its dtype isn't one of `DTYPES`.
    """
    dtype = DTYPE_OF.get(spec.dtype)
    if dtype is None:
        raise UnsupportedError(f"{spec.name}: dtype {spec.dtype} can't be served", hint="use BF16, F16 or F32")
    return torch.empty(spec.shape, dtype=dtype)


def fill(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the files' tensors into those of ``tensors`` that have their name, shape and dtype."""
    for name, opened in _stored(folder):
        if name in tensors:
            tensors[name].copy_(opened.get_tensor(name))


def differing(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor of the files whose bits aren't those that ``tensors`` has under it; None: there is none."""
    shared = ((name, opened.get_tensor(name)) for name, opened in _stored(folder) if name in tensors)
    return next((name for name, stored in shared if not _same_bits(stored, tensors[name])), None)


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each name, and the file that holds the tensor."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFoundError(f"{folder} holds no safetensors file", hint="pickled checkpoints are refused")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                    yield name, opened
        except SafetensorError as error:
            raise CorruptError(f"{file}: {error}", hint="fetch the file again") from error


def _spec(name: str, part: Any) -> TensorSpec:
    shape = tuple(int(extent) for extent in part.get_shape())
    return TensorSpec(name=name, dtype=str(part.get_dtype()), shape=shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON: {error}", hint="fetch the folder again") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{path} holds no JSON object", hint="fetch the folder again")
    return cast("dict[str, Any]", value)
