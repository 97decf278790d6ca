"""The runner of models whose code has no cache: to go on, it runs all tokens again."""

from typing import Any, Final

import torch
from torch import Tensor

from slackwater.engine.torch.batch import Batch, Pass, Piece
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.recording import Recorder
from slackwater.engine.torch.routing import RouteStore
from slackwater.errors import InternalError


class RerunRunner:
    """See `slackwater.engine.torch.runner.Runner`.

    Every token's logits come of a run of its answer's tokens alone, from the first on, under the weights in place: they
    depend on nothing else. No work is saved where prompts are alike.

    Args:
        model: What runs.
        slots: Answers at once.
        window: Most positions of one.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int) -> None:
        self._module: Final[Any] = model.module
        self._vocab_size: Final = model.vocab_size
        self._tokens: Final[dict[int, list[int]]] = {}
        self._recorded: Final[dict[int, int]] = {}
        self._recorder: Final = Recorder(model, slots=slots, window=window)

    @property
    def routes(self) -> RouteStore | None:
        """See `Runner.routes`."""
        return self._recorder.routes

    def run(self, work: Pass) -> Tensor:
        """See `Runner.run`: pieces that aren't wanted are run with later ones of their slot."""
        for piece in work.pieces:
            self._take(piece)
        wanted = [self._last(work.pieces[at].slot) for at in work.wanted]
        return torch.stack(wanted) if wanted else torch.empty(0, self._vocab_size)

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Runner.copy`."""
        raise InternalError(f"slot {slot} is to have {count} tokens of {source}: none are kept", hint="report it")

    def mark(self, slot: int) -> None:
        """See `Runner.mark`: there is nothing to share."""

    def close(self) -> None:
        """See `Runner.close`: there are none."""

    def _take(self, piece: Piece) -> None:
        before = self._tokens.get(piece.slot, []) if piece.start else []
        if len(before) != piece.start:
            raise InternalError(f"slot {piece.slot} can't go on at {piece.start}", hint="report it")
        self._tokens[piece.slot] = [*before, *piece.tokens]
        if not before:
            self._recorded[piece.slot] = 0

    def _last(self, slot: int) -> Tensor:
        """``[vocab]``: logits after all tokens of a slot."""
        batch = Batch.of([Piece(slot=slot, start=0, tokens=self._tokens[slot])])
        with self._recorder.recording(batch, known=self._recorded[slot]):
            output = self._module(input_ids=batch.ids)
        self._recorded[slot] = len(self._tokens[slot])
        return output.logits[0, -1]
