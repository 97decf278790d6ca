"""The demo's trainer process: the GRPO recipe, wired to the gateway and the bucket, telling its parent what happens."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from slackwater.api.auth import Keys
from slackwater.bucket.open import open_bucket
from slackwater.cli.demo.events import Event, Phase, PublishedEvent, StepEvent, encode
from slackwater.clock import SystemClock
from slackwater.ids import RunId
from slackwater.publish.publisher import Published, Publisher
from slackwater.trainer.client import RolloutClient
from slackwater.trainer.recipes import digits
from slackwater.trainer.recipes.grpo import GrpoConfig, Policy
from slackwater.trainer.recipes.loop import Loop, LoopConfig, StepReport, Task
from slackwater.trainer.recipes.smollm2 import ensure_model
from slackwater.trainer.record import AnswerRecord, encode_record

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
    """Made from the package's model file where it is absent."""
    record: Path
    """Answers are appended there, one JSON object a line."""
    steps: int
    seed: int
    threads: int


def tell(event: Event) -> None:
    """Write one event to the parent."""
    sys.stdout.write(encode(event) + "\n")
    sys.stdout.flush()


async def run_trainer(settings: TrainSettings, keys: Keys) -> None:
    """Train, from the model's folder to the last publication."""
    torch.set_num_threads(settings.threads)
    tell(Phase(name="model"))
    folder = ensure_model(settings.model_folder)
    tell(Phase(name="ready"))
    policy = Policy(folder, GrpoConfig())
    publisher = Publisher.open(open_bucket(settings.bucket, create=True), settings.run, threads=settings.threads)
    with publisher, settings.record.open("w", encoding="utf-8") as record:
        async with RolloutClient(settings.gateway, keys.inference, model=MODEL_NAME) as client:
            loop = Loop(
                config=LoopConfig(steps=settings.steps, seed=settings.seed),
                task=Task(draw=digits.draw, reward=digits.reward),
                policy=policy,
                publisher=publisher,
                client=client,
                folder=folder,
                clock=SystemClock(),
                on_publish=lambda published: tell(_published(published)),
                on_step=lambda report: _on_step(report, record),
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


def _on_step(report: StepReport, record: TextIO) -> None:
    record.writelines(encode_record(line) + "\n" for line in _records(report))
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


def _records(report: StepReport) -> list[AnswerRecord]:
    return [
        AnswerRecord(
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
        )
        for group, rewards in zip(report.groups, report.rewards, strict=True)
        for sample, reward in zip(group, rewards, strict=True)
    ]
