"""The tokens that each draw was made from, and log-probabilities over these alone.

A sampler that keeps a part of the vocabulary draws from the softmax over that part. A ratio is exact only if the
trainer's log-probability is of the same softmax, under its own weights.

Notation: N sampled tokens, M ids of all their supports, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slackwater.trainer.samples import Sample, SamplingMask


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Which tokens may count for which."""

    rows: torch.Tensor
    """int64 [M]: the sampled token, 0 to N - 1, that an id is of."""
    ids: torch.Tensor
    """int64 [M]."""
    whole: torch.Tensor
    """bool [N]: tokens that nobody told the support of. They were drawn from the whole vocabulary, or from more of it
    than is told."""


def support_of(samples: Sequence[Sample]) -> Support | None:
    """The supports of all tokens of ``samples``, in order; None where nobody told of any."""
    if all(sample.sampling_mask is None for sample in samples):
        return None
    counts = np.concatenate([_counts(sample.sampling_mask, len(sample.token_ids)) for sample in samples])
    ids = np.concatenate([sample.sampling_mask.ids for sample in samples if sample.sampling_mask is not None])
    widths = torch.tensor(counts)
    return Support(
        rows=torch.arange(len(counts)).repeat_interleave(widths),
        ids=torch.tensor(ids, dtype=torch.int64),
        whole=widths == 0,
    )


def _counts(mask: SamplingMask | None, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(num_tokens, np.int64) if mask is None else np.diff(mask.indptr)


def kept_logprobs(logits: torch.Tensor, targets: torch.Tensor, support: Support | None) -> torch.Tensor:
    """Log-probabilities of tokens in the softmax over their supports.

    Args:
        logits: float32 [N, V], divided by the temperature.
        targets: int64 [N].
        support: None: the whole vocabulary.

    Returns:
        float32 [N]; minus infinity for a token outside of its support.
    """
    if support is not None:
        kept = support.whole[:, None].repeat(1, logits.shape[1])
        kept[support.rows, support.ids] = True
        logits = logits.masked_fill(~kept, -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
