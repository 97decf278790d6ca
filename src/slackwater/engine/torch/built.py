"""What each kind of modelling code gives the engine: a module, and its tensors by the names of the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slackwater.rollout.routes import Routing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Built:
    """A module with its weights: in evaluation mode, no gradients."""

    module: nn.Module
    code: str
    """Whose it is: libraries and their versions."""
    tensors: Mapping[str, torch.Tensor]
    """By the checkpoint's names, tied ones once; contiguous views of the very memory that the forward pass reads."""
    text: Any
    """Config of the language model: sizes, window, end tokens."""
    routers: Mapping[int, nn.Module]
    """By number of layer, rising; see `slackwater.engine.torch.model.LoadedModel.routers`."""
    routing: Routing | None
    """What they choose from; None: there are none."""
