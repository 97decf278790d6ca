"""A trainer's state dict as a source."""

from collections.abc import Mapping
from typing import Final

import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32",
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64",
}  # fmt: skip

_OUTPUT_HEAD: Final = "lm_head.weight"
_EMBEDDING_SUFFIX: Final = "embed_tokens.weight"


class StateDictSource:
    """A state dict in the serving dtype: what the replicas load, bit for bit.

    A tied output head is left out where it is the very memory of the embedding, as Hugging Face does when it
    saves. Tensors on a device or with strides are copied when they are read.

    Args:
        tensors: By canonical Hugging Face name.

    Raises:
        InvalidInputError: A tensor's dtype has no safetensors name, or these are no tensors by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] : a caller's slip
            raise InvalidInputError(
                f"{type(tensors).__name__} is no state dict", hint="give its tensors by name: model.state_dict()"
            )
        specs = {name: _spec(name, tensors[name]) for name in sorted(tensors)}
        self._tensors: Final = {name: tensors[name] for name in specs if not _is_tied(name, tensors)}
        self._specs: Final = {name: specs[name] for name in self._tensors}

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self._specs

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`."""
        if name not in self._tensors:
            raise NotFoundError(f"the state dict holds no {name}")
        flat = self._tensors[name].detach().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().view(self._specs[name].bits_dtype)

    def shows(self, name: str) -> bool:
        """See `slackwater.weights.source.Shows.shows`: tensors in plain host memory."""
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] : a caller's slip
        raise InvalidInputError(f"{name} is {type(tensor).__name__}, no tensor", hint="leave it out")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise InvalidInputError(f"{name} is a tensor without plain values", hint="materialise it as a dense tensor")
    if tensor.dtype not in _DTYPES:
        raise InvalidInputError(f"{name}: {tensor.dtype} can't be published", hint="cast it to the serving dtype")
    return TensorSpec(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))


def _is_tied(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    if name != _OUTPUT_HEAD:
        return False
    head = _memory(tensors[name])
    return any(other.endswith(_EMBEDDING_SUFFIX) and _memory(tensors[other]) == head for other in tensors)


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
