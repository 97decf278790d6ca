"""How far log-probabilities are from a plain forward pass, and where greedy answers part in a batch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_generate import model
from engine_load import Kept, tail


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Absolute differences of log-probabilities, in nats, over all tokens of some answers."""

    mean: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Greedy answers to the same prompts, alone and in a batch."""

    answers: int
    parted: int
    """Of them, those with another token somewhere."""
    first: float
    """Median place of the first other token, counted from the answer's beginning; NaN where none parted."""


def differences(folder: Path, dtype: str, kept: Sequence[Kept]) -> Differences:
    """Compare answers with one forward pass over each, without a cache.

    Args:
        folder: The model.
        dtype: ``bfloat16`` or ``float32``: of the pass.
        kept: The answers, drawn at temperature 1.
    """
    module = _module(folder, dtype, "sdpa")
    return _apart((_plain(module, answer), torch.tensor(answer.logprobs, dtype=torch.float64)) for answer in kept)


def passes(one: tuple[Path, str, str], other: tuple[Path, str, str], kept: Sequence[Kept]) -> Differences:
    """Compare two plain forward passes with each other, over the same answers: how far apart equals are.

    Args:
        one: Folder, dtype and attention of transformers.
        other: Likewise.
        kept: The answers.
    """
    modules = _module(*one), _module(*other)
    return _apart((_plain(modules[0], answer), _plain(modules[1], answer)) for answer in kept)


def _module(folder: Path, dtype: str, attention: str) -> Any:
    settings: Mapping[str, Any] = {"threads": torch.get_num_threads(), "dtype": dtype, "attention": attention}
    return model(folder, settings)


@torch.inference_mode()
def _plain(module: Any, answer: Kept) -> Tensor:
    """Log-probabilities of an answer's tokens, float64."""
    ids = torch.tensor([[*answer.prompt, *answer.token_ids]])
    logits = module(input_ids=ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
    return logits.double().log_softmax(dim=-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def _apart(pairs: Iterable[tuple[Tensor, Tensor]]) -> Differences:
    found: list[float] = [value for one, other in pairs for value in (one - other).abs().tolist()]
    return Differences(mean=statistics.fmean(found), p99=tail(found), most=max(found))


def parting(alone: Sequence[Kept], together: Sequence[Kept]) -> Parting:
    """Compare answers to the same prompts, in whatever order."""
    others = {tuple(answer.prompt): answer.token_ids for answer in together}
    pairs = [(answer.token_ids, others[tuple(answer.prompt)]) for answer in alone]
    places = [
        next(place for place, (token, other) in enumerate(zip(one, two, strict=True)) if token != other)
        for one, two in pairs
        if one != two
    ]
    first = statistics.median(places) if places else float("nan")
    return Parting(answers=len(pairs), parted=len(places), first=first)
