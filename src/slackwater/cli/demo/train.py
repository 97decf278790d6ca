"""The demo's trainer process: the GRPO recipe, wired to the gateway and the bucket, telling its parent what happens."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from slackwater.api.auth import Keys
from slackwater.bucket.open import open_bucket
from slackwater.cli.demo.events import Event, Phase, PublishedEvent, StepEvent, encode
from slackwater.cli.demo.recipes import Recipe, digits_recipe, toy_recipe
from slackwater.clock import SystemClock
from slackwater.ids import RunId
from slackwater.publish.publisher import Published, Publisher
from slackwater.trainer.client import RolloutClient
from slackwater.trainer.recipes.grpo import Policy
from slackwater.trainer.recipes.loop import Loop, StepReport
from slackwater.trainer.record import AnswerRecord, encode_record
from slackwater.trainer.samples import Sample

MODEL_NAME = "policy"
"""The name under which the demo's fleet serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings of the trainer process."""

    bucket: str
    run: RunId
    gateway: str
    """Base URL."""
    model_folder: Path
    """Made where it is absent."""
    record: Path
    """Answers are appended there, one JSON object a line."""
    steps: int
    seed: int
    threads: int
    toy: bool

    @property
    def recipe(self) -> Recipe:
        """What to train."""
        return (toy_recipe if self.toy else digits_recipe)(self.steps, self.seed)


def tell(event: Event) -> None:
    """Write one event to the parent."""
    sys.stdout.write(encode(event) + "\n")
    sys.stdout.flush()


async def run_trainer(settings: TrainSettings, keys: Keys) -> None:
    """Train, from the model's folder to the last publication."""
    torch.set_num_threads(settings.threads)
    recipe = settings.recipe
    tell(Phase(name="model"))
    folder = recipe.make_model(settings.model_folder)
    tell(Phase(name="ready"))
    policy = Policy(folder, recipe.grpo)
    publisher = Publisher.open(open_bucket(settings.bucket, create=True), settings.run, threads=settings.threads)
    with publisher, settings.record.open("w", encoding="utf-8") as record:
        async with RolloutClient(settings.gateway, keys.inference, model=MODEL_NAME) as client:
            loop = Loop(
                config=recipe.loop,
                task=recipe.task,
                policy=policy,
                publisher=publisher,
                client=client,
                folder=folder,
                clock=SystemClock(),
                on_publish=lambda published: tell(_published(published)),
                on_step=lambda report: _on_step(report, record, top_p=recipe.loop.sampling.top_p or 1.0),
            )
            tell(Phase(name="training"))
            await loop.run()
    tell(Phase(name="done"))


def _published(item: Published) -> PublishedEvent:
    return PublishedEvent(
        version=item.version,
        kind=item.kind,
        state=item.state,
        changed=item.changed,
        total=item.total,
        uploaded_bytes=item.uploaded_bytes,
        full_bytes=item.full_bytes,
    )


def _on_step(report: StepReport, record: TextIO, *, top_p: float) -> None:
    record.writelines(encode_record(line) + "\n" for line in _records(report, top_p))
    record.flush()
    tell(
        StepEvent(
            step=report.step,
            reward=report.mean_reward,
            mismatch_kl=report.update.mismatch_kl,
            num_tokens=report.update.num_tokens,
            rollout_s=report.rollout_s,
            update_s=report.update_s,
            publish_s=report.publish_s,
            example=report.groups[0][0].text,
        )
    )


def _records(report: StepReport, top_p: float) -> list[AnswerRecord]:
    return [
        _record(sample, reward, top_p)
        for group, rewards in zip(report.groups, report.rewards, strict=True)
        for sample, reward in zip(group, rewards, strict=True)
    ]


def _record(sample: Sample, reward: float, top_p: float) -> AnswerRecord:
    mask, routes = sample.sampling_mask, sample.routes
    supports = [] if mask is None else [mask.row(token) for token in range(len(sample.token_ids))]
    return AnswerRecord(
        prompt_ids=list(sample.prompt_ids),
        token_ids=list(sample.token_ids),
        logprobs=[float(value) for value in sample.logprobs],
        policy=[(span.version, span.start, span.end) for span in sample.policy],
        replica=sample.replica,
        finish=sample.finish,
        reward=reward,
        text=sample.text,
        kv=[(span.version, span.start, span.end) for span in sample.kv],
        prompt_version=sample.prompt_version,
        replicas=[(span.replica, span.boot, span.start, span.end) for span in sample.replicas],
        top_p=top_p,
        raw_logprobs=[] if sample.raw_logprobs is None else [float(value) for value in sample.raw_logprobs],
        masks=[[] if ids is None else ids.tolist() for ids in supports],
        routes=[] if routes is None else [row.tobytes() for row in routes.experts],
    )
