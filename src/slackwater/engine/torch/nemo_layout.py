"""A checkpoint's tensors as views of the memory that nemo-automodel's forward pass reads.

nemo-automodel lays experts out the other way round than a checkpoint does. It reads them just as well through a
transposed view, so here they lie in memory as in the file. What is left to do is to rename, which its own adapter does.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.torch.arena import gather
from slackwater.engine.torch.folder import DTYPE_OF
from slackwater.errors import UnsupportedError

_EXPERTS: Final = (".gate_and_up_projs", ".down_projs")
_PADDED: Final = ".A_log"
"""A tensor of one number a head, which K3's checkpoints fill up with zeros."""
_PADDING: Final = 128
_NARROW: Final = ("BF16", "F16")


def lay_out(module: nn.Module) -> None:
    """Move everything into one area, each tensor as a checkpoint has it, and let the module see it as it wants to."""
    live = list(_live(module))
    stored = [_as_stored(name, tensor.detach()) for name, tensor in live]
    gather(stored)
    for (name, tensor), held in zip(live, stored, strict=True):
        tensor.data = _as_run(name, held, tensor.shape)


def canonical(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a module that was laid out, by the names of a release: contiguous views of the very memory.

    Raises:
        UnsupportedError: nemo-automodel's adapter gave a copy: what is written there would not be served.
    """
    adapter: Any = module.state_dict_adapter
    live = {name: _padded(name, tensor) for name, tensor in _live(module)}
    named: dict[str, torch.Tensor] = adapter.to_hf(live, for_checkpoint_load=True)
    areas = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    for name, tensor in named.items():
        if tensor.untyped_storage().data_ptr() not in areas or not tensor.is_contiguous():
            raise UnsupportedError(
                f"this nemo-automodel gives no view of {name}", hint="install the version that the documents name"
            )
    return named


def narrowed(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, TensorSpec]
) -> dict[str, torch.Tensor]:
    """Take over the dtypes of a checkpoint where the code wants single precision and the file has less.

    Such a tensor is held as in the file, and widened, without loss, before each of the module's passes.

    Args:
        module: What runs.
        tensors: Its tensors, by canonical name.
        stored: What the checkpoint holds.

    Returns:
        Tensors by canonical name: ``tensors``, but for those that were narrowed.
    """
    fewer = {
        name: tensors[name].to(DTYPE_OF[spec.dtype])
        for name, spec in stored.items()
        if name in tensors and tensors[name].dtype == torch.float32 and spec.dtype in _NARROW
    }
    gather(list(fewer.values()))

    def widen(*_: Any) -> None:
        for name, narrow in fewer.items():
            tensors[name].copy_(narrow)

    if fewer:
        module.register_forward_pre_hook(widen)
    return {**tensors, **fewer}


def _live(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a checkpoint holds, themselves: setting ``data`` of one moves it."""
    held = module.state_dict().keys()
    every: Iterable[tuple[str, torch.Tensor]] = (*module.named_parameters(), *module.named_buffers())
    return ((name, tensor) for name, tensor in every if name in held)


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith(_EXPERTS):
        return tensor.transpose(1, 2)
    return functional.pad(tensor, (0, _padding(tensor))) if name.endswith(_PADDED) else tensor


def _as_run(name: str, stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if name.endswith(_EXPERTS):
        return stored.transpose(1, 2)
    return stored[: shape.numel()] if name.endswith(_PADDED) else stored


def _padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """With the padding that `lay_out` left room for."""
    return tensor.as_strided((tensor.numel() + _padding(tensor),), (1,)) if name.endswith(_PADDED) else tensor


def _padding(tensor: torch.Tensor) -> int:
    return -tensor.numel() % _PADDING
