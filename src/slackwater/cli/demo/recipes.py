"""What the demo trains: a real small language model, or a toy that needs no download."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slackwater.trainer.client import RolloutSampling
from slackwater.trainer.recipes import digits, toy
from slackwater.trainer.recipes.grpo import GrpoConfig
from slackwater.trainer.recipes.loop import LoopConfig, Task
from slackwater.trainer.recipes.smollm2 import ensure_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A model, what it is to learn, and how."""

    make_model: Callable[[Path], Path]
    """Makes its folder where it is absent."""
    task: Task
    grpo: GrpoConfig
    loop: LoopConfig


def digits_recipe(steps: int, seed: int) -> Recipe:
    """SmolLM2 learns to answer in digits."""
    return Recipe(
        make_model=ensure_model,
        task=Task(draw=digits.draw, reward=digits.reward),
        grpo=GrpoConfig(),
        loop=LoopConfig(
            steps=steps,
            prompts_per_step=4,
            samples_per_prompt=8,
            sampling=RolloutSampling(max_tokens=20, temperature=1.0),
            seed=seed,
        ),
    )


def toy_recipe(steps: int, seed: int) -> Recipe:
    """A random mixture of experts learns a class of tokens. Answers tell their masks and routes, and the trainer uses
    both.
    """
    return Recipe(
        make_model=lambda folder: toy.write_model(folder, seed),
        task=Task(draw=toy.draw, reward=toy.reward),
        grpo=GrpoConfig(lr=3e-3),
        loop=LoopConfig(
            steps=steps,
            prompts_per_step=8,
            samples_per_prompt=16,
            sampling=RolloutSampling(
                max_tokens=toy.ANSWER_TOKENS,
                temperature=1.0,
                top_p=0.9,
                raw_logprobs=True,
                sampling_mask=True,
                routes_from=0,
            ),
            seed=seed,
        ),
    )
