"""The training loop: roll out, update, publish; the fleet follows the bucket's head by itself.

The answers of step k + 1 are asked for in the moment in which version k + 1 is committed. The fleet still prepares it,
so they begin under version k and cross the swap: nobody waits for anybody. Who awaits whom, per step::

    answers(k) -> update(k) -> publish version k + 1 -> ask answers(k + 1) -> ...
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slackwater.clock import Clock
from slackwater.ids import Version
from slackwater.publish.publisher import Published, Publisher
from slackwater.rollout.request import PolicyConstraint
from slackwater.trainer.client import RolloutClient, RolloutSampling
from slackwater.trainer.recipes.grpo import Policy, UpdateReport
from slackwater.trainer.samples import Sample
from slackwater.weights.state_dict import StateDictSource

Messages = list[dict[str, str]]
Prompt = Messages | tuple[int, ...]
"""A conversation, or token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Shape of the run."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    sampling: RolloutSampling
    """Of every answer, but for its seed. The temperature is 1: the trainer knows no other."""
    seed: int = 0
    """Of prompts and of sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is to be learned."""

    draw: Callable[[random.Random, int], Sequence[Prompt]]
    """Prompts of one step."""
    reward: Callable[[Sample], float]
    """Of one answer, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step, as the watcher of the run sees it."""

    step: int
    groups: tuple[tuple[Sample, ...], ...]
    rewards: tuple[tuple[float, ...], ...]
    update: UpdateReport
    published: Published
    rollout_s: float
    """Waiting for answers after the last publication."""
    update_s: float
    publish_s: float

    @property
    def mean_reward(self) -> float:
        """Mean over all answers of the step."""
        earned = [value for group in self.rewards for value in group]
        return sum(earned) / len(earned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A run: its parts are made by the caller, who also closes them."""

    config: LoopConfig
    task: Task
    policy: Policy
    publisher: Publisher
    client: RolloutClient
    folder: Path
    """The model's folder: its config and tokenizer go into the anchor untouched."""
    clock: Clock
    on_publish: Callable[[Published], None]
    """Called after each commit, the anchor's included."""
    on_step: Callable[[StepReport], None]

    async def run(self) -> None:
        """Publish the start as an anchor, then train for `LoopConfig.steps` steps.

        Raises:
            SlackwaterError: A publication or the fleet failed for good.
        """
        start = await self._publish(step=0)
        answers = asyncio.create_task(self._roll_out(0, start.version))
        try:
            for step in range(self.config.steps):
                answers = await self._step(step, answers)
        finally:
            answers.cancel()

    async def _step(self, step: int, answers: "asyncio.Task[list[list[Sample]]]") -> "asyncio.Task[list[list[Sample]]]":
        began = self.clock.monotonic()
        groups = await answers
        rolled = self.clock.monotonic()
        rewards = [[self.task.reward(sample) for sample in group] for group in groups]
        update = await asyncio.to_thread(self.policy.update, groups, rewards)
        updated = self.clock.monotonic()
        published = await self._publish(step=step + 1)
        last = step + 1 == self.config.steps
        following = asyncio.create_task(_nothing() if last else self._roll_out(step + 1, Version(step)))
        self.on_step(
            StepReport(
                step=step,
                groups=tuple(map(tuple, groups)),
                rewards=tuple(map(tuple, rewards)),
                update=update,
                published=published,
                rollout_s=rolled - began,
                update_s=updated - rolled,
                publish_s=self.clock.monotonic() - updated,
            )
        )
        return following

    async def _publish(self, *, step: int) -> Published:
        published = await asyncio.to_thread(
            partial(self.publisher.publish, StateDictSource(self.policy.state()), step=step, folder_files=self.folder)
        )
        self.on_publish(published)
        return published

    async def _roll_out(self, step: int, at_least: Version) -> list[list[Sample]]:
        config = self.config
        prompts = self.task.draw(random.Random(f"{config.seed}/{step}"), config.prompts_per_step)  # noqa: S311
        return await asyncio.gather(
            *(self._group(prompt, step, index, at_least) for index, prompt in enumerate(prompts))
        )

    async def _group(self, prompt: Prompt, step: int, index: int, at_least: Version) -> list[Sample]:
        count = self.config.samples_per_prompt
        seed = (self.config.seed * 1_000_003 + step * 1_009 + index) * 64
        sampling = replace(self.config.sampling, seed=seed)
        policy = PolicyConstraint(min_version=at_least)
        if isinstance(prompt, tuple):
            return await self.client.complete(prompt, n=count, sampling=sampling, policy=policy)
        return await self.client.chat(prompt, n=count, sampling=sampling, policy=policy)


async def _nothing() -> list[list[Sample]]:
    return []
