"""One pass through the model: which tokens run together, in which rows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK: Final = 32
"""Tokens of a prompt that run together where no bit may depend on the batch; the last chunk is padded."""
PASS_TOKENS: Final = 256
"""Most tokens of prompts in a step otherwise: many share the reading of weights, and readers don't wait long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """How answers are put into passes.

    Invariant, every pass has one of two shapes: a token of each slot, or a chunk of one prompt. Each row is then
    computed by the same arithmetic whoever is served beside it. Otherwise all tokens at hand share passes, and only
    those: faster, and the last bits of logits depend on the company.
    """

    slots: int
    """Answers decoded at once."""
    invariant: bool

    @property
    def shared_by(self) -> int:
        """Prompts share rows in multiples of so many tokens."""
        return CHUNK if self.invariant else 1

    @property
    def budget(self) -> int:
        """Most tokens of prompts in one step, so that decoding goes on meanwhile."""
        return 4 * CHUNK if self.invariant else PASS_TOKENS

    def __str__(self) -> str:
        how = f"batch invariant, chunks of {CHUNK}" if self.invariant else f"passes of up to {PASS_TOKENS} tokens"
        return f"{self.slots} slots, {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens that follow each other in one slot."""

    slot: int
    start: int
    """Position of the first."""
    tokens: Sequence[int]
    """At least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one run through the model computes, and of which pieces the logits after the last token are wanted."""

    pieces: Sequence[Piece]
    """Each of another slot."""
    wanted: Sequence[int]
    """Indices of pieces, rising."""
    padded_to: int = 0
    """Tokens of the pass where its shape has to be the same whoever is in it."""
    every_logit: bool = False
    """Make logits of all tokens, padding too, so that this product has the same shape as well."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Pieces side by side, as the model and the store take them."""

    ids: Tensor
    """``[1, tokens]``, int64; padding is 0."""
    positions: Tensor
    """``[1, tokens]``, int64."""
    slots: npt.NDArray[np.int64]
    """``[real tokens]``: of each token that isn't padding. These come first."""
    places: npt.NDArray[np.int64]
    """``[real tokens]``: their positions."""
    ends: tuple[int, ...]
    """Index of each piece's last token."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, padded_to: int = 0) -> Self:
        """Lay pieces side by side, with padding up to ``padded_to`` tokens."""
        counts = [len(piece.tokens) for piece in pieces]
        real = sum(counts)
        ids = np.zeros((2, max(real, padded_to)), dtype=np.int64)
        ids[0, :real] = [token for piece in pieces for token in piece.tokens]
        ids[1, :real] = [at for piece in pieces for at in range(piece.start, piece.start + len(piece.tokens))]
        tensor = torch.from_numpy(ids)  # pyright: ignore[reportUnknownMemberType]
        return cls(
            ids=tensor[0:1],
            positions=tensor[1:2],
            slots=np.repeat(np.array([piece.slot for piece in pieces], dtype=np.int64), counts),
            places=ids[1, :real],
            ends=tuple(int(end) for end in np.cumsum(counts) - 1),
        )
