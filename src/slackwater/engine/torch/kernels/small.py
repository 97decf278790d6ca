"""The small operations between products, each in one call: they cost less than the asking otherwise.

They round where transformers' modules do, so that only the order of sums differs.
"""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from slackwater.checkpoint.jit import array_at, float_of, summing_kernel
from slackwater.engine.torch.kernels.attention import exp
from slackwater.engine.torch.kernels.bf16 import rounded

_FAMILIES: Final = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
"""Of transformers; each has classes of its own of the same formulas."""
_NORMS: Final = frozenset(f"{family}RMSNorm" for family in _FAMILIES)
_GATED: Final = frozenset(f"{family}MLP" for family in _FAMILIES)


@summing_kernel
def _normalise(x: int, weight: int, tokens: int, size: int, epsilon: Any, out: int) -> None:
    scale = array_at(weight, size, np.uint16)
    for token in range(tokens):
        row = array_at(x + token * size * 2, size, np.uint16)
        to = array_at(out + token * size * 2, size, np.uint16)
        total = np.float32(0.0)
        for at in range(size):
            total += float_of(row[at]) * float_of(row[at])
        by = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for at in range(size):
            to[at] = rounded(float_of(rounded(float_of(row[at]) * by)) * float_of(scale[at]))


@summing_kernel
def _gate(gate: int, up: int, count: int, out: int) -> None:
    gates, ups, to = array_at(gate, count, np.uint16), array_at(up, count, np.uint16), array_at(out, count, np.uint16)
    for at in range(count):
        x = float_of(gates[at])
        small = exp(-abs(x))
        share = (np.float32(1.0) if x >= np.float32(0.0) else small) / (np.float32(1.0) + small)
        to[at] = rounded(float_of(rounded(x * share)) * float_of(ups[at]))


def install_norm(module: Any) -> None:
    """Have a module of bf16 that is ``weight * x / sqrt(mean(x * x) + variance_epsilon)`` run so (Zhang and Sennrich,
    2019: root mean square layer normalisation).
    """
    weight, size, epsilon = module.weight.data_ptr(), module.weight.numel(), float(module.variance_epsilon)

    def forward(x: Tensor) -> Tensor:
        held = x.contiguous()
        out = torch.empty_like(held)
        _normalise(held.data_ptr(), weight, held.numel() // size, size, epsilon, out.data_ptr())
        return out

    module.forward = forward


def install_gated(module: Any) -> None:
    """Have a feed-forward module of bf16 that is ``down(silu(gate(x)) * up(x))`` run so (Shazeer, 2020: SwiGLU)."""
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj

    def forward(x: Tensor) -> Tensor:
        gates, ups = gate(x), up(x)
        out = torch.empty_like(gates)
        _gate(gates.data_ptr(), ups.data_ptr(), gates.numel(), out.data_ptr())
        return down(out)

    module.forward = forward


def is_norm(module: nn.Module) -> bool:
    """Whether `install_norm` takes it."""
    weight: Any = getattr(module, "weight", None)
    return type(module).__name__ in _NORMS and weight.dtype == torch.bfloat16


def is_gated(module: nn.Module) -> bool:
    """Whether `install_gated` takes it."""
    gate: Any = getattr(module, "gate_proj", None)
    silu = isinstance(getattr(module, "act_fn", None), SiLUActivation)
    return type(module).__name__ in _GATED and silu and gate.weight.dtype == torch.bfloat16
