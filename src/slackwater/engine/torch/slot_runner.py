"""The runner of models whose layers all attend: every slot's tokens share passes, and rows can be shared anywhere."""

from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slackwater.engine.torch.batch import Batch, Pass, Piece
from slackwater.engine.torch.experts import use_experts
from slackwater.engine.torch.kernels.quicken import quicken, quickly
from slackwater.engine.torch.kernels.team import Team
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.recording import Recorder
from slackwater.engine.torch.routing import RouteStore
from slackwater.engine.torch.slots import SlotStore


class SlotRunner:
    """See `slackwater.engine.torch.runner.Runner`.

    Args:
        model: What runs.
        slots: Rows.
        window: Most positions.
        threads: That attention may use.
        invariant: Whether a token's arithmetic mustn't depend on what else is in a pass of the same shape.
    """

    def __init__(
        self, model: LoadedModel, *, slots: int, window: int, threads: int = 1, invariant: bool = False
    ) -> None:
        self._model: Final = model
        self._team: Final = Team(threads)
        self._store: Final = SlotStore(model, slots=slots, window=window, team=self._team)
        self._recorder: Final = Recorder(model, slots=slots, window=window)
        if model.routing:
            use_experts(model.module, invariant=invariant)
        self._quick: Final = partial(quickly, self._team) if quicken(model.module, self._team) else nullcontext
        self._warm()

    @property
    def routes(self) -> RouteStore | None:
        """See `Runner.routes`."""
        return self._recorder.routes

    def run(self, work: Pass) -> Tensor:
        """See `Runner.run`."""
        batch = Batch.of(work.pieces, padded_to=work.padded_to)
        self._store.aim(batch)
        ends = np.array(batch.ends, dtype=np.int64)[list(work.wanted)]
        kept: Any = torch.from_numpy(ends)  # pyright: ignore[reportUnknownMemberType]
        module: Any = self._model.module
        with self._quick(), self._recorder.recording(batch):
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

    @torch.inference_mode()
    def _warm(self) -> None:
        """Have the kernels compiled: that stops every thread for seconds, so it is done before anybody is served."""
        self.run(Pass(pieces=[Piece(slot=0, start=0, tokens=[0])], wanted=[0]))

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Runner.copy`."""
        if slot == source:
            return
        self._store.rows.copy(slot, source=source, count=count)
        self._recorder.copy(slot, source=source, count=count)

    def mark(self, slot: int) -> None:
        """See `Runner.mark`: everything stays at hand."""

    def close(self) -> None:
        """See `Runner.close`."""
        self._store.rows.close()
        self._team.close()
