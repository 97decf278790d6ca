"""Continuous batching, one step at a time: synchronous, single-threaded, no clock.

Each step admits, prefills a bounded number of chunks, and decodes every answer in a slot by one token.
Weights change between steps only: a step has one version, and its tokens carry it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.prefix import SlotTable
from slackwater.engine.torch.sampler import Drawn, sample
from slackwater.engine.torch.sequence import Began, Ended, Event, Failed, Made
from slackwater.engine.torch.sequence import Sequence as Row
from slackwater.engine.torch.slots import CHUNK, KV_STEP, SlotStore
from slackwater.errors import ContextLengthError, CorruptError, InvalidInputError, PolicyUnmetError, UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, grown
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
        self._again: Final[deque[Row]] = deque()
        self._draining = False
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
        fresh = not self._draining and (self._filling or self._waiting)
        return bool(fresh or self._again or self._decodable())

    def check(self, request: CompletionRequest) -> None:
        """Refuse what can't be answered. Any thread.

        Raises:
            ContextLengthError: The prompt fills the window.
            InvalidInputError: A token id is outside of the vocabulary.
        """
        length = len(request.prompt_ids)
        if length >= self._window:
            raise ContextLengthError(
                f"the prompt's {length} tokens leave no room in the window of {self._window}",
                hint="send a shorter prompt",
            )
        self._check_ids(request.prompt_ids)
        self._check_ids(request.forced_ids)

    def add(self, key: int, request: CompletionRequest, *, seed: int, ahead: bool = False) -> None:
        """Queue a request that passed `check`, under a key that isn't in use; its draws use ``seed``.

        ``ahead`` of all that wait.
        """
        self._queue(self._row(key, request, seed=seed), ahead=ahead)

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
        elif row in self._again:
            self._again.remove(row)
        self._drop(row)
        return True

    def abort_all(self) -> list[Event]:
        """End every answer; tokens so far stand."""
        keys = list(self._rows)
        for key in keys:
            self.abort(key)
        return [Ended(key=key, finish=Finish.ABORT) for key in keys]

    def drain(self) -> list[int]:
        """Give no answer its first token until `proceed`; those that have one go on. The keys of these."""
        self._draining = True
        return [row.key for row in self._rows.values() if row.made]

    def proceed(self) -> None:
        """End a drain."""
        self._draining = False

    def relabel(
        self, version: Version, *, in_flight: InFlight = InFlight.CONTINUE, spoilt: bool = False
    ) -> list[Event]:
        """Label the weights that are in place now; no KV of the old ones is shared from here on unless it is asked for.

        An answer without a token starts over. One that has tokens ends if it asked for one exact version.

        Args:
            version: The new label.
            in_flight: What becomes of the other answers that have tokens.
            spoilt: The old weights were not what their label said: answers with tokens of theirs fail.
        """
        gone, self._version = self._version, version
        self._table.flip()
        if spoilt:
            self._table.disown(gone)
        self._prompt_logits.clear()
        if self._filling:
            self._restart(self._filling)
        begun = [row for row in self._rows.values() if row.made]
        ended: list[Event] = [end for row in begun if (end := self._end_of(row, in_flight, gone if spoilt else None))]
        for end in ended:
            self.abort(end.key)
        for row in begun:
            if row.key in self._rows and (in_flight is InFlight.RECOMPUTE or (spoilt and _built(row, gone))):
                self._do_again(row)
        return ended

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

    def _queue(self, row: Row, *, ahead: bool = False) -> None:
        self._rows[row.key] = row
        if ahead:
            self._waiting.appendleft(row)
        else:
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
        while budget and (row := self._next_to_fill()):
            if row.filled < row.due:
                self._run_chunk(row)
                budget -= 1
            if row.filled == row.due:
                yield from self._filled(row)

    def _next_to_fill(self) -> Row | None:
        """Answers that are computed again go first: their readers wait."""
        if self._again:
            return self._again[0]
        if not self._draining:
            self._filling = self._filling or self._seat()
            return self._filling
        return None

    def _filled(self, row: Row) -> Iterator[Event]:
        if row is not self._filling:
            self._again.popleft()
            row.tell_kv = True
            return
        self._filling = None
        yield from self._first(row)

    def _seat(self) -> Row | None:
        if not self._waiting:
            return None
        prompt, any_kv = self._waiting[0].request.prompt_ids, self._waiting[0].request.policy.any_kv
        seat = self._table.take(prompt, self._version, any_kv=any_kv)
        if seat is None:
            return None
        row = self._waiting.popleft()
        row.slot, row.kv, row.cached = seat.slot, seat.kv, seat.shared
        whole = seat.shared == len(prompt)
        if whole:
            self._prompt_logits[seat.slot] = self._prompt_logits[seat.source]
        self._store.reset_row(seat.slot, source=seat.source, shared=seat.shared)
        self._table.fill(seat.slot, seat.shared, self._version, whole=whole)
        return row

    def _restart(self, row: Row) -> None:
        """Have an answer's rows computed anew from the first on, in its slot."""
        row.kv, row.cached = (), 0
        self._table.empty(row.slot)
        # The last chunk's keys reach beyond it: rows of the old weights would lie there, masked yet perhaps NaN.
        self._store.reset_row(row.slot, source=row.slot, shared=0)

    def _do_again(self, row: Row) -> None:
        self._restart(row)
        if row not in self._again:
            self._again.append(row)

    def _run_chunk(self, row: Row) -> None:
        chunk, prompt = list(row.chunk(CHUNK)), len(row.request.prompt_ids)
        mask = self._store.aim_prefill(row.slot, row.filled)
        ids = torch.tensor([chunk + [0] * (CHUNK - len(chunk))])
        positions = torch.arange(row.filled, row.filled + CHUNK)[None]
        logits = self._forward(ids, positions, mask, keep=torch.tensor([len(chunk) - 1]))
        row.kv = grown(row.kv, self._version, row.filled + len(chunk))
        whole = not row.made and row.filled == prompt
        if whole:
            self._prompt_logits[row.slot] = logits
        self._table.fill(row.slot, min(row.filled, prompt), self._version, whole=whole)

    def _first(self, row: Row) -> Iterator[Event]:
        if not row.request.policy.admits(self._version):
            self._drop(row)
            wanted = f"version {self._version} is in place, the request admits {row.request.policy}"
            error = PolicyUnmetError(wanted, hint="retry later", versions=(self._version,))
            yield Failed(key=row.key, error=error)
            return
        row.tell_kv = any(span.version != self._version for span in row.kv)
        builders = {span.version for span in row.kv}
        built_by = builders.pop() if len(builders) == 1 else None
        yield Began(key=row.key, cached_tokens=row.cached, prompt_version=built_by)
        yield self._accept(row, sample(self._prompt_logits[row.slot], [row.ask()])[0])

    def _decodable(self) -> list[Row]:
        return [row for row in self._rows.values() if row.made and row.ready and row not in self._again]

    def _decode(self) -> Iterator[Event]:
        rows = self._decodable()
        if not rows:
            return
        tokens = torch.zeros(self._slots, dtype=torch.long)
        positions = torch.zeros(self._slots, dtype=torch.long)
        slots = [row.slot for row in rows]
        tokens[slots] = torch.tensor([row.tokens[-1] for row in rows])
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
            self._table.empty(row.slot)
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

    def _end_of(self, row: Row, in_flight: InFlight, spoilt: Version | None) -> Ended | Failed | None:
        """How an answer with tokens ends at an exchange; None where it goes on."""
        if spoilt is not None and row.version == spoilt:
            taken_back = f"version {spoilt} was taken back: what it held or computed was not as its manifest says"
            return Failed(key=row.key, error=UnavailableError(taken_back, hint="ask again"))
        exact = row.request.policy.exact_version
        if exact is not None and exact != self._version:
            return Ended(key=row.key, finish=Finish.POLICY_CHANGED)
        cut = in_flight in (InFlight.ABORT, InFlight.DRAIN)
        return Ended(key=row.key, finish=Finish.SWAPPED) if cut else None

    def _check_ids(self, ids: Sequence[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self._model.vocab_size), None)
        if bad is not None:
            raise InvalidInputError(
                f"token {bad} is outside of the vocabulary of {self._model.vocab_size}",
                hint="use this model's tokenizer",
            )


def _built(row: Row, version: Version) -> bool:
    return any(span.version == version for span in row.kv)
