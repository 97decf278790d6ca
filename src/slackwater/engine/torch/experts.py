"""How a pass's tokens are multiplied by their experts' weights.

transformers has ways that are fast, and one whose bits don't depend on who shares a pass: it copies an expert's weights
for each of its tokens, and is some thirty times slower. Here tokens meet their expert in blocks of one shape.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

INVARIANT: Final = "slackwater"
"""What transformers calls the experts of this module."""
FAST: Final = "grouped_mm"
"""What it calls those that multiply all of an expert's tokens at once: their bits depend on how many these are."""
BLOCK: Final = 8
"""Tokens of a product; the last of an expert is filled up with zeros."""


def use_experts(module: nn.Module, *, invariant: bool) -> None:
    """Have a model multiply by its experts in one of the two ways, from now on.

    Args:
        module: A transformers model.
        invariant: Whether a token's bits mustn't depend on what else is in a pass of the same number of tokens.
    """
    model: Any = module
    model.set_experts_implementation(INVARIANT if invariant else FAST)


def _experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' modules of experts call.

    Args:
        experts: The module: ``gate_up_proj`` is ``[experts, 2 * width, hidden]``, ``down_proj`` ``[experts, hidden,
            width]``.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, per_token]``, int64.
        top_k_weights: ``[tokens, per_token]``.

    Returns:
        ``[tokens, hidden]``, in the dtype of ``hidden_states``.
    """
    made = hidden_states.new_empty(*top_k_index.shape, hidden_states.shape[-1])
    for expert in top_k_index.unique().tolist():
        tokens, ranks = torch.where(top_k_index == expert)
        for some, theirs in zip(tokens.split(BLOCK), ranks.split(BLOCK), strict=True):
            block = functional.pad(hidden_states[some], (0, 0, 0, BLOCK - len(some)))
            gated = experts._apply_gate(functional.linear(block, experts.gate_up_proj[expert]))  # noqa: SLF001
            made[some, theirs] = functional.linear(gated, experts.down_proj[expert])[: len(some)]
    return (made * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


ExpertsInterface.register(INVARIANT, _experts)
