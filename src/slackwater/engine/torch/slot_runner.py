"""The runner of models whose layers all attend: every slot's tokens share passes, and rows can be shared anywhere."""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slackwater.engine.torch.batch import Batch, Pass
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.routing import RouteStore
from slackwater.engine.torch.slots import SlotStore


class SlotRunner:
    """See `slackwater.engine.torch.runner.Runner`.

    Args:
        model: What runs.
        slots: Rows.
        window: Most positions.
        threads: That attention may use.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int, threads: int = 1) -> None:
        self._model: Final = model
        self._store: Final = SlotStore(model, slots=slots, window=window, threads=threads)
        self.routes: Final = RouteStore(model.routing, slots=slots, window=window) if model.routing else None

    @property
    def anywhere(self) -> bool:
        """See `Runner.anywhere`."""
        return True

    def run(self, work: Pass) -> Tensor:
        """See `Runner.run`."""
        batch = Batch.of(work.pieces, padded_to=work.padded_to)
        self._store.aim(batch)
        ends = np.array(batch.ends, dtype=np.int64)[list(work.wanted)]
        kept: Any = torch.from_numpy(ends)  # pyright: ignore[reportUnknownMemberType]
        module: Any = self._model.module
        output = module(
            input_ids=batch.ids,
            position_ids=batch.positions,
            past_key_values=self._store,
            use_cache=True,
            logits_to_keep=0 if work.every_logit else kept,
            store=self._store,
        )
        logits: Tensor = output.logits[0]
        return logits[kept] if work.every_logit else logits

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Runner.copy`."""
        if slot != source:
            self._store.copy(slot, source=source, count=count)

    def mark(self, slot: int) -> None:
        """See `Runner.mark`: everything stays at hand."""

    def close(self) -> None:
        """See `Runner.close`."""
        self._store.close()
