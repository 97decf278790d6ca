"""What each kind of modelling code gives the engine: a module, and its tensors by the names of the checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from slackwater.rollout.routes import Routing

_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Number of the layer that something of a module is in, by its name; None: in none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


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
