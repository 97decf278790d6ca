"""`slackwater replay`: re-score a run's answers under the policy versions that they claim.

Walks the run's chain once, from its first version to its head. At each version it forces the tokens that claim it,
with the KV cache as it was built: an answer that crossed a swap stays in its slot while the weights change under it.
Answers whose KV was computed again in a swap have a walk of their own, which does the same. On
the way the same is done with every label shifted by one version, to see whether false labels would be caught; there the
first tokens of an answer decide, so an answer that only later ones would give away counts as not caught. Answers that
another replica went on with are counted as unchecked.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from slackwater.checkpoint.state import StateTable
from slackwater.cli.trust import open_trusted
from slackwater.config.in_flight import InFlight
from slackwater.delivery.fetcher import Fetcher
from slackwater.engine.torch.replay import Replayer
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version
from slackwater.replica.prepare import prepare_anchor, prepare_delta
from slackwater.replica.race import Stop
from slackwater.rollout.evidence import PolicySpan, pack_mask
from slackwater.rollout.request import SamplingSpec
from slackwater.trainer.align import (
    LabelCheck,
    LabelledAnswer,
    LeftOut,
    compared,
    replayed_as,
    shifted,
    tolerance,
    touching,
)
from slackwater.trainer.record import AnswerRecord, decode_record

_PROBE_TOKENS = 4
"""First tokens of a falsely labelled answer that are re-scored."""
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
    trust: Sequence[Path] = ()
    """Files of the public keys whose versions are taken; none takes all."""


def run_replay(settings: ReplaySettings) -> None:
    """Check the labels and print the verdict, one JSON object.

    Raises:
        NotFoundError: No record, or no answer of that replica in it.
        CorruptError: The record or the run's chain is damaged.
    """
    answers = read_answers(settings)
    cache = settings.cache or user_cache_path("slackwater") / "replay"
    fetcher = Fetcher(open_trusted(settings.bucket, settings.trust), settings.run, cache / settings.run)
    head = fetcher.head(None)
    if head is None:
        raise NotFoundError(f"the run {settings.run} has no version", hint="check --bucket and --run")
    by_replica = {name: [answer for answer in answers if answer.replica == name] for name in _names(answers)}
    verdicts = [_check(fetcher, settings, mine, head) for mine in by_replica.values()]
    sys.stdout.write(msgspec.json.encode(reduce(LabelCheck.plus, verdicts)).decode() + "\n")


def _names(answers: Sequence[LabelledAnswer]) -> list[str]:
    return sorted({answer.replica for answer in answers})


def _check(fetcher: Fetcher, settings: ReplaySettings, answers: Sequence[LabelledAnswer], head: Version) -> LabelCheck:
    """Check one replica's answers: as many as it had slots were under way at once, so the replay's slots suffice."""
    sorted_ = {answer.key: replayed_as(answer) for answer in answers}
    limit = tolerance(_noise(_open(fetcher, settings), answers))
    verdict = _left_out(Counter(reason for reason in sorted_.values() if isinstance(reason, LeftOut)), limit)
    for in_flight in (InFlight.CONTINUE, InFlight.RECOMPUTE):
        mine = [answer for answer in answers if sorted_[answer.key] is in_flight]
        if mine:
            walk = Walk(_open(fetcher, settings), fetcher, limit, in_flight=in_flight)
            walk.over(mine, head)
            verdict = verdict.plus(walk.verdict())
    return verdict


def _left_out(reasons: Counter[LeftOut], limit: float) -> LabelCheck:
    """The verdict on answers that no walk takes."""
    for reason, count in reasons.items():
        _log.warning("%d answers are left out: %s", count, reason.value)
    return LabelCheck(
        tokens=0,
        mislabelled=0,
        largest_difference=0.0,
        tolerance=limit,
        unchecked=reasons.total(),
        unchecked_because={str(reason): count for reason, count in reasons.items()},
    )


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
        _labelled(number, item) for number, item in found if item.token_ids and settings.replica in (None, item.replica)
    ]
    if not answers:
        raise NotFoundError(f"{settings.record} holds no answer of {settings.replica or 'any replica'}")
    return answers


def _labelled(number: int, item: AnswerRecord) -> LabelledAnswer:
    return LabelledAnswer(
        key=number,
        prompt_ids=tuple(item.prompt_ids),
        token_ids=tuple(item.token_ids),
        logprobs=tuple(item.logprobs),
        policy=_spans(item.policy),
        replica=item.replica,
        kv=_spans(item.kv),
        prompt_version=None if item.prompt_version is None else Version(item.prompt_version),
        moved=len(item.replicas) > 1,
        top_p=item.top_p,
        raw_logprobs=tuple(item.raw_logprobs),
        masks=tuple(map(pack_mask, item.masks)),
        routes=tuple(item.routes) if len(item.routes) == item.rows else (),
    )


def _spans(plain: Sequence[tuple[int, int, int]]) -> tuple[PolicySpan, ...]:
    return tuple(PolicySpan(version=Version(version), start=start, end=end) for version, start, end in plain)


class Walk:
    """One walk along the chain.

    Args:
        replayer: Freshly loaded with the chain's first version.
        fetcher: Where the deltas come from.
        limit: Nats; a larger difference is a wrong label.
        in_flight: What becomes of the answers in slots when the weights change.
    """

    def __init__(
        self, replayer: Replayer, fetcher: Fetcher, limit: float, *, in_flight: InFlight = InFlight.CONTINUE
    ) -> None:
        self._replayer = replayer
        self._fetcher = fetcher
        self._limit = limit
        self._in_flight = in_flight
        self._table = StateTable.of_anchor(fetcher.manifest(Version(replayer.version)))
        self._resident: set[int] = set()
        self._found = LabelCheck(tokens=0, mislabelled=0, largest_difference=0.0, tolerance=limit)
        self._shifted = self._caught = 0

    def over(self, answers: Sequence[LabelledAnswer], head: Version) -> None:
        """Score ``answers`` from the first version to ``head``."""
        claimed = max((answer.policy[-1].version for answer in answers), default=head)
        if claimed > head:
            raise CorruptError(f"an answer claims version {claimed}, but the newest is {head}")
        self._found = replace(self._found, answers=self._found.answers + len(answers))
        states = [self._fetcher.manifest(Version(number)).state for number in range(head + 1)]
        false = [twin for answer in answers if (twin := shifted(answer, states))]
        self._shifted += len(false)
        for number in range(self._replayer.version, head + 1):
            version = Version(number)
            if version != self._replayer.version:
                self._advance(version)
            self._at(version, touching(answers, version), [a for a in false if a.policy[0].version == version])
            tokens, wrong = self._found.tokens, self._found.mislabelled
            _log.info("version %d of %d: %d tokens, %d differ", version, head, tokens, wrong)

    def verdict(self) -> LabelCheck:
        """What the walk found."""
        return replace(self._found, shifted=self._shifted, shifted_caught=self._caught)

    def _advance(self, version: Version) -> None:
        manifest = self._fetcher.manifest(version)
        if manifest.kind == "anchor":
            held, self._table = self._table, StateTable.of_anchor(manifest)
            prepared = prepare_anchor(self._replayer, held, self._table, self._fetcher.anchor(manifest), 1, Stop())
        else:
            self._table = self._table.after(manifest)
            bodies = self._fetcher.bodies(manifest)
            prepared = prepare_delta(self._replayer, self._table.outline, manifest, bodies, 1, Stop())
        writes = () if prepared is None else prepared.writes
        self._replayer.commit(writes, version, in_flight=self._in_flight)

    def _at(self, version: Version, answers: Sequence[LabelledAnswer], false: Sequence[LabelledAnswer]) -> None:
        """Score what claims ``version``: answers in a slot first, so that slots are free for the others."""
        self._score(version, [answer for answer in answers if answer.key in self._resident])
        if len(self._resident) < self._replayer.slots:  # else those probes count as not caught
            for group in _groups(false, self._free()):
                self._probe(group)
        fresh = [answer for answer in answers if answer.policy[0].version == version]
        while fresh:
            batch, fresh = fresh[: self._free()], fresh[self._free() :]
            self._replayer.begin({str(answer.key): _start(answer) for answer in batch})
            self._resident |= {answer.key for answer in batch}
            self._score(version, batch)

    def _free(self) -> int:
        """Slots without an answer.

        Raises:
            InvalidInputError: There is none: more answers crossed a swap than the replay has slots.
        """
        free = self._replayer.slots - len(self._resident)
        if free < 1:
            raise InvalidInputError(
                "more answers crossed a swap than there are slots", hint="replay with the --slots that the replicas had"
            )
        return free

    def _score(self, version: Version, batch: Sequence[LabelledAnswer]) -> None:
        """Force the tokens that claim ``version``; answers that end in it leave their slots."""
        pieces = {answer.key: span for answer in batch if (span := answer.span_of(version))}
        tokens = {str(answer.key): answer.token_ids[_slice(pieces[answer.key])] for answer in batch}
        steps = self._replayer.force(tokens)
        for answer in batch:
            piece = compared(answer, pieces[answer.key], steps[str(answer.key)], self._limit)
            self._found = self._found.plus(piece)
            if answer.policy[-1].version == version:
                self._replayer.drop(str(answer.key))
                self._resident.discard(answer.key)

    def _probe(self, group: Sequence[LabelledAnswer]) -> None:
        """Count the falsely labelled answers that their first tokens give away."""
        self._replayer.begin({f"false {answer.key}": _start(answer) for answer in group})
        ends = {answer.key: min(answer.policy[0].end, _PROBE_TOKENS) for answer in group}
        found = self._replayer.force({f"false {a.key}": a.token_ids[: ends[a.key]] for a in group})
        for answer in group:
            first = replace(answer.policy[0], end=ends[answer.key])
            piece = compared(answer, first, found[f"false {answer.key}"], self._limit)
            self._caught += piece.mislabelled > 0
            self._replayer.drop(f"false {answer.key}")


def _start(answer: LabelledAnswer) -> tuple[tuple[int, ...], SamplingSpec]:
    sampling = SamplingSpec(
        max_tokens=len(answer.token_ids),
        top_p=answer.top_p,
        raw_logprobs=bool(answer.raw_logprobs),
        sampling_mask=bool(answer.masks),
    )
    return answer.prompt_ids, sampling


def _slice(span: PolicySpan) -> slice:
    return slice(span.start, span.end)


def _differences(reported: Sequence[float], recomputed: Sequence[float]) -> list[float]:
    return [abs(left - right) for left, right in zip(reported, recomputed, strict=True)]


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
    return max(gap for key in alone for gap in _differences(alone[key], together[key]))


def _groups(answers: Sequence[LabelledAnswer], size: int) -> Iterator[Sequence[LabelledAnswer]]:
    for start in range(0, len(answers), size):
        yield answers[start : start + size]


def _forced(replayer: Replayer, answers: Sequence[LabelledAnswer]) -> dict[int, list[float]]:
    # Of the whole softmax: under these weights a token may be none of those that could have been drawn.
    whole = {answer.key: SamplingSpec(max_tokens=len(answer.token_ids)) for answer in answers}
    replayer.begin({str(answer.key): (answer.prompt_ids, whole[answer.key]) for answer in answers})
    found = replayer.extend({str(answer.key): answer.token_ids for answer in answers})
    for answer in answers:
        replayer.drop(str(answer.key))
    return {answer.key: found[str(answer.key)] for answer in answers}
