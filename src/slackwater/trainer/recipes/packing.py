"""Pack a group of answers to one prompt into one row, so that the prompt is computed once.

A row is ``prompt, answer 0, answer 1, …``. Positions of every answer continue the prompt's; the attention mask lets
an answer see the prompt and itself, never its siblings. The forward pass equals that of separate rows and costs about
half where prompts are as long as answers. Where routes are replayed, answers share a row only if their prompt took the
same way.

Notation: G rows, T tokens of the longest row, N sampled tokens of all answers together, L layers with routers, K
experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slackwater.trainer.recipes.support import Support, support_of
from slackwater.trainer.samples import Sample

_Weighed = tuple[Sample, float]
"""An answer and its advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Groups of one training step."""

    input_ids: torch.Tensor
    """int64 [G, T]; padding is 0 and never seen by a token that counts."""
    positions: torch.Tensor
    """int64 [G, T]."""
    mask: torch.Tensor
    """bool [G, 1, T, T]: row attends to column."""
    rows: torch.Tensor
    """int64 [N]: the row of each sampled token."""
    columns: torch.Tensor
    """int64 [N]: the place whose logits predict each sampled token."""
    targets: torch.Tensor
    """int64 [N]: the sampled token."""
    behaviour: torch.Tensor
    """float32 [N]: its log-probability as the fleet reported it."""
    advantages: torch.Tensor
    """float32 [N]: the advantage of its answer."""
    support: Support | None = None
    """What each token was drawn from; None: of the whole vocabulary."""
    routes: torch.Tensor | None = None
    """int64 [G * T, L, K]: experts of each place, -1 where nobody told of them; None: of none."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.targets)


def pack(groups: Sequence[Sequence[Sample]], advantages: Sequence[Sequence[float]]) -> Batch:
    """Pack groups; all samples of a group answer the same prompt. ``advantages`` has one number per sample."""
    packed = [
        row
        for group, values in zip(groups, advantages, strict=True)
        for row in _sharing(list(zip(group, values, strict=True)))
    ]
    width = max(len(row[0][0].prompt_ids) + sum(len(sample.token_ids) for sample, _ in row) for row in packed)
    ids, positions = torch.zeros(2, len(packed), width, dtype=torch.int64)
    mask = torch.eye(width, dtype=torch.bool).repeat(len(packed), 1, 1)
    rows: list[int] = []
    columns: list[int] = []
    starts: list[tuple[int, int]] = []
    for row, weighed in enumerate(packed):
        prompt = torch.tensor(weighed[0][0].prompt_ids)
        size = end = len(prompt)
        ids[row, :size] = prompt
        positions[row, :size] = torch.arange(size)
        mask[row, :size, :size] = _causal(size)
        for sample, _ in weighed:
            start, end = end, end + len(sample.token_ids)
            ids[row, start:end] = torch.tensor(sample.token_ids)
            positions[row, start:end] = torch.arange(size, size + end - start)
            mask[row, start:end, :size] = True
            mask[row, start:end, start:end] = _causal(end - start)
            rows += [row] * (end - start)
            columns += [size - 1, *range(start, end - 1)]
            starts.append((row, start))
    answers = [one for weighed in packed for one in weighed]
    return Batch(
        input_ids=ids,
        positions=positions,
        mask=mask[:, None],
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
        targets=torch.tensor([token for sample, _ in answers for token in sample.token_ids]),
        behaviour=torch.tensor([float(value) for sample, _ in answers for value in sample.logprobs]),
        advantages=torch.tensor([value for sample, value in answers for _ in sample.token_ids]),
        support=support_of([sample for sample, _ in answers]),
        routes=_routes([sample for sample, _ in answers], starts, ids.shape),
    )


def _sharing(group: Sequence[_Weighed]) -> list[list[_Weighed]]:
    """The answers of a group, parted by the way that their prompt took."""
    parts: dict[bytes, list[_Weighed]] = {}
    for sample, advantage in group:
        shared = sample.routes and sample.routes.before(len(sample.prompt_ids))
        way = shared.positions.tobytes() + shared.experts.tobytes() if shared else b""
        parts.setdefault(way, []).append((sample, advantage))
    return list(parts.values())


def _routes(
    samples: Sequence[Sample], starts: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Experts by place. Answer ``i`` begins in row and column ``starts[i]``; its prompt is at the row's beginning."""
    told = [
        (routes, len(sample.prompt_ids), *place)
        for sample, place in zip(samples, starts, strict=True)
        if (routes := sample.routes)
    ]
    if not told:
        return None
    routing = told[0][0].routing
    made = torch.full((*shape, len(routing.layers), routing.per_token), -1)
    for routes, size, row, start in told:
        at = torch.tensor(routes.positions)
        made[row, torch.where(at < size, at, at - size + start)] = torch.tensor(routes.experts, dtype=torch.int64)
    return made.flatten(0, 1)


def _causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()
