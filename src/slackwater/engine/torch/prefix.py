"""Which slot an answer gets, and which slot's prompt it may copy. Pure bookkeeping over token ids.

They are rows of the weights in place, unless a request takes those of any weights. In chunks of more than one token
only rows that prefill computed are shared, in whole chunks or as a whole prompt: exactly the bits that the new answer's
own prefill would make.

Some models remember no rows, but a state that can't be cut: then a slot can be shared up to two points alone: its
prompt's end, which is marked there, and the end of all that it remembers. Where nothing is remembered, nothing is
shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.engine.torch.architectures import Memory
from slackwater.ids import Version
from slackwater.rollout.evidence import PolicySpan, grown

_WORTH: Final = 16
"""A prompt waits for another one's rows if they are so many more."""


@dataclass(kw_only=True, slots=True)
class _Slot:
    prompt: tuple[int, ...] = ()
    """Of the answer that has it or had it last, and what of the answer can be shared."""
    salt: str = ""
    """Only requests with the same one share it."""
    kv: tuple[PolicySpan, ...] = ()
    """Which weights computed the prompt's rows that are in place."""
    fresh: bool = True
    """No row was computed before the last exchange of weights."""
    marked: int = 0
    """The prompt's end, where what was remembered was marked; 0: it isn't."""
    live: int = 0
    """How many the newest state stands for; 0: for none, or for an answer's tokens that aren't known here."""
    whole: bool = False
    """The logits after what is marked are known, under the weights in place."""
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
        memory: Of the model that the slots are of; it says where they can be cut.
    """

    def __init__(self, *, slots: int, chunk: int, memory: Memory = Memory.ROWS) -> None:
        self._memory: Final = memory
        self._slots: Final = [_Slot() for _ in range(slots)]
        self._chunk: Final = chunk
        self._tick = 0

    @property
    def taken(self) -> int:
        """Slots in use."""
        return sum(not slot.free for slot in self._slots)

    @property
    def kept(self) -> int:
        """Rows that free slots keep."""
        return sum(slot.filled for slot in self._slots if slot.free)

    def take(
        self,
        prompt: tuple[int, ...],
        version: Version,
        *,
        salt: str = "",
        any_kv: bool = False,
        private: bool = False,
        patient: bool = True,
    ) -> Seat | None:
        """Take the longest free slot, or a free one of which everything is of use.

        None: none is free, or a prompt that is being computed will soon have more to share than there is now.

        Args:
            prompt: For which it is.
            version: Label of the weights in place.
            salt: Rows of requests with the same one will do, and no others.
            any_kv: Rows of other weights will do too.
            private: Its rows are like nobody else's: none are taken and none given.
            patient: It waits for what will soon be there.
        """
        free = [index for index, slot in enumerate(self._slots) if slot.free]
        if not free:
            return None
        if private or self._memory is Memory.NOTHING:
            prompt = ()
        source, shared = self._share(prompt, version, salt, any_kv=any_kv)
        if patient and shared < len(prompt) and self._more_soon(prompt, shared, salt):
            return None
        spent = source in free and 0 < shared == self._slots[source].filled
        chosen = source if spent else min(free, key=lambda index: self._slots[index].released)
        kv, fresh = _spans(self._slots[source].kv, shared), not shared or self._slots[source].fresh
        self._slots[chosen] = _Slot(prompt=prompt, salt=salt, kv=kv, fresh=fresh, live=shared, free=False)
        return Seat(slot=chosen, source=source if shared else chosen, shared=shared, kv=kv)

    def fill(self, slot: int, filled: int, version: Version, *, whole: bool = False) -> None:
        """Record that prefill has computed rows up to the ``filled``th of the slot's prompt.

        Args:
            slot: Which.
            filled: Prompt tokens that are in place now.
            version: Label of the weights in place.
            whole: The logits after the whole prompt are known, and what is remembered now is marked.
        """
        held = self._slots[slot]
        held.kv = grown(held.kv, version, filled)
        if whole:
            held.whole, held.marked = True, filled
        # At the prompt's end the answer's tokens follow, if they aren't there already.
        held.live = filled if filled < len(held.prompt) else 0

    def extend(self, slot: int, tokens: Sequence[int], kv: tuple[PolicySpan, ...]) -> None:
        """Record that the rows of an answer's tokens follow those of its prompt, which are all in place.

        Args:
            slot: Which.
            tokens: Whose rows are in place.
            kv: Which weights computed the rows of prompt and tokens.
        """
        held = self._slots[slot]
        held.prompt, held.kv = (*held.prompt, *tokens), kv
        held.live = len(held.prompt)

    def empty(self, slot: int) -> None:
        """Forget the slot's rows: they are computed anew, or nobody may have them."""
        held = self._slots[slot]
        held.kv, held.fresh, held.whole, held.marked, held.live = (), True, False, 0, 0

    def give_up(self) -> None:
        """Forget the rows of the slot that is free for longest, of those that keep some. There has to be one."""
        keeping = [index for index, slot in enumerate(self._slots) if slot.free and slot.filled]
        self.empty(min(keeping, key=lambda index: self._slots[index].released))

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

    def _share(self, prompt: tuple[int, ...], version: Version, salt: str, *, any_kv: bool) -> tuple[int, int]:
        """The slot with most of ``prompt`` to give, and how many tokens of it. Rows of the weights in place win."""
        own = [slot.of(version) for slot in self._slots]
        fits = [slot.salt == salt and (any_kv or own[at]) for at, slot in enumerate(self._slots)]
        lengths = [self._common(slot, prompt) if fits[at] else 0 for at, slot in enumerate(self._slots)]
        best = max(range(len(lengths)), key=lambda at: (lengths[at], own[at]))
        return best, lengths[best]

    def _more_soon(self, prompt: tuple[int, ...], shared: int, salt: str) -> bool:
        """Whether a prompt that is being computed will have enough more to share to wait for it."""
        salted = (slot for slot in self._slots if slot.salt == salt and not slot.free and not slot.whole)
        filling = (slot for slot in salted if slot.filled < len(slot.prompt))
        least = shared + max(self._chunk, _WORTH)
        return any(slot.prompt == prompt or self._promised(slot, prompt) >= least for slot in filling)

    def _promised(self, slot: _Slot, prompt: tuple[int, ...]) -> int:
        """How many tokens of ``prompt`` a slot can give once its own prompt is in place."""
        return self._cut(common(slot.prompt, prompt), (len(slot.prompt),), prompt)

    def _common(self, slot: _Slot, prompt: tuple[int, ...]) -> int:
        """How many tokens of ``prompt`` a slot can give."""
        if slot.whole and slot.prompt[: slot.marked] == prompt:
            return len(prompt)
        return self._cut(common(slot.prompt[: slot.filled], prompt), (slot.marked, slot.live), prompt)

    def _cut(self, agree: int, points: Sequence[int], prompt: tuple[int, ...]) -> int:
        """Most tokens that can be taken of ``agree``, where states can't be cut but at ``points``.

        The last token is always computed, with its chunk: its logits are what prefill is for.
        """
        most = max(0, min(agree, len(prompt) - 1))
        if self._memory is Memory.ROWS:
            return most // self._chunk * self._chunk
        return max((point for point in points if point <= most and not point % self._chunk), default=0)


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


def _spans(kv: tuple[PolicySpan, ...], end: int) -> tuple[PolicySpan, ...]:
    """The spans up to ``end``."""
    shorter: tuple[PolicySpan, ...] = ()
    for span in kv:
        if span.start < end:
            shorter = grown(shorter, span.version, min(span.end, end))
    return shorter
