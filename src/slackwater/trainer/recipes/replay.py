"""Router replay: a forward pass in training sends each token to the experts that it went to in the fleet.

The routers' own scores, and their gradients, still weigh these experts; only the choice is given.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from slackwater.errors import InvalidInputError, UnsupportedError

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [tokens, experts], weights and int64 ids, both [tokens, experts per token]."""


@contextmanager
def replaying(model: nn.Module, told: torch.Tensor | None) -> Generator[None]:
    """Have the routers of a Qwen3-MoE take the experts that they are told, in this block.

    Args:
        model: Any; its routers only matter where something is told.
        told: int64 [tokens, layers with routers, experts per token], for the tokens of each pass, rows before columns;
            -1 where the router chooses by itself. None: everywhere.

    Raises:
        UnsupportedError: Something is told, and the model has no routers, or others.
        InvalidInputError: It is told to more or fewer layers than there are.
    """
    hooks = [] if told is None else [
        router.register_forward_hook(partial(_forced, told[:, at])) for at, router in enumerate(_routers(model, told))
    ]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _routers(model: nn.Module, told: torch.Tensor) -> Sequence[Qwen3MoeTopKRouter]:
    found = [part for part in model.modules() if isinstance(part, Qwen3MoeTopKRouter)]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no routers that can be told experts", hint="ask for no routes"
        )
    if told.shape[1] != len(found):
        raise InvalidInputError(
            f"the routes are of {told.shape[1]} layers, {len(found)} have routers", hint="train the served model"
        )
    return found


def _forced(told: torch.Tensor, router: Qwen3MoeTopKRouter, _args: object, output: RouterOutput) -> RouterOutput:
    logits, _, chosen = output
    ids = torch.where(told < 0, chosen, told)
    scores = torch.softmax(logits, -1, dtype=torch.float32).gather(1, ids)
    if router.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores.to(logits.dtype), ids
