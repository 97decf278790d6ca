"""The KV store: fixed memory, which passes write and attention reads in place."""

from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import Cache

from slackwater.engine.torch.batch import Batch
from slackwater.engine.torch.kernels.team import Team
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.rows import PlainRows, Rows
from slackwater.engine.torch.tile_rows import TileRows


class SlotStore(Cache):
    """Keys and values of every layer, as transformers' layers meet them.

    Aim it at a batch, then run the model with it as ``past_key_values`` and ``store``.

    Args:
        model: Gives the shapes.
        slots: Rows.
        window: Most positions.
        team: Who shares attention.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int, team: Team) -> None:
        super().__init__(layers=[])
        self.rows: Final[Rows] = (
            TileRows(model, slots=slots, window=window, team=team)
            if TileRows.fits(model)
            else PlainRows(model, slots=slots, window=window, threads=team.threads)
        )

    def aim(self, batch: Batch) -> None:
        """See `Rows.aim`."""
        self.rows.aim(batch)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `Rows.put`. Called by each layer."""
        del args, kwargs
        self.rows.put(layer_idx, key_states, value_states)
        return key_states, value_states

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """See `Rows.attend`."""
        return self.rows.attend(layer, query, scaling)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not asked for: positions are always given. 0 keeps transformers from guessing."""
        del layer_idx
        return 0
