"""What the demo claims, from what it saw: pure functions over its record."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.cli.demo.events import PublishedEvent, StepEvent
from slackwater.cli.demo.evidence import evidence_claims, evidence_failures
from slackwater.errors import InternalError
from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import AnswerRecord

MIN_SHIFTED_CAUGHT = 0.9
"""Below this share the label check is powerless, and the demo fails."""
_ENDED_WELL = ("stop", "length")


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapRecord:
    """One swap of one replica."""

    replica: str
    version: int
    prepare_s: float
    pause_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Everything that a run showed."""

    steps: tuple[StepEvent, ...]
    published: tuple[PublishedEvent, ...]
    swaps: tuple[SwapRecord, ...]
    answers: tuple[AnswerRecord, ...]
    labels: LabelCheck
    byte_exact: bool
    restarts: int
    """Replica processes that ended and were started again."""
    wall_s: float
    evidence: bool = False
    """The trainer asked for masks and routes."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values don't exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def reward_gain(rewards: Sequence[float]) -> float:
    """Mean of the last fifth of steps minus mean of the first fifth; a fifth is at least one step."""
    if not rewards:
        raise InternalError("the demo made no step")
    fifth = max(1, len(rewards) // 5)
    return sum(rewards[-fifth:]) / fifth - sum(rewards[:fifth]) / fifth


def delta_ratio(published: Sequence[PublishedEvent]) -> float:
    """Bytes of the whole model over bytes of a delta, for the median delta; 0 where there is none."""
    ratios = [item.full_bytes / max(item.uploaded_bytes, 1) for item in published if item.kind == "delta"]
    return percentile(ratios, 0.5) if ratios else 0.0


def claims(record: Record) -> dict[str, float]:
    """The demo's figures by name, in the order in which they are printed."""
    versions = {version for answer in record.answers for version, _, _ in answer.policy}
    pauses = [swap.pause_s * 1e3 for swap in record.swaps]
    kls = [step.mismatch_kl for step in record.steps if step.num_tokens]
    evidence = evidence_claims(record.answers, record.labels) if record.evidence else {}
    return {
        "reward_gain": reward_gain([step.reward for step in record.steps]),
        "versions_served": len(versions),
        "mislabelled_tokens": record.labels.mislabelled,
        "shifted_labels_caught": record.labels.shifted_caught / max(record.labels.shifted, 1),
        "aborted_requests": sum(answer.finish not in _ENDED_WELL for answer in record.answers),
        "byte_exact": int(record.byte_exact),
        "pause_ms_p50": percentile(pauses, 0.5),
        "pause_ms_p99": percentile(pauses, 0.99),
        "delta_ratio": delta_ratio(record.published),
        "mismatch_kl": sum(kls) / max(len(kls), 1),
        "wall_s": record.wall_s,
        "tokens_checked": record.labels.tokens,
        "tolerance_nats": record.labels.tolerance,
        "largest_difference_nats": record.labels.largest_difference,
        "answers_across_a_swap": sum(len(answer.policy) > 1 for answer in record.answers),
        "answers_unchecked": record.labels.unchecked,
        "replica_restarts": record.restarts,
        **evidence,
    }


def failures(figures: dict[str, float]) -> list[str]:
    """The claims that a run of any length must meet and this one did not, each as a sentence."""
    checks = (
        (figures["mislabelled_tokens"] == 0, "tokens carry a policy version that did not make them"),
        (
            figures["shifted_labels_caught"] >= MIN_SHIFTED_CAUGHT,
            "the label check does not catch shifted labels",
        ),
        (figures["answers_unchecked"] == 0, "labels of answers were not checked"),
        (figures["aborted_requests"] == 0, "requests were aborted"),
        (figures["byte_exact"] == 1, "a replica's weights differ from the trainer's last published state"),
    )
    evidence = evidence_failures(figures) if "routes_rows_missing" in figures else []
    return [sentence for holds, sentence in checks if not holds] + evidence
