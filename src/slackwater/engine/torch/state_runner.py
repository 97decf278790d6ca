"""The runner of models that remember states: a cache of transformers' own per slot, which is shared as a whole."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache

from slackwater.engine.torch.batch import Batch, Pass, Piece
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.recording import Recorder
from slackwater.engine.torch.routing import RouteStore
from slackwater.errors import InternalError


@dataclass(kw_only=True, slots=True, eq=False)
class _State:
    """What a model remembers of the first ``count`` tokens of something. Only its single holder may run it on."""

    cache: DynamicCache
    count: int


class StateRunner:
    """See `slackwater.engine.torch.runner.Runner`.

    Pieces run one by one, so a token's arithmetic depends on its own answer alone: on the tokens before it, and on
    where its pieces begin. Answers whose pieces begin at the same places have the same bits whoever is in the pass,
    and with or without a copied state. So nothing is padded.

    Args:
        model: What runs.
        slots: Answers at once.
        window: Most positions of one.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int) -> None:
        self._module: Final[Any] = model.module
        self._vocab_size: Final = model.vocab_size
        self._live: Final[dict[int, _State]] = {}
        self._marked: Final[dict[int, _State]] = {}
        self._recorder: Final = Recorder(model, slots=slots, window=window)

    @property
    def routes(self) -> RouteStore | None:
        """See `Runner.routes`."""
        return self._recorder.routes

    def run(self, work: Pass) -> Tensor:
        """See `Runner.run`."""
        ends = [self._advance(piece) for piece in work.pieces]
        wanted = [ends[at] for at in work.wanted]
        return torch.stack(wanted) if wanted else torch.empty(0, self._vocab_size)

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Runner.copy`."""
        at_hand = (self._live.get(source), self._marked.get(source))
        state = next((state for state in at_hand if state and state.count == count), None)
        if state is None:
            has = [state.count for state in at_hand if state]
            raise InternalError(f"slot {source} has states of {has} tokens, not of {count}", hint="report it")
        self._live[slot] = state
        self._marked.pop(slot, None)
        self._recorder.copy(slot, source=source, count=count)

    def mark(self, slot: int) -> None:
        """See `Runner.mark`."""
        self._marked[slot] = self._live[slot]

    def close(self) -> None:
        """See `Runner.close`: there are none."""

    def _advance(self, piece: Piece) -> Tensor:
        """``[vocab]``: logits after a piece."""
        state, batch = self._own(piece), Batch.of([piece])
        with self._recorder.recording(batch):
            output = self._module(
                input_ids=batch.ids,
                position_ids=batch.positions,
                past_key_values=state.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        state.count += len(piece.tokens)
        return output.logits[0, -1]

    def _own(self, piece: Piece) -> _State:
        """The state that a piece continues, held by nothing but its slot."""
        slot, state = piece.slot, self._live.get(piece.slot)
        if not piece.start:
            self._marked.pop(slot, None)
            state = _State(cache=DynamicCache(config=self._module.config), count=0)
        if state is None or state.count != piece.start:
            raise InternalError(f"slot {slot} can't go on at {piece.start}", hint="report it")
        held = (*self._live.values(), *self._marked.values())
        if sum(other is state for other in held) > 1:
            state = _State(cache=deepcopy(state.cache), count=state.count)
        self._live[slot] = state
        return state
