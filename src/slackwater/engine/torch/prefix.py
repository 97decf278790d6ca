"""Which slot an answer gets, and which slot's prompt it may copy. Pure bookkeeping over token ids.

Only rows that prefill computed under the weights in place are shared, and only in whole chunks or as a whole
prompt: exactly the bits that the new answer's own prefill would make.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(kw_only=True, slots=True)
class _Slot:
    prompt: tuple[int, ...] = ()
    filled: int = 0
    """Prompt tokens whose rows are in place; the prompt's length once its logits are known too."""
    free: bool = True
    released: int = 0
    """Tick of its release: the longest free slot is taken first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A slot for an answer, and what it starts with."""

    slot: int
    source: int
    """Slot whose first ``shared`` rows are to be copied; ``slot`` itself where they are in place."""
    shared: int
    """Prompt tokens that need no prefill; the whole prompt only where ``source`` finished the same one."""


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

    def take(self, prompt: tuple[int, ...]) -> Seat | None:
        """Take the longest free slot; None where all are in use."""
        free = [index for index, slot in enumerate(self._slots) if slot.free]
        if not free:
            return None
        chosen = min(free, key=lambda index: self._slots[index].released)
        source, shared = self.share(prompt)
        self._slots[chosen] = _Slot(prompt=prompt, free=False)
        return Seat(slot=chosen, source=source if shared else chosen, shared=shared)

    def share(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """The slot that holds most of ``prompt`` under the weights in place, and how many tokens of it."""
        lengths = [self._common(slot, prompt) for slot in self._slots]
        best = max(lengths)
        return lengths.index(best), best

    def fill(self, slot: int, filled: int) -> None:
        """Record that the first ``filled`` tokens of the slot's prompt are in place."""
        self._slots[slot].filled = filled

    def release(self, slot: int) -> None:
        """Free a slot; its prompt can be shared until another answer takes it."""
        self._tick += 1
        self._slots[slot].free = True
        self._slots[slot].released = self._tick

    def flip(self) -> None:
        """Forget what can be shared: other weights are in place."""
        for slot in self._slots:
            slot.filled = 0

    def _common(self, slot: _Slot, prompt: tuple[int, ...]) -> int:
        if slot.filled == len(prompt) and slot.prompt == prompt:
            return len(prompt)
        # The last token's chunk is always computed: its logits are what prefill is for.
        most = min(slot.filled, len(prompt) - 1)
        shared = 0
        while (end := shared + self._chunk) <= most and slot.prompt[shared:end] == prompt[shared:end]:
            shared = end
        return shared
