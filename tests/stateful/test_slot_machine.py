"""The slot table against a runner that knows which tokens its states stand for: whatever is shared can be given."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from depth import examples
from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.prefix import Seat, SlotTable
from slackwater.ids import Version
from slackwater.rollout.evidence import PolicySpan, spans

SLOTS = 3
LONGEST = 20
"""Tokens of what is gone on from."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a slot remembers of one token."""

    token: int
    salt: str
    private: bool
    version: Version
    weights: int
    """Their number, which tells them apart where labels are alike."""


State = tuple[Unit, ...]


@dataclass(slots=True, eq=False)
class Answer:
    slot: int
    prompt: tuple[int, ...]
    salt: str
    private: bool
    made: list[int] = field(default_factory=list[int])
    again: bool = False

    @property
    def tokens(self) -> list[int]:
        """All but the newest, whose row isn't there."""
        return [*self.prompt, *self.made[:-1]]


class Machine(RuleBasedStateMachine):
    """Core, runner and requests, as far as they concern the table."""

    memory: Memory
    chunk: int

    @initialize()
    def begin(self) -> None:
        self.table = SlotTable(slots=SLOTS, chunk=self.chunk, memory=self.memory)
        self.version, self.weights = Version(1), 1
        self.live: dict[int, State] = {}
        self.marked: dict[int, State] = {}
        self.logits: dict[int, int] = {}
        self.answers: list[Answer] = []
        self.known: list[tuple[int, ...]] = [()]

    @rule(
        base=st.integers(0, 5),
        cut=st.sampled_from([0, 0, 0, 1, 3]),
        more=st.lists(st.integers(0, 1), max_size=5),
        salt=st.sampled_from(["", "", "", "s"]),
        any_kv=st.booleans(),
        private=st.sampled_from([False, False, False, True]),
        ahead=st.sampled_from([3, 0, 1, 2]),
    )
    def ask(self, base: int, cut: int, more: list[int], salt: str, any_kv: bool, private: bool, ahead: int) -> None:
        """Ask for what goes on from something that was asked before, and let the answer get ahead a bit."""
        known = self.known[-1 - base % len(self.known)]
        prompt = (*known[: max(0, len(known) - cut)], *more) or (1,)
        seat = self.table.take(prompt, self.version, salt=salt, any_kv=any_kv, private=private)
        if seat is None:
            assert len(self.answers) == SLOTS or self.filling
            return
        assert seat.slot not in [answer.slot for answer in self.answers]
        answer = Answer(slot=seat.slot, prompt=prompt, salt=salt, private=private)
        self.copy(seat, answer, any_kv=any_kv)
        self.answers.append(answer)
        for token in range(ahead):
            self.go_on(answer, 9, token % 2)

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 2), chunks=st.integers(1, 8), token=st.integers(0, 1))
    def step(self, which: int, chunks: int, token: int) -> None:
        self.go_on(self.answers[which % len(self.answers)], chunks, token)

    @precondition(lambda self: self.decoding)
    @rule(which=st.integers(0, 2), extends=st.booleans())
    def finish(self, which: int, extends: bool) -> None:
        answer = self.decoding[which % len(self.decoding)]
        if extends and self.chunk == 1 and not answer.private:
            self.table.extend(answer.slot, answer.made[:-1], of(self.live[answer.slot]))
        self.drop(answer)

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 2))
    def abort(self, which: int) -> None:
        self.drop(self.answers[which % len(self.answers)])

    @rule(relabelled=st.booleans(), recompute=st.booleans(), spoilt=st.sampled_from([False, False, True]))
    def swap(self, relabelled: bool, recompute: bool, spoilt: bool) -> None:
        gone, self.weights = self.version, self.weights + 1
        self.version = Version(self.version + relabelled)
        self.table.flip()
        if spoilt:
            self.table.disown(gone)
        self.logits.clear()
        for answer in list(self.answers):
            built = any(unit.version == gone for unit in self.live.get(answer.slot, ()))
            if not answer.made or recompute or (spoilt and built):
                self.table.empty(answer.slot)
                self.live.pop(answer.slot, None)
                answer.again = bool(answer.made)

    @invariant()
    def taken(self) -> None:
        assert self.table.taken == len(self.answers)

    @property
    def filling(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.made or answer.again]

    @property
    def decoding(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.made and not answer.again]

    def go_on(self, answer: Answer, chunks: int, token: int) -> None:
        """Fill in so many chunks, or decode a token where all is in place."""
        if answer in self.decoding:
            self.run(answer, answer.made[-1:])
            answer.made.append(token)
        else:
            self.fill(answer, chunks)

    def fill(self, answer: Answer, chunks: int) -> None:
        begin = len(self.live.get(answer.slot, ()))
        tokens = answer.tokens[begin : begin + chunks * self.chunk]
        self.run(answer, tokens)
        filled = begin + len(tokens)
        whole = filled == len(answer.tokens) and not answer.made
        self.table.fill(answer.slot, min(filled, len(answer.prompt)), self.version, whole=whole)
        if whole:
            self.complete(answer)
        answer.again = answer.again and filled < len(answer.tokens)

    def copy(self, seat: Seat, answer: Answer, *, any_kv: bool) -> None:
        """Have the slot remember what the seat says, which has to be there and to be what it is said to be."""
        state = self.at_hand(seat)
        assert tuple(unit.token for unit in state) == answer.prompt[: seat.shared]
        assert seat.kv == of(state)
        assert all(unit.salt == answer.salt and not unit.private for unit in state)
        assert any_kv or all(unit.weights == self.weights for unit in state)
        assert not (state and answer.private)
        assert seat.shared % self.chunk == 0 or seat.shared == len(answer.prompt)
        whole = seat.shared == len(answer.prompt)
        if whole:
            assert self.logits[seat.source] == self.weights
            assert self.marked[seat.source] == state
        self.live[seat.slot] = state
        self.marked.pop(seat.slot, None)
        self.table.fill(seat.slot, seat.shared, self.version, whole=whole)
        if whole:
            self.complete(answer)
        else:
            self.logits.pop(seat.slot, None)

    def at_hand(self, seat: Seat) -> State:
        if not seat.shared:
            return ()
        states = self.live.get(seat.source, ()), self.marked.get(seat.source, ())
        if self.memory is Memory.ROWS:
            return states[0][: seat.shared]
        assert self.memory is Memory.STATES
        return next(state for state in states if len(state) == seat.shared)

    def run(self, answer: Answer, tokens: list[int]) -> None:
        if not self.live.get(answer.slot):
            self.marked.pop(answer.slot, None)
        private = answer.private or self.memory is Memory.NOTHING
        units = (Unit(token, answer.salt, private, self.version, self.weights) for token in tokens)
        self.live[answer.slot] = (*self.live.get(answer.slot, ()), *units)

    def complete(self, answer: Answer) -> None:
        """The prompt is in place: it is marked, and a first token drawn."""
        self.marked[answer.slot], self.logits[answer.slot] = self.live[answer.slot], self.weights
        answer.made.append(len(answer.prompt) % 2)

    def drop(self, answer: Answer) -> None:
        self.table.release(answer.slot)
        self.answers.remove(answer)
        self.known.append((*answer.prompt, *answer.made)[:LONGEST])


def of(state: State) -> tuple[PolicySpan, ...]:
    return spans(unit.version for unit in state)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("memory", Memory)
def test_every_seat_is_what_its_source_can_give(memory: Memory, chunk: int) -> None:
    class Case(Machine):
        pass

    Case.memory, Case.chunk = memory, chunk
    run_state_machine_as_test(
        Case, settings=settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
    )
