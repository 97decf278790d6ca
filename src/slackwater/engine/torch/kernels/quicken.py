"""Which modules of a model our kernels run, where this machine can."""

from torch import nn

from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.linear import Linear
from slackwater.engine.torch.kernels.small import install_gated, install_norm, is_gated, is_norm
from slackwater.engine.torch.kernels.team import Team


def quicken(module: nn.Module, team: Team) -> None:
    """Have a model's products run by AMX, as far as they fit, and the small operations between them by kernels.

    Where a machine has no AMX, everything is left to torch: its products need its threads, and these would get in the
    way of ours.
    """
    if not tiles.available():
        return
    linear = Linear(team)
    for part in module.modules():
        if isinstance(part, nn.Linear) and Linear.fits(part):
            linear.install(part)
        elif is_norm(part):
            install_norm(part)
        elif is_gated(part):
            install_gated(part)
