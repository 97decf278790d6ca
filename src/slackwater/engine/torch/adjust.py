"""Raw logits made into those that the temperature divides: grammars, bans, biases, penalties of the tokens so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slackwater.rollout.request import SamplingSpec

_MOST: Final = torch.finfo(torch.float32).max
_FIRST_ROOM: Final = 64


@dataclass(kw_only=True, slots=True, eq=False)
class Tally:
    """How often each token is in an answer; it grows with it, so a step costs nothing per token so far."""

    _places: dict[int, int] = field(default_factory=dict[int, int])
    _ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_FIRST_ROOM, dtype=np.int64))
    _counts: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(_FIRST_ROOM, dtype=np.float32))

    def see(self, token_ids: Iterable[int]) -> None:
        """Take tokens of the prompt: they are known, and counted no time."""
        for token_id in token_ids:
            self._place(token_id)

    def count(self, token_ids: Iterable[int]) -> None:
        """Take the answer's next tokens."""
        for token_id in token_ids:
            place = self._place(token_id)
            self._counts[place] += 1.0

    def known(self) -> tuple[Tensor, Tensor]:
        """Each token once, int64, and how often the answer has it, float32. Valid until the next token."""
        num = len(self._places)
        return torch.from_numpy(self._ids[:num]), torch.from_numpy(self._counts[:num])

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        return place


_Allowed = npt.NDArray[np.bool_] | None


def changes(spec: SamplingSpec, banned: Sequence[int], allowed: _Allowed = None) -> bool:
    """Whether `adjust` would do anything."""
    return bool(banned or spec.logit_bias or spec.penalises) or allowed is not None


def adjust(
    row: Tensor, spec: SamplingSpec, banned: Sequence[int], tally: Tally | None, allowed: _Allowed = None
) -> None:
    """Change one row of logits in place, as `SamplingSpec` has it.

    Args:
        row: ``[vocabulary]`` float32. Ids of the bias and the tally are within it.
        spec: How tokens are drawn.
        banned: Tokens that can't be drawn unless nothing else can.
        tally: The tokens so far, where the spec penalises them.
        allowed: ``[vocabulary]``: what a grammar lets come next, where there is one. All else can't be drawn.
    """
    if allowed is not None:
        row.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
    _ban(row, [token_id for token_id in banned if token_id < len(row)])
    if spec.logit_bias:
        ids, values = zip(*spec.logit_bias, strict=True)
        row[list(ids)] += torch.tensor(values)
    if tally is not None and spec.penalises:
        ids, counts = tally.known()
        row[ids] = _penalised(row[ids], counts, spec)


def _ban(row: Tensor, ids: list[int]) -> None:
    if not ids:
        return
    kept = row[ids]
    row[ids] = -torch.inf
    if not row.amax() > -torch.inf:
        row[ids] = kept


def _penalised(logits: Tensor, counts: Tensor, spec: SamplingSpec) -> Tensor:
    """As float64 has it, held within what float32 can: a penalty makes no infinity."""
    wide, counted = logits.double(), counts.double()
    factor = spec.repetition_penalty
    wide = torch.where(wide > 0.0, wide / factor, wide * factor)
    wide -= spec.frequency_penalty * counted + spec.presence_penalty * (counted > 0.0)
    return torch.where(logits == -torch.inf, logits, wide.clamp(-_MOST, _MOST).float())
