"""Which slot an answer gets, and which slot's prompt it may copy. Pure bookkeeping over token ids.

Only rows that prefill computed are shared, and only in whole chunks or as a whole prompt: exactly the bits that the new
answer's own prefill would make. They are rows of the weights in place, unless a request takes those of any weights.
"""

from dataclasses import dataclass
from typing import Final

from slackwater.ids import Version
from slackwater.rollout.evidence import PolicySpan, grown


@dataclass(kw_only=True, slots=True)
class _Slot:
    prompt: tuple[int, ...] = ()
    kv: tuple[PolicySpan, ...] = ()
    """Which weights computed the prompt's rows that are in place."""
    fresh: bool = True
    """No row was computed before the last exchange of weights."""
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
        chunk: Tokens that prefill computes together.
    """

    def __init__(self, *, slots: int, chunk: int) -> None:
        self._slots: Final = [_Slot() for _ in range(slots)]
        self._chunk: Final = chunk
        self._tick = 0

    @property
    def taken(self) -> int:
        """Slots in use."""
        return sum(not slot.free for slot in self._slots)

    def take(self, prompt: tuple[int, ...], version: Version, *, any_kv: bool = False) -> Seat | None:
        """Take the longest free slot; None where all are in use.

        Args:
            prompt: For which it is.
            version: Label of the weights in place.
            any_kv: Rows of other weights will do too.
        """
        free = [index for index, slot in enumerate(self._slots) if slot.free]
        if not free:
            return None
        chosen = min(free, key=lambda index: self._slots[index].released)
        source, shared = self._share(prompt, version, any_kv=any_kv)
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

    def empty(self, slot: int) -> None:
        """Forget the slot's rows: they are computed anew, or nobody may have them."""
        held = self._slots[slot]
        held.kv, held.fresh, held.whole = (), True, False

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

    def _common(self, slot: _Slot, prompt: tuple[int, ...]) -> int:
        if slot.whole and slot.prompt == prompt:
            return len(prompt)
        # The last token's chunk is always computed: its logits are what prefill is for.
        most = min(slot.filled, len(prompt) - 1)
        shared = 0
        while (end := shared + self._chunk) <= most and slot.prompt[shared:end] == prompt[shared:end]:
            shared = end
        return shared


def _cut(kv: tuple[PolicySpan, ...], end: int) -> tuple[PolicySpan, ...]:
    """The spans up to ``end``."""
    shorter: tuple[PolicySpan, ...] = ()
    for span in kv:
        if span.start < end:
            shorter = grown(shorter, span.version, min(span.end, end))
    return shorter
