"""Continuous batching, one step at a time: synchronous, single-threaded, no clock.

Each step admits, prefills a bounded number of chunks, and decodes every answer in a slot by one token.
Weights change between steps only: a step has one version, and its tokens carry it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.prefix import SlotTable
from slackwater.engine.torch.sampler import Drawn, sample
from slackwater.engine.torch.sequence import Began, Ended, Event, Failed, Made
from slackwater.engine.torch.sequence import Sequence as Row
from slackwater.engine.torch.slots import CHUNK, KV_STEP, SlotStore
from slackwater.errors import CorruptError, InvalidInputError, PolicyUnmetError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import CompletionRequest

PREFILL_CHUNKS: Final = 4
"""Most chunks that one step prefills, so that decoding goes on meanwhile."""


def shapes(*, slots: int, threads: int) -> str:
    """The shapes of a core's arithmetic, for the numerics fingerprint."""
    return f"{slots} slots, chunks of {CHUNK}, keys by {KV_STEP}, {threads} threads"


class Core:
    """Answers by key. Every method is called from one thread; none blocks but ``step``, for one step.

    Args:
        model: The weights that it runs; they are patched from outside, between steps.
        slots: Answers decoded at once.
        window: Most tokens of prompt and completion together.
        version: Label of the weights in place.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int, version: Version) -> None:
        self._model: Final = model
        self._window: Final = window
        self._slots: Final = slots
        self._store: Final = SlotStore(model, slots=slots, window=window)
        self._table: Final = SlotTable(slots=slots, chunk=CHUNK)
        self._prompt_logits: Final[dict[int, Tensor]] = {}
        self._rows: Final[dict[int, Row]] = {}
        self._waiting: Final[deque[Row]] = deque()
        self._filling: Row | None = None
        self._version = version

    @property
    def version(self) -> Version:
        """Label of the weights in place."""
        return self._version

    @property
    def active(self) -> int:
        """Answers in a slot."""
        return self._table.taken

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._filling or self._waiting or self._decodable())

    def check(self, request: CompletionRequest) -> None:
        """Refuse what can't be answered. Any thread.

        Raises:
            InvalidInputError: The prompt fills the window, or a token id is outside of the vocabulary.
        """
        length = len(request.prompt_ids)
        if length >= self._window:
            raise InvalidInputError(
                f"the prompt's {length} tokens leave no room in the window of {self._window}",
                hint="send a shorter prompt",
            )
        self._check_ids(request.prompt_ids)
        self._check_ids(request.forced_ids)

    def add(self, key: int, request: CompletionRequest, *, seed: int) -> None:
        """Queue a request that passed `check`, under a key that isn't in use; its draws use ``seed``."""
        self._queue(self._row(key, request, seed=seed))

    def hold(self, key: int, request: CompletionRequest, forced_ids: Sequence[int]) -> None:
        """Queue a request that takes forced tokens only, at least one, and keeps its slot for `extend`.

        Raises:
            InvalidInputError: A token is outside of the vocabulary, or there are more than fit.
        """
        row = self._row(key, request, seed=0)
        row.hold = True
        self._force(row, forced_ids)
        self._queue(row)

    def extend(self, key: int, forced_ids: Sequence[int]) -> None:
        """Give a held answer more forced tokens.

        Raises:
            InvalidInputError: No such held answer, or as in `hold`.
        """
        row = self._rows.get(key)
        if row is None or not row.hold:
            raise InvalidInputError(f"{key} is no held answer", hint="hold it first")
        self._force(row, forced_ids)

    def abort(self, key: int) -> bool:
        """Drop an answer at once, whatever its state. Whether there was one."""
        row = self._rows.get(key)
        if row is None:
            return False
        if row is self._filling:
            self._filling = None
        elif row.slot < 0:
            self._waiting.remove(row)
        self._drop(row)
        return True

    def abort_all(self) -> list[Event]:
        """End every answer; tokens so far stand."""
        keys = list(self._rows)
        for key in keys:
            self.abort(key)
        return [Ended(key=key, finish=Finish.ABORT) for key in keys]

    def relabel(self, version: Version) -> list[Event]:
        """Label the weights that are in place now; no prompt KV of the old ones is shared from here on.

        An answer without a token starts over. One with tokens goes on with its KV, unless it asked for one
        exact version: then it ends.
        """
        self._version = version
        self._table.flip()
        self._prompt_logits.clear()
        if row := self._filling:
            row.filled = row.cached = 0
            # The last chunk's keys reach beyond it: rows of the old weights would lie there, masked yet perhaps NaN.
            self._store.reset_row(row.slot, source=row.slot, shared=0)
        gone = [row for row in self._rows.values() if row.made and self._bound_elsewhere(row)]
        for row in gone:
            self._drop(row)
        return [Ended(key=row.key, finish=Finish.POLICY_CHANGED) for row in gone]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Make at most one token per answer in a slot, one more for those that get their first.

        Events come in the order in which things happened.
        """
        return [*self._prefill(), *self._decode()]

    def _row(self, key: int, request: CompletionRequest, *, seed: int) -> Row:
        return Row(
            key=key,
            request=request,
            seed=seed,
            limit=min(request.sampling.max_tokens, self._window - len(request.prompt_ids)),
            ends=frozenset((*self._model.eos_token_ids, *request.sampling.stop_token_ids)),
            forced=list(request.forced_ids),
        )

    def _queue(self, row: Row) -> None:
        self._rows[row.key] = row
        self._waiting.append(row)

    def _force(self, row: Row, forced_ids: Sequence[int]) -> None:
        self._check_ids(forced_ids)
        if len(row.forced) + len(forced_ids) > row.limit:
            raise InvalidInputError(
                f"answer {row.key} would pass its {row.limit} tokens", hint="raise max_tokens or the window"
            )
        row.forced.extend(forced_ids)

    def _prefill(self) -> Iterator[Event]:
        budget = PREFILL_CHUNKS
        while budget and (row := self._filling or self._seat()):
            self._filling = row
            if row.filled < len(row.request.prompt_ids):
                self._run_chunk(row)
                budget -= 1
            if row.filled == len(row.request.prompt_ids):
                self._filling = None
                yield from self._first(row)

    def _seat(self) -> Row | None:
        seat = self._table.take(self._waiting[0].request.prompt_ids) if self._waiting else None
        if seat is None:
            return None
        row = self._waiting.popleft()
        row.slot, row.filled, row.cached = seat.slot, seat.shared, seat.shared
        if seat.shared == len(row.request.prompt_ids):
            self._prompt_logits[seat.slot] = self._prompt_logits[seat.source]
        self._store.reset_row(seat.slot, source=seat.source, shared=seat.shared)
        self._table.fill(seat.slot, seat.shared)
        return row

    def _run_chunk(self, row: Row) -> None:
        chunk = list(row.chunk(CHUNK))
        mask = self._store.aim_prefill(row.slot, row.filled)
        ids = torch.tensor([chunk + [0] * (CHUNK - len(chunk))])
        positions = torch.arange(row.filled, row.filled + CHUNK)[None]
        logits = self._forward(ids, positions, mask, keep=torch.tensor([len(chunk) - 1]))
        row.filled += len(chunk)
        if row.filled == len(row.request.prompt_ids):
            self._prompt_logits[row.slot] = logits
        self._table.fill(row.slot, row.filled)

    def _first(self, row: Row) -> Iterator[Event]:
        if not row.request.policy.admits(self._version):
            self._drop(row)
            wanted = f"version {self._version} is in place, the request admits {row.request.policy}"
            yield Failed(key=row.key, error=PolicyUnmetError(wanted, hint="retry later"))
            return
        yield Began(key=row.key, cached_tokens=row.cached, prompt_version=self._version)
        yield self._accept(row, sample(self._prompt_logits[row.slot], [row.ask()])[0])

    def _decodable(self) -> list[Row]:
        return [row for row in self._rows.values() if row.made and row.ready]

    def _decode(self) -> Iterator[Event]:
        rows = self._decodable()
        if not rows:
            return
        tokens = torch.zeros(self._slots, dtype=torch.long)
        positions = torch.zeros(self._slots, dtype=torch.long)
        slots = [row.slot for row in rows]
        tokens[slots] = torch.tensor([row.last for row in rows])
        positions[slots] = torch.tensor([row.position - 1 for row in rows])
        mask = self._store.aim_decode(slots, positions)
        logits = self._forward(tokens[:, None], positions[:, None], mask)
        for row, drawn in zip(rows, sample(logits[slots], [row.ask() for row in rows]), strict=True):
            yield self._accept(row, drawn)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, keep: Tensor | int = 0) -> Tensor:
        module: Any = self._model.module
        output = module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._store,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits[:, 0]

    def _accept(self, row: Row, drawn: Drawn | None) -> Event:
        if drawn is None:
            self._table.fill(row.slot, 0)  # nothing of this slot is shared
            self._prompt_logits.pop(row.slot, None)
            self._drop(row)
            where = f"version {self._version} made logits that are no numbers at position {row.position}"
            return Failed(key=row.key, error=CorruptError(where, hint="put the previous version back"))
        step = row.accept(drawn, self._version)
        if step.finish:
            self._drop(row)
        return Made(key=row.key, step=step)

    def _drop(self, row: Row) -> None:
        del self._rows[row.key]
        if row.slot >= 0:
            self._table.release(row.slot)

    def _bound_elsewhere(self, row: Row) -> bool:
        exact = row.request.policy.exact_version
        return exact is not None and exact != self._version

    def _check_ids(self, ids: Sequence[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self._model.vocab_size), None)
        if bad is not None:
            raise InvalidInputError(
                f"token {bad} is outside of the vocabulary of {self._model.vocab_size}",
                hint="use this model's tokenizer",
            )
