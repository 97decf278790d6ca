"""GRPO in plain torch, with fp32 masters and a forward pass on the bf16 values that are published.

Group-relative advantages and the clipped ratio are those of DeepSeekMath (arXiv 2402.03300), without a KL penalty;
the denominator of the ratio is the fleet's behaviour log-probability, token by token, so answers that crossed a swap
are weighed by the policies that really made them. Where answers tell what their tokens were drawn from, or which
experts they went to, the trainer's log-probabilities are of the same softmax and by the same experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slackwater.trainer.recipes.packing import Batch, pack
from slackwater.trainer.recipes.replay import replaying
from slackwater.trainer.recipes.support import kept_logprobs
from slackwater.trainer.samples import Sample
from slackwater.weights.source import FolderSource
from slackwater.weights.views import stored_views


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """Settings of the optimiser."""

    lr: float = 2e-4
    clip_low: float = 0.5
    """The ratio counts down to 1 - this. Wider than the usual 0.2, as ``clip_high`` is: answers are up to one version
    old, and a tight clip would leave many of their tokens without a gradient."""
    clip_high: float = 1.0
    """The ratio counts up to 1 + this."""
    max_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One training step."""

    loss: float
    grad_norm: float
    num_tokens: int
    mismatch_kl: float
    """Mean over tokens of ``r - 1 - log r``, r = trainer / fleet probability under the weights before the step: a
    non-negative estimate of KL(fleet || trainer). It holds the staleness of the tokens as well."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """A group's rewards, centred and scaled by their deviation; all 0 where every answer earned the same."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in rewards) / max(len(rewards) - 1, 1))
    return [(value - mean) / (deviation + 1e-3) for value in rewards]


def clipped_loss(new: torch.Tensor, batch: Batch, config: GrpoConfig) -> torch.Tensor:
    """The clipped policy-gradient loss, a scalar: the mean over the batch's tokens.

    Args:
        new: float32 [N], log-probabilities under the weights in training.
        batch: N tokens with their behaviour log-probabilities and advantages.
        config: The clip range.
    """
    ratio = (new - batch.behaviour).clamp(-5.0, 5.0).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()


class Policy:
    """The model in training. Not safe to share between threads.

    Args:
        folder: A Hugging Face folder; its weights are the first policy.
        config: Optimiser settings.
    """

    def __init__(self, folder: Path, config: GrpoConfig) -> None:
        self._config = config
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).train()
        self._live: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        self._stored = stored_views(self._model, FolderSource(folder).specs())
        self._masters = {name: value.detach().float() for name, value in self._live.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()), lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True
        )

    def state(self) -> dict[str, torch.Tensor]:
        """The weights that the forward pass runs on, bf16, by the folder's names: what to publish. Views, valid until
        the next update.
        """
        return dict(self._stored)

    def update(self, groups: Sequence[Sequence[Sample]], rewards: Sequence[Sequence[float]]) -> UpdateReport:
        """Take one step on groups of answers. Groups whose answers all earned the same are skipped."""
        scored = [(group, advantages(earned)) for group, earned in zip(groups, rewards, strict=True)]
        useful = [(group, values) for group, values in scored if any(values)]
        if not useful:
            return UpdateReport(loss=0.0, grad_norm=0.0, num_tokens=0, mismatch_kl=0.0)
        batch = pack([group for group, _ in useful], [values for _, values in useful])
        new = self.logprobs(batch)
        loss = clipped_loss(new, batch, self._config)
        loss.backward()
        norm = self._step()
        log_ratio = new.detach() - batch.behaviour
        return UpdateReport(
            loss=float(loss.detach()),
            grad_norm=norm,
            num_tokens=batch.num_tokens,
            mismatch_kl=float((log_ratio.exp() - 1.0 - log_ratio).mean()),
        )

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """float32 [N]: log-probabilities of the batch's tokens under the current weights, at temperature 1."""
        with replaying(self._model, batch.routes):
            hidden = self._model.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=False,
            ).last_hidden_state
        logits = self._model.lm_head(hidden[batch.rows, batch.columns]).float()
        return kept_logprobs(logits, batch.targets, batch.support)

    def _step(self) -> float:
        for name, master in self._masters.items():
            grad = self._live[name].grad
            master.grad = None if grad is None else grad.float()
            self._live[name].grad = None
        norm = torch.nn.utils.clip_grad_norm_(list(self._masters.values()), self._config.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._live[name].copy_(master)
        return float(norm)
