"""Which modules of a model our kernels run, where this machine can."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slackwater.engine.torch.experts import quicken_experts
from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.linear import Linear
from slackwater.engine.torch.kernels.small import install_gated, install_norm, is_gated, is_norm
from slackwater.engine.torch.kernels.team import Team


def quicken(module: nn.Module, team: Team) -> bool:
    """Have a model's products run by AMX, as far as they fit, and the small operations between them by kernels.

    Where a machine has no AMX, everything is left to torch: its products need its threads, and these would get in the
    way of ours.

    Returns:
        Whether anything was taken over.
    """
    if not tiles.available():
        return False
    linear = Linear(team)
    taken = [_taken(part, linear) for part in module.modules()]
    return any(taken)


def _taken(part: Any, linear: Linear) -> bool:
    if isinstance(part, nn.Linear) and Linear.fits(part.weight):
        linear.install(part)
    elif _are_experts(part):
        quicken_experts(part, linear.multiply)
    elif is_norm(part):
        install_norm(part)
    elif is_gated(part):
        install_gated(part)
    else:
        return False
    return True


def _are_experts(part: Any) -> bool:
    """Whether a module is one of experts as transformers lays them out by default, gates and all."""
    laid_out = all(getattr(part, name, False) for name in ("has_gate", "is_concatenated"))
    plain = laid_out and not part.has_bias and not part.is_transposed
    return plain and Linear.fits(part.gate_up_proj) and Linear.fits(part.down_proj)


@contextmanager
def quickly(team: Team) -> Generator[None]:
    """A pass of a model that was quickened. Torch has this thread alone: its threads would want the team's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with team.awake():
            yield
    finally:
        torch.set_num_threads(threads)
