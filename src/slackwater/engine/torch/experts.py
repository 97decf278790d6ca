"""How a pass's tokens are multiplied by their experts' weights.

transformers has ways that are fast, and one whose bits don't depend on who shares a pass: it copies an expert's weights
for each of its tokens, and is some thirty times slower. Here tokens meet their expert in blocks of one shape.
"""

from collections.abc import Callable
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


Multiply = Callable[[Tensor, Tensor], Tensor]
"""``[tokens, in]`` by a weight ``[out, in]``."""


def mix(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor, *, multiply: Multiply) -> Tensor:
    """What transformers' modules of experts compute, each expert's tokens by ``multiply``.

    Args:
        experts: The module: ``gate_up_proj`` is ``[experts, 2 * width, hidden]``, ``down_proj`` ``[experts, hidden,
            width]``.
        states: ``[tokens, hidden]``.
        chosen: ``[tokens, per_token]``, int64.
        shares: ``[tokens, per_token]``.
        multiply: How.

    Returns:
        ``[tokens, hidden]``, in the dtype of ``states``.
    """
    made = states.new_empty(*chosen.shape, states.shape[-1])
    for expert in chosen.unique().tolist():
        tokens, ranks = torch.where(chosen == expert)
        gated = experts._apply_gate(multiply(states[tokens], experts.gate_up_proj[expert]))  # noqa: SLF001
        made[tokens, ranks] = multiply(gated, experts.down_proj[expert])
    return (made * shares[..., None]).sum(1).to(states.dtype)


def quicken_experts(experts: Any, multiply: Multiply) -> None:
    """Have a module of experts multiply so from now on, whatever `use_experts` says."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mix(experts, hidden_states, top_k_index, top_k_weights, multiply=multiply)

    experts.forward = forward


def _in_blocks(tokens: Tensor, weight: Tensor) -> Tensor:
    padded = functional.pad(tokens, (0, 0, 0, -len(tokens) % BLOCK))
    return torch.cat([functional.linear(block, weight) for block in padded.split(BLOCK)])[: len(tokens)]


def _experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' modules of experts call; see `mix`."""
    return mix(experts, hidden_states, top_k_index, top_k_weights, multiply=_in_blocks)


ExpertsInterface.register(INVARIANT, _experts)
