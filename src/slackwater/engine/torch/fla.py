"""Kimi Delta Attention in plain torch: what nemo-automodel calls of flash-linear-attention, whose kernels need a GPU.

The recurrence is that of "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv:2510.26692), which adds
a decay per channel to the gated delta rule (arXiv:2412.06464). With a state S of shape [keys, values] per head::

    S_t = Diag(exp(g_t)) S_{t-1}
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
    o_t = S_t^T q_t / sqrt(keys)

Everything runs in single precision, position by position: a position's bits don't depend on those after it.
"""

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

_NORM_EPS: Final = 1e-6


class ShortConvolution(nn.Module):
    """A causal convolution of each channel for itself, then SiLU.

    Args:
        hidden_size: Channels.
        kernel_size: Positions that one sees, its own the last.
        activation: ``silu`` or none.
        dtype: Of the weight, ``[channels, 1, kernel]``.
    """

    def __init__(
        self, hidden_size: int, kernel_size: int, activation: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.activation: Final = activation
        self.weight = nn.Parameter(torch.zeros(hidden_size, 1, kernel_size, dtype=dtype))

    def forward(self, x: torch.Tensor, **state: Any) -> tuple[torch.Tensor, None]:
        """``[batch, positions, channels]`` to the same, and no state."""
        _refuse(state)
        channels, _, kernel = self.weight.shape
        before = functional.pad(x.float().transpose(1, 2), (kernel - 1, 0))
        mixed = functional.conv1d(before, self.weight.float(), groups=channels)
        mixed = functional.silu(mixed) if self.activation == "silu" else mixed
        return mixed.transpose(1, 2).to(x.dtype), None


class FusedRMSNormGated(nn.Module):
    """Normalises the last dimension, scales it, and multiplies it with a gate.

    Args:
        hidden_size: Of the last dimension.
        eps: Added to the mean square.
        activation: Of the gate: ``sigmoid``, else SiLU.
        dtype: Of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, activation: str = "swish", dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps: Final = eps
        self.activation: Final = activation
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """``x`` and the gate ``g``, both ``[..., hidden_size]``, to one of ``x``'s dtype."""
        values, gate = x.float(), g.float()
        normal = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (normal * (gate.sigmoid() if self.activation == "sigmoid" else functional.silu(gate))).to(x.dtype)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    safe_gate: bool = False,
    transpose_state_layout: bool = False,
    **state: Any,
) -> tuple[torch.Tensor, None]:
    """The recurrence above, from an empty state.

    Args:
        q: Queries, ``[batch, positions, heads, keys]``.
        k: Keys, likewise.
        v: Values, ``[batch, positions, heads, values]``.
        g: Logarithm of the decay, like the keys.
        beta: Strength of the correction, ``[batch, positions, heads]``.
        use_qk_l2norm_in_kernel: Bring queries and keys to length one first.
        safe_gate: Whether the decay is bounded, which a kernel may use; nothing here.
        transpose_state_layout: How a kernel lays out its state; nothing here.
        state: Of other calls and of several documents; there must be none.

    Returns:
        ``[batch, positions, heads, values]`` in the dtype of ``v``, and no state.
    """
    del safe_gate, transpose_state_layout
    _refuse(state)
    queries, keys = (_normal(x.float()) if use_qk_l2norm_in_kernel else x.float() for x in (q, k))
    queries, values, strengths = queries * q.shape[-1] ** -0.5, v.float(), beta.float().unsqueeze(-1)
    decays = g.float().exp().unsqueeze(-1)
    held = values.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    answers = torch.empty_like(values)
    for at in range(q.shape[1]):
        held = held * decays[:, at]
        key = keys[:, at].unsqueeze(-1)
        wrong = values[:, at] - (held * key).sum(-2)
        held = held + key * (strengths[:, at] * wrong).unsqueeze(-2)
        answers[:, at] = (held * queries[:, at].unsqueeze(-1)).sum(-2)
    return answers.to(v.dtype), None


def gate(g: torch.Tensor, a_log: torch.Tensor, *, dt_bias: torch.Tensor) -> torch.Tensor:
    """Logarithm of the decay, ``-exp(a_log) softplus(g + dt_bias)``.

    Args:
        g: ``[batch, positions, heads, keys]``.
        a_log: ``[heads]``.
        dt_bias: ``[heads * keys]``.

    Returns:
        Like ``g``, in single precision.
    """
    return -a_log.float().exp().unsqueeze(-1) * functional.softplus(g.float() + dt_bias.float().view(g.shape[-2:]))


def in_use() -> str:
    """Whose delta rule models run."""
    return "own delta rule" if _is_absent() else f"flash-linear-attention {metadata.version('flash-linear-attention')}"


@contextmanager
def standing_in() -> Generator[None]:
    """While it lasts, importing from ``fla`` gives what is above; nothing changes where the library is installed.

    transformers asks for the library by its distribution, and so never takes this for it.
    """
    if not _is_absent():
        yield
        return
    made = {
        "fla": _module("fla"),
        "fla.modules": _module("fla.modules", ShortConvolution=ShortConvolution, FusedRMSNormGated=FusedRMSNormGated),
        "fla.ops": _module("fla.ops"),
        "fla.ops.kda": _module("fla.ops.kda", chunk_kda=delta_rule, fused_recurrent_kda=delta_rule),
        "fla.ops.kda.gate": _module("fla.ops.kda.gate", fused_kda_gate=gate),
    }
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _is_absent() -> bool:
    return importlib.util.find_spec("fla") is None


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # a package, in which nothing is found but what stands beside it
    vars(module).update(members)
    return module


def _normal(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _refuse(state: dict[str, Any]) -> None:
    given = sorted(name for name, value in state.items() if value is not None and value is not False)
    if given:
        raise NotImplementedError(f"the stand-in for flash-linear-attention has no {', '.join(given)}")
