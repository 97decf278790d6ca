"""`slackwater replay`: re-score a run's answers under the policy versions that they claim.

Walks the run's chain once, from its first version to its head. At each version it forces the tokens that claim it,
with the KV cache as it was built: an answer that crossed a swap stays in its slot while the weights change under it. A
second walk does the same with every label shifted by one version, and counts the answers that are caught.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from slackwater.bucket.open import open_bucket
from slackwater.cli.demo.claims import LabelCheck
from slackwater.cli.demo.events import decode_record
from slackwater.delivery.fetcher import Fetcher
from slackwater.engine.torch.replay import Replayer
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version
from slackwater.replica.prepare import prepare_anchor, prepare_delta
from slackwater.replica.race import Stop
from slackwater.rollout.evidence import PolicySpan
from slackwater.rollout.request import SamplingSpec
from slackwater.trainer.align import LabelledAnswer, mislabelled, shifted, tolerance, touching

_PROBE_TOKENS = 4
"""Tokens re-scored at once where one that differs ends the matter."""
_CALIBRATION = 12
"""Answers that the calibration computes in two ways."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Settings of one replay. Slots, threads and window are those of the replicas: the arithmetic depends on them."""

    record: Path
    """One answer a line."""
    bucket: str
    run: RunId
    replica: str | None
    """None: every replica's answers."""
    slots: int
    threads: int
    window: int
    cache: Path | None


def run_replay(settings: ReplaySettings) -> None:
    """Check the labels and print the verdict, one JSON object.

    Raises:
        NotFoundError: No record, or no answer of that replica in it.
        CorruptError: The record or the run's chain is damaged.
    """
    answers = read_answers(settings)
    cache = settings.cache or user_cache_path("slackwater") / "replay"
    fetcher = Fetcher(open_bucket(settings.bucket), settings.run, cache / settings.run)
    head = fetcher.head(None)
    if head is None:
        raise NotFoundError(f"the run {settings.run} has no version", hint="check --bucket and --run")
    fresh = _open(fetcher, settings)
    limit = tolerance(_noise(fresh, answers))
    honest = Walk(fresh, fetcher, limit, patient=True)
    honest.over(answers, head)
    false = Walk(_open(fetcher, settings), fetcher, limit, patient=False)
    false.over([shifted(answer, head) for answer in answers], head)
    verdict = LabelCheck(
        tokens=honest.tokens,
        mislabelled=honest.wrong,
        largest_difference=honest.largest,
        tolerance=limit,
        answers=len(answers),
        shifted_caught=len(false.caught),
    )
    sys.stdout.write(msgspec.json.encode(verdict).decode() + "\n")


def read_answers(settings: ReplaySettings) -> list[LabelledAnswer]:
    """The record's answers, numbered by line."""
    try:
        lines = settings.record.read_bytes().splitlines()
    except OSError as error:
        raise NotFoundError(
            f"{settings.record} can't be read: {error.strerror}", hint="name a run's rollouts.jsonl"
        ) from error
    found = [(number, decode_record(line)) for number, line in enumerate(lines)]
    answers = [
        LabelledAnswer(
            key=number,
            prompt_ids=tuple(item.prompt_ids),
            token_ids=tuple(item.token_ids),
            logprobs=tuple(item.logprobs),
            policy=tuple(
                PolicySpan(version=Version(version), start=start, end=end) for version, start, end in item.policy
            ),
            replica=item.replica,
        )
        for number, item in found
        if item.token_ids and settings.replica in (None, item.replica)
    ]
    if not answers:
        raise NotFoundError(f"{settings.record} holds no answer of {settings.replica or 'any replica'}")
    return answers


class Walk:
    """One walk along the chain.

    Args:
        replayer: Freshly loaded with the chain's first version.
        fetcher: Where the deltas come from.
        limit: Nats; a larger difference is a wrong label.
        patient: Score every token; else stop an answer at its first wrong one.
    """

    def __init__(self, replayer: Replayer, fetcher: Fetcher, limit: float, *, patient: bool) -> None:
        self._replayer = replayer
        self._fetcher = fetcher
        self._limit = limit
        self._patient = patient
        self._stride = sys.maxsize if patient else _PROBE_TOKENS
        self._resident: set[int] = set()
        self.tokens = 0
        """Tokens scored."""
        self.wrong = 0
        """Of them, how many differ."""
        self.largest = 0.0
        """Nats."""
        self.caught: set[int] = set()
        """Keys of answers with a token that differs."""

    def over(self, answers: Sequence[LabelledAnswer], head: Version) -> None:
        """Score ``answers`` from the first version to ``head``."""
        last = max(answer.policy[-1].version for answer in answers)
        if last > head:
            raise CorruptError(f"an answer claims version {last}, but the newest is {head}")
        for number in range(self._replayer.version, last + 1):
            version = Version(number)
            if version != self._replayer.version:
                self._advance(version)
            self._at(version, touching(answers, version))
            _log.info("version %d of %d: %d tokens, %d differ", version, last, self.tokens, self.wrong)

    def _advance(self, version: Version) -> None:
        manifest = self._fetcher.manifest(version)
        if manifest.kind == "anchor":
            prepared = prepare_anchor(self._replayer, manifest, self._fetcher.anchor(manifest), 1, Stop())
        else:
            prepared = prepare_delta(self._replayer, manifest, self._fetcher.bodies(manifest), 1, Stop())
        self._replayer.commit(() if prepared is None else prepared.writes, version)

    def _at(self, version: Version, answers: Sequence[LabelledAnswer]) -> None:
        """Score what claims ``version``: the resident ones, then the others as slots are free."""
        waiting = [answer for answer in answers if answer.key not in self._resident]
        batch = [answer for answer in answers if answer.key in self._resident]
        while batch or waiting:
            self._score(version, batch)
            free = self._replayer.slots - len(self._resident)
            batch, waiting = waiting[:free], waiting[free:]
            if waiting and not batch:
                raise InvalidInputError(
                    f"more answers cross version {version} than there are slots",
                    hint="replay with the replicas' --slots",
                )
            self._begin(batch)

    def _begin(self, batch: Sequence[LabelledAnswer]) -> None:
        fresh = [answer for answer in batch if self._patient or answer.key not in self.caught]
        self._replayer.begin({str(a.key): (a.prompt_ids, SamplingSpec(max_tokens=len(a.token_ids))) for a in fresh})
        self._resident |= {answer.key for answer in fresh}

    def _score(self, version: Version, batch: Sequence[LabelledAnswer]) -> None:
        spans = {answer.key: answer.span_of(version) for answer in batch if answer.key in self._resident}
        answers = {answer.key: answer for answer in batch}
        open_spans = {key: span for key, span in spans.items() if span is not None}
        done = 0
        while open_spans:
            pieces = {
                key: slice(span.start + done, min(span.end, span.start + done + self._stride))
                for key, span in open_spans.items()
            }
            found = self._replayer.extend({str(key): answers[key].token_ids[at] for key, at in pieces.items()})
            for key, at in pieces.items():
                self._compare(answers[key], at, found[str(key)])
            done += self._stride
            open_spans = {
                key: span
                for key, span in open_spans.items()
                if span.start + done < span.end and (self._patient or key not in self.caught)
            }
        for answer in batch:
            if answer.policy[-1].version == version or (not self._patient and answer.key in self.caught):
                self._replayer.drop(str(answer.key))
                self._resident.discard(answer.key)

    def _compare(self, answer: LabelledAnswer, at: slice, found: Sequence[float]) -> None:
        reported = answer.logprobs[at]
        wrong = mislabelled(reported, found, self._limit)
        self.tokens += len(found)
        self.wrong += wrong
        self.largest = max([self.largest, *(abs(left - right) for left, right in zip(reported, found, strict=True))])
        if wrong:
            self.caught.add(answer.key)


def _open(fetcher: Fetcher, settings: ReplaySettings) -> Replayer:
    first = Version(0)
    folder = fetcher.anchor(fetcher.manifest(first))
    return Replayer(folder, version=first, threads=settings.threads, slots=settings.slots, window=settings.window)


def _noise(replayer: Replayer, answers: Sequence[LabelledAnswer]) -> float:
    """Largest difference, in nats, between the same tokens scored alone and among others, on fresh weights."""
    chosen = answers[:_CALIBRATION]
    together: dict[int, list[float]] = {}
    for group in _groups(chosen, replayer.slots):
        together |= _forced(replayer, group)
    alone: dict[int, list[float]] = {}
    for answer in chosen[:: max(1, len(chosen) // 4)]:
        alone |= _forced(replayer, [answer])
    return max(
        (abs(left - right) for key in alone for left, right in zip(alone[key], together[key], strict=True)),
        default=0.0,
    )


def _groups(answers: Sequence[LabelledAnswer], size: int) -> Iterator[Sequence[LabelledAnswer]]:
    for start in range(0, len(answers), size):
        yield answers[start : start + size]


def _forced(replayer: Replayer, answers: Sequence[LabelledAnswer]) -> dict[int, list[float]]:
    replayer.begin({str(a.key): (a.prompt_ids, SamplingSpec(max_tokens=len(a.token_ids))) for a in answers})
    found = replayer.extend({str(answer.key): answer.token_ids for answer in answers})
    for answer in answers:
        replayer.drop(str(answer.key))
    return {answer.key: found[str(answer.key)] for answer in answers}
