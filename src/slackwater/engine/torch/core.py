"""Continuous batching, one step at a time: synchronous, single-threaded, no clock.

Each step decodes every answer in a slot by one token, admits, and prefills a bounded number of tokens; `Shaping` says
what shares a pass. Weights change between steps only: a step has one version, and its tokens carry it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.batch import CHUNK, Pass, Piece, Shaping
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.prefix import SlotTable
from slackwater.engine.torch.runners import runner_of
from slackwater.engine.torch.sampler import Drawn, sample
from slackwater.engine.torch.sequence import Began, Ended, Event, Failed, Made
from slackwater.engine.torch.sequence import Sequence as Row
from slackwater.errors import (
    ContextLengthError,
    CorruptError,
    InvalidInputError,
    PolicyUnmetError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, grown
from slackwater.rollout.request import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fill:
    """Tokens of an answer's rows that a pass computes."""

    row: Row
    piece: Piece

    @property
    def ends(self) -> bool:
        """Whether all rows that prefill has to put in place are, after it."""
        return self.piece.start + len(self.piece.tokens) == self.row.due


class Core:
    """Answers by key. Every method is called from one thread; none blocks but ``step``, for one step.

    Args:
        model: The weights that it runs; they are patched from outside, between steps.
        shaping: How passes are made up, and how many slots there are.
        window: Most tokens of prompt and completion together.
        version: Label of the weights in place.
        threads: That attention may use.
    """

    def __init__(
        self, model: LoadedModel, shaping: Shaping, *, window: int, version: Version, threads: int = 1
    ) -> None:
        self._model: Final = model
        self._window: Final = window
        self._shaping: Final = shaping
        self._runner: Final = runner_of(model, slots=shaping.slots, window=window, threads=threads)
        anywhere = self._runner.anywhere
        self._table: Final = SlotTable(slots=shaping.slots, chunk=shaping.shared_by, anywhere=anywhere)
        self._prompt_logits: Final[dict[int, Tensor]] = {}
        self._rows: Final[dict[int, Row]] = {}
        self._waiting: Final[deque[Row]] = deque()
        self._filling: Final[list[Row]] = []
        self._again: Final[list[Row]] = []
        self._shared: Final[list[Row]] = []
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
        fresh = not self._draining and (self._filling or self._shared or self._waiting)
        return bool(fresh or self._again or self._decodable())

    def check(self, request: CompletionRequest) -> None:
        """Refuse what can't be answered. Any thread.

        Raises:
            ContextLengthError: The prompt fills the window.
            InvalidInputError: A token id is outside of the vocabulary, or routes to force don't fit.
            UnsupportedError: There are routes to force, and no router.
        """
        length = len(request.prompt_ids)
        if length >= self._window:
            raise ContextLengthError(
                f"the prompt's {length} tokens leave no room in the window of {self._window}",
                hint="send a shorter prompt",
            )
        self._check_ids(request.prompt_ids)
        self._check_ids(request.forced_ids)
        self._check_ids(request.sampling.named_ids)
        if request.forced_routes:
            self._check_routes(request)

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
        for stage in (self._waiting, self._filling, self._shared, self._again):
            if row in stage:
                stage.remove(row)
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
        self._filling.extend(self._shared)
        self._shared.clear()
        for row in self._filling:
            self._restart(row)
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
        return list(self._apart() if self._shaping.invariant else self._together())

    def close(self) -> None:
        """End the threads that it has."""
        self._runner.close()

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

    def _together(self) -> Iterator[Event]:
        """Decode, and prefill as much as fits, in as few passes as can be."""
        rows, left = self._decodable(), self._shaping.budget
        while True:
            fills = self._fills(left)
            yield from self._draw([], None, self._take_shared())
            if not rows and not fills:
                return
            yield from self._pass(rows, fills)
            rows, left = [], left - sum(len(fill.piece.tokens) for fill in fills)

    def _apart(self) -> Iterator[Event]:
        """Prefill chunk by chunk, then decode all slots."""
        left = self._shaping.budget
        while left and (fills := self._fills(CHUNK)):
            yield from self._pass([], fills[:1], padded_to=CHUNK)
            left -= CHUNK
        yield from self._draw([], None, self._take_shared())
        if rows := self._decodable():
            yield from self._pass(rows, [], padded_to=self._shaping.slots)

    def _fills(self, left: int) -> list[_Fill]:
        """What to prefill next, at most ``left`` tokens. What is computed again goes first: its readers wait."""
        fills: list[_Fill] = []
        for row in (*self._again, *(() if self._draining else self._filling)):
            left -= self._fill(row, left, fills)
        while left and not self._draining and (row := self._seat()):
            left -= self._fill(row, left, fills)
        return fills

    def _fill(self, row: Row, left: int, fills: list[_Fill]) -> int:
        """Add the next tokens of an answer, at most ``left``; how many."""
        tokens = row.chunk(left)
        if tokens:
            fills.append(_Fill(row=row, piece=Piece(slot=row.slot, start=row.filled, tokens=tokens)))
        return len(tokens)

    def _seat(self) -> Row | None:
        """Give the first that waits a slot. None: it has to wait, for a slot or for rows that it will share."""
        if not self._waiting:
            return None
        request = self._waiting[0].request
        prompt, private = request.prompt_ids, bool(request.forced_routes)
        seat = self._table.take(prompt, self._version, any_kv=request.policy.any_kv, private=private)
        if seat is None:
            return None
        row = self._waiting.popleft()
        row.slot, row.kv, row.cached = seat.slot, seat.kv, seat.shared
        if seat.shared:
            self._runner.copy(seat.slot, source=seat.source, count=seat.shared)
        if self._runner.routes:
            self._runner.routes.force(seat.slot, request.forced_routes)
        whole = seat.shared == len(prompt)
        if whole:
            self._prompt_logits[seat.slot] = self._prompt_logits[seat.source]
        self._table.fill(seat.slot, seat.shared, self._version, whole=whole)
        (self._shared if whole else self._filling).append(row)
        return row

    def _take_shared(self) -> list[Row]:
        """Answers whose whole prompt another one had computed."""
        if self._draining:
            return []
        rows = self._shared.copy()
        self._shared.clear()
        return rows

    def _restart(self, row: Row) -> None:
        """Have an answer's rows computed anew from the first on, in its slot."""
        row.kv, row.cached = (), 0
        self._table.empty(row.slot)

    def _do_again(self, row: Row) -> None:
        self._restart(row)
        if row not in self._again:
            self._again.append(row)

    def _pass(self, rows: list[Row], fills: Sequence[_Fill], *, padded_to: int = 0) -> Iterator[Event]:
        """Run the newest tokens of ``rows`` and what ``fills`` says through the model, and draw what follows."""
        newest = (Piece(slot=row.slot, start=row.position - 1, tokens=row.tokens[-1:]) for row in rows)
        wanted = [*range(len(rows)), *(len(rows) + at for at, fill in enumerate(fills) if fill.ends)]
        pieces = [*newest, *(fill.piece for fill in fills)]
        fixed = bool(rows) and padded_to > 0
        logits = self._runner.run(Pass(pieces=pieces, wanted=wanted, padded_to=padded_to, every_logit=fixed))
        for row in rows:
            row.kv = grown(row.kv, self._version, row.position)
        done = [fill.row for fill in fills if fill.ends]
        for fill in fills:
            self._note(fill)
        for row, last in zip(done, logits[len(rows) :], strict=False):
            self._complete(row, last)
        yield from self._draw(rows, logits[: len(rows)], [row for row in done if not row.made])

    def _note(self, fill: _Fill) -> None:
        """Record what a pass has put in place."""
        row, filled, prompt = fill.row, fill.piece.start + len(fill.piece.tokens), len(fill.row.request.prompt_ids)
        row.kv = grown(row.kv, self._version, filled)
        self._table.fill(row.slot, min(filled, prompt), self._version, whole=fill.ends and not row.made)

    def _complete(self, row: Row, logits: Tensor) -> None:
        """All of an answer's rows are in place; ``logits`` follow the last."""
        if row.made:
            self._again.remove(row)
            row.tell_kv = True
        else:
            self._filling.remove(row)
            self._prompt_logits[row.slot] = logits.clone()
            self._runner.mark(row.slot)
            self._table.mark(row.slot)

    def _draw(self, rows: Sequence[Row], logits: Tensor | None, firsts: Sequence[Row]) -> Iterator[Event]:
        """Draw the next token of ``rows`` from ``logits``, and the first of ``firsts``."""
        admitted = [row for row in firsts if row.request.policy.admits(self._version)]
        for row in firsts:
            yield self._began(row) if row in admitted else self._unmet(row)
        everyone = [*rows, *admitted]
        if everyone:
            given = [logits] if logits is not None and rows else []
            given += [self._prompt_logits[row.slot][None] for row in admitted]
            drawn = sample(given[0] if len(given) == 1 else torch.cat(given), [row.ask() for row in everyone])
            for row, one in zip(everyone, drawn, strict=True):
                yield self._accept(row, one)

    def _unmet(self, row: Row) -> Failed:
        self._drop(row)
        wanted = f"version {self._version} is in place, the request admits {row.request.policy}"
        error = PolicyUnmetError(wanted, hint="retry later", versions=(self._version,))
        return Failed(key=row.key, error=error)

    def _began(self, row: Row) -> Began:
        row.tell_kv = any(span.version != self._version for span in row.kv)
        builders = {span.version for span in row.kv}
        built_by = builders.pop() if len(builders) == 1 else None
        return Began(key=row.key, cached_tokens=row.cached, prompt_version=built_by)

    def _decodable(self) -> list[Row]:
        return [row for row in self._rows.values() if row.made and row.ready and row not in self._again]

    def _accept(self, row: Row, drawn: Drawn | None) -> Event:
        if drawn is None:
            self._table.empty(row.slot)
            self._prompt_logits.pop(row.slot, None)
            self._drop(row)
            where = f"version {self._version} made logits that are no numbers at position {row.position}"
            return Failed(key=row.key, error=CorruptError(where, hint="put the previous version back"))
        step = row.accept(drawn, self._version, routes=self._routes(row))
        if step.finish:
            if not self._shaping.invariant and not row.request.forced_routes:
                self._table.extend(row.slot, row.tokens[:-1], row.kv)
            self._drop(row)
        return Made(key=row.key, step=step)

    def _routes(self, row: Row) -> bytes | None:
        """The routes that no step of an answer has told of yet, if it asks for any."""
        store, begin = self._runner.routes, row.request.routes_from
        if store is None or begin is None:
            return None
        prompt = len(row.request.prompt_ids)
        return store.told(row.slot, begin if not row.made else prompt + row.made - 1, prompt + row.made)

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

    def _check_routes(self, request: CompletionRequest) -> None:
        if self._runner.routes is None:
            raise UnsupportedError("this model has no router to force", hint="send no routes")
        rows, most = self._runner.routes.routing.check(request.forced_routes), len(request.prompt_ids)
        if rows > most + len(request.forced_ids):
            raise InvalidInputError(
                f"routes of {rows} positions, prompt and forced tokens have {most + len(request.forced_ids)}",
                hint="send at most as many",
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self._model.vocab_size), None)
        if bad is not None:
            raise InvalidInputError(
                f"token {bad} is outside of the vocabulary of {self._model.vocab_size}",
                hint="use this model's tokenizer",
            )


def _built(row: Row, version: Version) -> bool:
    return any(span.version == version for span in row.kv)
