"""Continuous batching, one step at a time: synchronous, single-threaded, no clock.

Each step decodes every answer in a slot by one token, admits, and prefills a bounded number of tokens; `Shaping` says
what shares a pass. Weights change between steps only: a step has one version, and its tokens carry it.

Where KV is short an answer may be preempted: it keeps its tokens, loses its slot and rows, and waits before all others
until it has them again. `Budget` says which; where an answer stands follows from its rows and tokens alone.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.batch import CHUNK, Pass, Piece, Shaping
from slackwater.engine.torch.budget import Budget, Holding
from slackwater.engine.torch.checks import check_ids, check_request
from slackwater.engine.torch.grammars import Matching
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.prefix import SlotTable
from slackwater.engine.torch.runners import runner_of
from slackwater.engine.torch.sampler import Drawn, sample
from slackwater.engine.torch.sequence import Began, Ended, Event, Failed, Made
from slackwater.engine.torch.sequence import Sequence as Row
from slackwater.errors import InvalidInputError, PolicyUnmetError, UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, grown
from slackwater.rollout.request import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fill:
    """Tokens of an answer's rows that a pass computes."""

    row: Row
    piece: Piece

    @property
    def end(self) -> int:
        """Rows in place after it."""
        return self.piece.start + len(self.piece.tokens)

    @property
    def begins(self) -> bool:
        """Whether the answer's first token is drawn after it."""
        return not self.row.made and self.end == self.row.due


class Core:
    """Answers by key. Every method is called from one thread; none blocks but ``step``, for one step.

    Args:
        model: The weights that it runs; they are patched from outside, between steps.
        shaping: How passes are made up, and how many slots there are.
        window: Most tokens of prompt and completion together.
        version: Label of the weights in place.
        threads: That attention may use.
        kv_tokens: Most positions of KV in use, of all slots together, those kept for sharing too; the window is cut to
            it. None: as many as all slots have.
    """

    def __init__(
        self,
        model: LoadedModel,
        shaping: Shaping,
        *,
        window: int,
        version: Version,
        threads: int = 1,
        kv_tokens: int | None = None,
    ) -> None:
        self._model: Final = model
        self.window: Final = window if kv_tokens is None else min(window, kv_tokens)
        self._budget: Final = Budget.of(slots=shaping.slots, window=self.window, kv_tokens=kv_tokens)
        self._shaping: Final = shaping
        self._runner: Final = runner_of(
            model, slots=shaping.slots, window=self.window, threads=threads, invariant=shaping.invariant
        )
        self._table: Final = SlotTable(slots=shaping.slots, chunk=shaping.shared_by, memory=model.memory)
        self._prompt_logits: Final[dict[int, Tensor]] = {}
        self._rows: Final[dict[int, Row]] = {}
        self._waiting: Final[deque[Row]] = deque()
        self._seated: Final[list[Row]] = []
        self._draining = False
        self._version = version
        self._preemptions = 0

    @property
    def version(self) -> Version:
        """Label of the weights in place."""
        return self._version

    @property
    def active(self) -> int:
        """Answers in a slot. Any thread."""
        return len(self._seated)

    @property
    def preempted(self) -> int:
        """Answers that have tokens and wait for a slot again."""
        return sum(bool(row.made) for row in self._waiting)

    @property
    def preemptions(self) -> int:
        """How often an answer lost its slot to others, so far. Any thread."""
        return self._preemptions

    @property
    def kv_tokens(self) -> int:
        """Most positions of KV in use."""
        return self._budget.rows

    @property
    def kv_used(self) -> int:
        """Positions of KV in use: answers' rows in place, and what free slots keep for sharing. Any thread."""
        return sum(row.filled for row in self._seated) + self._table.kept

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return any(self._works(row) for row in self._seated) or any(self._may(row) for row in self._waiting)

    def check(self, request: CompletionRequest) -> None:
        """Refuse what can't be answered, see `check_request`. Any thread."""
        model = self._model
        check_request(request, window=self.window, vocab_size=model.vocab_size, routing=model.routing)

    def add(
        self, key: int, request: CompletionRequest, *, seed: int, ahead: bool = False, matching: Matching | None = None
    ) -> None:
        """Queue a request that passed `check`, under a key that isn't in use; its draws use ``seed``.

        ``ahead`` of all that wait. ``matching``: where its answer stands in its grammar.
        """
        row = self._row(key, request, seed=seed)
        row.matching = matching
        self._queue(row, ahead=ahead)

    def hold(self, key: int, request: CompletionRequest, forced_ids: Sequence[int]) -> None:
        """Queue a request that takes forced tokens only, at least one, and stays for `extend`.

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
        for row in self._seated:
            if not row.made:
                self._restart(row)
        begun = [row for row in self._rows.values() if row.made]
        ended: list[Event] = [end for row in begun if (end := self._end_of(row, in_flight, gone if spoilt else None))]
        for end in ended:
            self.abort(end.key)
        again = in_flight is InFlight.RECOMPUTE or self._model.memory is Memory.NOTHING
        for row in begun:
            if row.key in self._rows and (again or (spoilt and _built(row, gone))):
                self._restart(row)
        return ended

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Make at most one token per answer in a slot, one more for those that get their first.

        Events come in the order in which things happened.
        """
        for key in self._budget.preempted(self._holdings()):
            self._preempt(self._rows[key])
        self._give_up()
        return list(self._apart() if self._shaping.invariant else self._together())

    def close(self) -> None:
        """End the threads that it has."""
        self._runner.close()

    def _row(self, key: int, request: CompletionRequest, *, seed: int) -> Row:
        return Row(
            key=key,
            request=request,
            seed=seed,
            limit=min(request.sampling.max_tokens, self.window - len(request.prompt_ids)),
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
        check_ids("forced_token_ids", forced_ids, self._model.vocab_size)
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
        behind = [row for row in self._seated if row.filled < row.due]
        fresh = [] if self._draining else [row for row in behind if not row.made]
        for row in (*(row for row in behind if row.made), *fresh):
            left -= self._fill(row, left, fills)
        while left and (row := self._seat()):
            left -= self._fill(row, left, fills)
        return fills

    def _fill(self, row: Row, left: int, fills: list[_Fill]) -> int:
        """Add the next tokens of an answer, at most ``left``; how many."""
        tokens = row.chunk(left)
        if tokens:
            fills.append(_Fill(row=row, piece=Piece(slot=row.slot, start=row.filled, tokens=tokens)))
        return len(tokens)

    def _seat(self) -> Row | None:
        """Give the first that waits a slot. None: it has to wait, for one, for KV, or for rows that it will share."""
        row = next((row for row in self._waiting if self._may(row)), None)
        if row is None or not self._make_room(row):
            return None
        request = row.request
        prompt, private = request.prompt_ids, bool(request.forced_routes)
        any_kv, salt, patient = request.policy.any_kv, request.cache_salt, not self._draining
        seat = self._table.take(prompt, self._version, salt=salt, any_kv=any_kv, private=private, patient=patient)
        if seat is None:
            return None
        self._waiting.remove(row)
        self._seated.append(row)
        row.sit(seat, self._version, exact=self._shaping.invariant)
        if seat.shared:
            self._runner.copy(seat.slot, source=seat.source, count=seat.shared)
        if self._runner.routes:
            self._runner.routes.force(seat.slot, request.forced_routes)
        whole = seat.shared == len(prompt)
        if whole:
            self._prompt_logits[seat.slot] = self._prompt_logits[seat.source]
            self._runner.mark(seat.slot)
        self._table.fill(seat.slot, seat.shared, self._version, whole=whole)
        self._give_up()
        return row

    def _make_room(self, row: Row) -> bool:
        """Preempt who is idle, if there is a place for ``row`` then. Whether there is."""
        leaving = self._budget.displaced(self._holdings(), row.reach)
        for key in leaving or ():
            self._preempt(self._rows[key])
        return leaving is not None

    def _holdings(self) -> list[Holding]:
        return [Holding(key=row.key, rows=row.reach, idle=not self._works(row)) for row in self._seated]

    def _give_up(self) -> None:
        """Forget what free slots keep, as far as answers in slots may need the room."""
        reach = sum(row.reach for row in self._seated)
        while reach + self._table.kept > self._budget.rows:
            self._table.give_up()

    def _preempt(self, row: Row) -> None:
        """Take an answer's slot and rows; it will be the first to get others."""
        self._preemptions += 1
        self._prompt_logits.pop(row.slot, None)
        self._table.empty(row.slot)
        self._leave(row)
        row.rise()
        self._waiting.appendleft(row)

    def _leave(self, row: Row) -> None:
        self._seated.remove(row)
        self._table.release(row.slot)

    def _may(self, row: Row) -> bool:
        """Whether an answer may take its next token."""
        return row.ready and (bool(row.made) or not self._draining)

    def _works(self, row: Row) -> bool:
        """Whether a step does anything for an answer in a slot."""
        return self._may(row) or (bool(row.made) and row.behind)

    def _take_shared(self) -> list[Row]:
        """Answers whose whole prompt another one had computed."""
        if self._draining:
            return []
        return [row for row in self._seated if not row.made and row.filled == row.due]

    def _restart(self, row: Row) -> None:
        """Have an answer's rows computed anew from the first on, by prefill."""
        row.restart()
        if row.slot >= 0:
            self._table.empty(row.slot)

    def _pass(self, rows: list[Row], fills: Sequence[_Fill], *, padded_to: int = 0) -> Iterator[Event]:
        """Run the next tokens of ``rows`` and what ``fills`` says through the model, and draw what follows.

        Of an answer that has its rows computed again the next token isn't the newest: then nothing is drawn.
        """
        nexts = (Piece(slot=row.slot, start=row.filled, tokens=row.following) for row in rows)
        newest = [at for at, row in enumerate(rows) if not row.behind]
        wanted = [*newest, *(len(rows) + at for at, fill in enumerate(fills) if fill.begins)]
        pieces = [*nexts, *(fill.piece for fill in fills)]
        fixed = bool(rows) and padded_to > 0
        logits = self._runner.run(Pass(pieces=pieces, wanted=wanted, padded_to=padded_to, every_logit=fixed))
        drawing, firsts = [rows[at] for at in newest], [fill.row for fill in fills if fill.begins]
        for row in rows:
            row.kv = grown(row.kv, self._version, row.filled + 1)
        for fill in fills:
            self._note(fill)
        for row, last in zip(firsts, logits[len(drawing) :], strict=True):
            self._complete(row, last)
        yield from self._draw(drawing, logits[: len(drawing)], firsts)

    def _note(self, fill: _Fill) -> None:
        """Record what a pass has put in place."""
        row, prompt, begins = fill.row, len(fill.row.request.prompt_ids), fill.begins
        row.kv = grown(row.kv, self._version, fill.end)
        self._table.fill(row.slot, min(fill.end, prompt), self._version, whole=begins)

    def _complete(self, row: Row, logits: Tensor) -> None:
        """All of a prompt's rows are in place; ``logits`` follow the last."""
        self._prompt_logits[row.slot] = logits.clone()
        self._runner.mark(row.slot)

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
        held = (self._version,)
        error = PolicyUnmetError(wanted, hint=row.request.policy.way_out(held), versions=held)
        return Failed(key=row.key, error=error)

    def _began(self, row: Row) -> Began:
        builders = {span.version for span in row.kv}
        built_by = builders.pop() if len(builders) == 1 else None
        return Began(key=row.key, cached_tokens=row.cached, prompt_version=built_by)

    def _decodable(self) -> list[Row]:
        """Answers that a step decodes: they have a token whose row is the next."""
        return [row for row in self._seated if row.made and row.filled >= row.due and self._works(row)]

    def _accept(self, row: Row, drawn: Drawn | None) -> Event:
        if drawn is None:
            self._table.empty(row.slot)
            self._prompt_logits.pop(row.slot, None)
            self._drop(row)
            return Failed(key=row.key, error=row.undrawable(self._version))
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
            self._leave(row)
        else:
            self._waiting.remove(row)

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


def _built(row: Row, version: Version) -> bool:
    return any(span.version == version for span in row.kv)
