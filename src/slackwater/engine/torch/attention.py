"""Our attention by its name: what transformers' layers call, and where it leads."""

from typing import Any, Final, Protocol

from torch import Tensor
from transformers import AttentionInterface

ATTENTION: Final = "slackwater"
"""What transformers calls this attention."""
LANES: Final = 8
"""Head dimensions are multiples of this."""


class Store(Protocol):
    """Rows of keys and values that a pass has written."""

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """See `slackwater.engine.torch.rows.Rows.attend`."""
        ...


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, store: Store, scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' layers call; keys and values have gone to the store by then."""
    del key, value, mask, kwargs
    return store.attend(int(module.layer_idx), query, scaling), None


AttentionInterface.register(ATTENTION, _attention)
