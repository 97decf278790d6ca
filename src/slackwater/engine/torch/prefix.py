"""Which slot an answer gets, and which slot's prompt it may copy. Pure bookkeeping over token ids.

They are rows of the weights in place, unless a request takes those of any weights. In chunks of more than one token
only rows that prefill computed are shared, in whole chunks or as a whole prompt: exactly the bits that the new answer's
own prefill would make.

Some models remember no rows, but a state that can't be cut: then a slot has at most two points up to which it can be
shared, the one marked at its prompt's end and the end of all that it remembers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.ids import Version
from slackwater.rollout.evidence import PolicySpan, grown

_WORTH: Final = 16
"""A prompt waits for another one's rows if they are so many more."""


@dataclass(kw_only=True, slots=True)
class _Slot:
    prompt: tuple[int, ...] = ()
    """Of the answer that has it or had it last, and what of the answer can be shared."""
    kv: tuple[PolicySpan, ...] = ()
    """Which weights computed the prompt's rows that are in place."""
    fresh: bool = True
    """No row was computed before the last exchange of weights."""
    marked: int = 0
    """Where states can't be cut: the prompt's end, once it is in place."""
    end: int = 0
    """Likewise: where the answer ended."""
    whole: bool = False
    """The prompt is in place, and its logits under the weights in place are known."""
    free: bool = True
    released: int = 0
    """Tick of its release: the longest free slot is taken first."""

    @property
    def filled(self) -> int:
        return self.kv[-1].end if self.kv else 0

    def of(self, version: Version) -> bool:
        """Whether all its rows are of the weights in place, which are labelled ``version``."""
        return self.fresh and len(self.kv) == 1 and self.kv[0].version == version


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A slot for an answer, and what it starts with."""

    slot: int
    source: int
    """Slot whose first ``shared`` rows are to be copied; ``slot`` itself where they are in place."""
    shared: int
    """Prompt tokens that need no prefill; the whole prompt only where ``source`` finished the same one."""
    kv: tuple[PolicySpan, ...]
    """Which weights computed those."""


class SlotTable:
    """Slots by number, with the prompt that each holds.

    Args:
        slots: How many.
        chunk: Rows are shared in multiples of so many.
        anywhere: What a slot remembers can be cut anywhere; else at its points only.
    """

    def __init__(self, *, slots: int, chunk: int, anywhere: bool = True) -> None:
        self._anywhere: Final = anywhere
        self._slots: Final = [_Slot() for _ in range(slots)]
        self._chunk: Final = chunk
        self._tick = 0

    @property
    def taken(self) -> int:
        """Slots in use."""
        return sum(not slot.free for slot in self._slots)

    def take(
        self, prompt: tuple[int, ...], version: Version, *, any_kv: bool = False, private: bool = False
    ) -> Seat | None:
        """Take the longest free slot, or a free one of which everything is of use.

        None: none is free, or a prompt that is being computed will soon have more to share than there is now.

        Args:
            prompt: For which it is.
            version: Label of the weights in place.
            any_kv: Rows of other weights will do too.
            private: Its rows are like nobody else's: none are taken and none given.
        """
        free = [index for index, slot in enumerate(self._slots) if slot.free]
        if not free:
            return None
        if private:
            prompt = ()
        source, shared = self._share(prompt, version, any_kv=any_kv)
        if shared < len(prompt) and self._more_soon(prompt, shared):
            return None
        spent = source in free and 0 < shared == self._slots[source].filled
        chosen = source if spent else min(free, key=lambda index: self._slots[index].released)
        kv, fresh = _cut(self._slots[source].kv, shared), not shared or self._slots[source].fresh
        self._slots[chosen] = _Slot(prompt=prompt, kv=kv, fresh=fresh, free=False)
        return Seat(slot=chosen, source=source if shared else chosen, shared=shared, kv=kv)

    def fill(self, slot: int, filled: int, version: Version, *, whole: bool = False) -> None:
        """Record that prefill has computed rows up to the ``filled``th of the slot's prompt.

        Args:
            slot: Which.
            filled: Prompt tokens that are in place now.
            version: Label of the weights in place.
            whole: The logits after the whole prompt are known.
        """
        held = self._slots[slot]
        held.kv, held.whole = grown(held.kv, version, filled), whole

    def extend(self, slot: int, tokens: Sequence[int], kv: tuple[PolicySpan, ...]) -> None:
        """Record that the rows of an answer's tokens follow those of its prompt, which are all in place.

        Args:
            slot: Which.
            tokens: Whose rows are in place.
            kv: Which weights computed the rows of prompt and tokens.
        """
        held = self._slots[slot]
        held.prompt, held.kv, held.whole = (*held.prompt, *tokens), kv, held.whole and not tokens
        held.end = len(held.prompt)

    def mark(self, slot: int) -> None:
        """Record that what is remembered now, the whole prompt, stays at hand."""
        self._slots[slot].marked = self._slots[slot].filled

    def empty(self, slot: int) -> None:
        """Forget the slot's rows: they are computed anew, or nobody may have them."""
        held = self._slots[slot]
        held.kv, held.fresh, held.whole, held.marked, held.end = (), True, False, 0, 0

    def release(self, slot: int) -> None:
        """Free a slot; its prompt can be shared until another answer takes it."""
        self._tick += 1
        self._slots[slot].free = True
        self._slots[slot].released = self._tick

    def flip(self) -> None:
        """Other weights are in place: what is there is shared with requests that take rows of any."""
        for slot in self._slots:
            slot.fresh = slot.whole = False

    def disown(self, version: Version) -> None:
        """Share no row that ``version`` has computed."""
        for index, slot in enumerate(self._slots):
            if any(span.version == version for span in slot.kv):
                self.empty(index)

    def _share(self, prompt: tuple[int, ...], version: Version, *, any_kv: bool) -> tuple[int, int]:
        """The slot with most of ``prompt`` to give, and how many tokens of it. Rows of the weights in place win."""
        own = [slot.of(version) for slot in self._slots]
        lengths = [self._common(slot, prompt) if any_kv or own[at] else 0 for at, slot in enumerate(self._slots)]
        best = max(range(len(lengths)), key=lambda at: (lengths[at], own[at]))
        return best, lengths[best]

    def _more_soon(self, prompt: tuple[int, ...], shared: int) -> bool:
        """Whether a prompt that is being computed will have enough more to share to wait for it."""
        filling = (slot for slot in self._slots if not slot.free and not slot.whole and slot.filled < len(slot.prompt))
        least = shared + max(self._chunk, _WORTH)
        return any(slot.prompt == prompt or self._shareable(slot, slot.prompt, prompt) >= least for slot in filling)

    def _common(self, slot: _Slot, prompt: tuple[int, ...]) -> int:
        if slot.whole and slot.prompt == prompt:
            return len(prompt)
        return self._shareable(slot, slot.prompt[: slot.filled], prompt)

    def _shareable(self, slot: _Slot, held: tuple[int, ...], prompt: tuple[int, ...]) -> int:
        """How many tokens of ``prompt`` a slot can give once ``held`` is in place."""
        count = common(held, prompt)
        if not self._anywhere:
            points = (slot.marked, slot.end) if slot.marked else (len(held),)
            count = max((point for point in points if point <= count and not point % self._chunk), default=0)
        return self._whole_chunks(count, prompt)

    def _whole_chunks(self, count: int, prompt: tuple[int, ...]) -> int:
        # The last token is always computed, with its chunk: its logits are what prefill is for.
        return min(count, len(prompt) - 1) // self._chunk * self._chunk


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # everything below ``low`` agrees, something below ``high + 1`` may not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(kv: tuple[PolicySpan, ...], end: int) -> tuple[PolicySpan, ...]:
    """The spans up to ``end``."""
    shorter: tuple[PolicySpan, ...] = ()
    for span in kv:
        if span.start < end:
            shorter = grown(shorter, span.version, min(span.end, end))
    return shorter
