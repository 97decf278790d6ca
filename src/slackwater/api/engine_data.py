"""``engine_data``: what an answer proves of itself, exact, for trainers."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeVar

import msgspec

from slackwater.api.arrays import Array, array, packed
from slackwater.api.routed import NOT_ROUTED, Routed, RoutedExperts
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import MASK_ID_BYTES, Completion, Finish, PolicySpan, ReplicaSpan, kv_spans
from slackwater.rollout.request import SamplingSpec

_ABSENT_ID: Final = -1
"""Fills rows of ``top`` whose distribution has fewer tokens than were asked for."""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One log-probability per completion token."""

    kind: Literal["processed", "raw"] = "processed"
    """Of the distribution that the token was drawn from, after all that the request asks for, or of the model's own
    logits. `slackwater.rollout.request.SamplingSpec` defines both."""
    values: Array
    """float32 of shape [tokens], natural log."""


class Masks(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that each draw was made from, as the sampler had them, in compressed rows."""

    indptr: Array
    """int64 of shape [tokens + 1]: row ``i`` is ``indices[indptr[i]:indptr[i + 1]]``."""
    indices: Array
    """int32: token ids, rising within a row. A row without ids had too many: see the status."""


class Top(msgspec.Struct, frozen=True, kw_only=True):
    """The most probable tokens per position, falling; of shape [tokens, k]."""

    ids: Array
    """int32; -1 where the distribution has no further token."""
    logprobs: Array
    """float32; minus infinity there."""


class EngineData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice's evidence. All token-wise fields cover exactly the sampled tokens."""

    run: RunId
    """The lineage that the versions count in."""
    replica: ReplicaId
    """Who began; ``replicas`` tells who went on."""
    boot_id: BootId
    policy: tuple[tuple[Version, int, int], ...]
    """[version, start, end) over the completion's tokens."""
    prompt_version: Version | None
    """The version that built the prompt's KV; None where it isn't known, or where several did."""
    token_ids: Array
    logprobs: Logprobs
    seed: int
    cached_tokens: int
    finish: Finish
    status: dict[str, str]
    """What each evidence field is worth: ok, provisional, unsupported, not_requested, partial. Readers expect more."""
    kv: tuple[tuple[Version, int, int], ...] | None = None
    """[version, start, end) over positions of prompt and completion, but for the last: which version built the KV that
    the answer ended with. Absent from servers that don't tell it."""
    replicas: tuple[tuple[ReplicaId, BootId, int, int], ...] | None = None
    """[replica, boot_id, start, end) over the completion's tokens: one entry where one replica sampled all of them.
    Absent from servers that don't tell it."""
    top: Top | None = None
    """Absent unless alternatives were asked for."""
    raw_logprobs: Logprobs | None = None
    """Absent unless asked for."""
    raw_top: Top | None = None
    """As ``top``, of the raw logits; absent unless alternatives and ``raw_logprobs`` were asked for."""
    sampling_mask: Masks | None = None
    """Absent unless asked for."""
    routed_experts: RoutedExperts | None = None
    """Absent unless asked for, and in streams, whose chunks have them."""
    reasons: dict[str, str] | None = None
    """Why a status is what it is, for people, where that isn't plain."""


PARTIAL: Final = "partial"
"""Status of ``sampling_mask`` where a support had more than `MAX_MASK_IDS` tokens: its row has no ids."""
_NOTHING: Final = SamplingSpec(max_tokens=1)
_Value = TypeVar("_Value")
PROVISIONAL: Final = "provisional"
"""Status of ``policy`` where the bits of some token's version had not been compared with its manifest yet."""


def engine_data(
    completion: Completion,
    top_logprobs: int,
    *,
    prompt_tokens: int,
    sampling: SamplingSpec | None = None,
    routed: Routed = NOT_ROUTED,
) -> EngineData:
    """Describe a whole answer.

    Args:
        completion: The answer.
        top_logprobs: How many alternatives were asked for.
        prompt_tokens: Length of the prompt.
        sampling: What else was asked for; None: nothing.
        routed: What is told of its routes.
    """
    origin, asked = completion.origin, sampling or _NOTHING
    raws = _known(step.raw_logprob for step in completion.steps) if asked.raw_logprobs else None
    raw_width = top_logprobs if asked.raw_logprobs else 0
    raw_tops = _known(
        (step.raw_top_ids, step.raw_top_logprobs) if step.raw_top_ids else None for step in completion.steps
    )
    tops = [(step.top_ids, step.top_logprobs) for step in completion.steps]
    masks = _known(step.mask for step in completion.steps) if asked.sampling_mask else None
    return EngineData(
        run=origin.run,
        replica=origin.replica,
        boot_id=origin.boot,
        policy=_plain(completion.policy),
        kv=_plain(kv_spans(prompt_tokens, completion.steps)),
        replicas=_named(completion.replicas),
        prompt_version=origin.prompt_version,
        token_ids=array("int32", completion.token_ids),
        logprobs=Logprobs(values=array("float32", completion.logprobs)),
        top=_top(tops, top_logprobs) if top_logprobs else None,
        raw_logprobs=Logprobs(kind="raw", values=array("float32", raws)) if raws is not None else None,
        raw_top=_top(raw_tops, raw_width) if raw_width and raw_tops is not None else None,
        sampling_mask=_masks(masks) if masks is not None else None,
        routed_experts=routed.told,
        reasons={"routed_experts": routed.reason} if routed.reason else None,
        seed=origin.seed,
        cached_tokens=origin.cached_tokens,
        finish=completion.finish,
        status={
            "policy": PROVISIONAL if any(step.provisional for step in completion.steps) else "ok",
            "kv": "ok",
            "token_ids": "ok",
            "logprobs": "ok",
            "top": "ok" if top_logprobs else "not_requested",
            "routed_experts": routed.status,
            "raw_logprobs": _told(raws, asked=asked.raw_logprobs),
            "raw_top": _told(raw_tops, asked=raw_width > 0),
            "sampling_mask": PARTIAL if b"" in (masks or ()) else _told(masks, asked=asked.sampling_mask),
        },
    )


def _known(values: Iterable[_Value | None]) -> tuple[_Value, ...] | None:
    """What every token tells; None where some don't: not all engines and replicas do."""
    every = tuple(values)
    found = tuple(value for value in every if value is not None)
    return found if len(found) == len(every) else None


def _told(found: object, *, asked: bool) -> str:
    if not asked:
        return "not_requested"
    return "unsupported" if found is None else "ok"


def _masks(masks: Sequence[bytes]) -> Masks:
    ends = accumulate((len(mask) // MASK_ID_BYTES for mask in masks), initial=0)
    indices = b"".join(masks)
    return Masks(indptr=array("int64", tuple(ends)), indices=packed("int32", indices, (len(indices) // MASK_ID_BYTES,)))


def _plain(spans: Sequence[PolicySpan]) -> tuple[tuple[Version, int, int], ...]:
    return tuple((span.version, span.start, span.end) for span in spans)


def _named(spans: Sequence[ReplicaSpan]) -> tuple[tuple[ReplicaId, BootId, int, int], ...]:
    return tuple((span.replica, span.boot, span.start, span.end) for span in spans)


def _top(tops: Sequence[tuple[Sequence[int], Sequence[float]]], width: int) -> Top:
    ids: list[int] = []
    logprobs: list[float] = []
    for some, logs in tops:
        missing = width - len(some)
        ids += [*some, *[_ABSENT_ID] * missing][:width]
        logprobs += [*logs, *[-math.inf] * missing][:width]
    shape = (len(tops), width)
    return Top(ids=array("int32", ids, shape), logprobs=array("float32", logprobs, shape))
