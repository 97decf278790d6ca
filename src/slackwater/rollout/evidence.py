"""What an answer proves of itself: tokens with their log-probabilities, policy versions, replica and end."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from slackwater.errors import InternalError
from slackwater.ids import BootId, ReplicaId, RunId, Version

MAX_MASK_IDS: Final = 8192
"""Most tokens of a support that is told."""
MASK_ID_BYTES: Final = 4


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop token or stop string, or the end of the forced tokens."""
    LENGTH = "length"
    """``max_tokens`` or the context window."""
    ABORT = "abort"
    """The caller or an operator ended it; the tokens so far stand."""
    SWAPPED = "swapped"
    """The replica exchanged its weights in a mode that ends answers under way; the tokens so far stand."""
    POLICY_CHANGED = "policy_changed"
    """``exact_version`` was asked for and the replica moved on; the tokens so far stand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpan:
    """Tokens or rows of KV ``[start, end)`` were made by ``version``."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpan:
    """Tokens ``[start, end)`` were sampled by one start of one replica."""

    replica: ReplicaId
    boot: BootId
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Who answered; where others took over, who began."""

    replica: ReplicaId
    boot: BootId
    run: RunId
    """The lineage that the versions count in."""
    seed: int
    """The seed that the draws used: the request's, or the one the replica picked."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused: of the version that samples the first token, or of any where the request
    takes it."""
    prompt_version: Version | None = None
    """The version that built the prompt's KV; None where it isn't known yet, or where several did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStep:
    """One sampled token, stamped in the step that sampled it."""

    token_id: int
    logprob: float
    """Natural log of the behaviour probability: of the processed distribution that the token was drawn from."""
    version: Version
    """The policy version whose weights made the logits."""
    top_ids: tuple[int, ...] = ()
    """The most probable tokens, falling; at most ``top_logprobs`` and only those of the distribution's support."""
    top_logprobs: tuple[float, ...] = ()
    """As long as ``top_ids``; of the same distribution as ``logprob``."""
    kv: tuple[PolicySpan, ...] = ()
    """Which versions built the KV of all positions before this token. Told where it isn't as `kv_spans` assumes: at the
    first token if other versions built rows of the prompt, and at the first one after everything was recomputed or
    another replica took over."""
    raw_logprob: float | None = None
    """Natural log of the token's probability by the raw logits; None where it isn't told."""
    raw_top_ids: tuple[int, ...] = ()
    """As ``top_ids``, by the raw logits; told where raw log-probabilities and alternatives are asked for."""
    raw_top_logprobs: tuple[float, ...] = ()
    """As long as ``raw_top_ids``."""
    mask: bytes | None = None
    """The support that it was drawn from, see `pack_mask`; None where it isn't told."""
    routes: bytes | None = None
    """Rows of routes, see `slackwater.rollout.routes.Routing`: of the positions before this token's that no earlier
    step told of, from the request's ``routes_from`` on. None: not asked for, or the model has no router."""
    provisional: bool = False
    """The bits of ``version`` had not been compared with its manifest yet."""
    moved: Origin | None = None
    """Who samples from this token on, where another replica took over: it built the KV of all positions before it
    anew, which ``kv`` then tells. Never on an answer's first token."""
    finish: Finish | None = None
    """Set on the last token of the answer, and only there."""


def pack_mask(ids: Sequence[int]) -> bytes:
    """Token ids of a support, rising, as int32, little-endian; empty where they are more than `MAX_MASK_IDS`."""
    return struct.pack(f"<{len(ids)}i", *ids) if len(ids) <= MAX_MASK_IDS else b""


def mask_ids(mask: bytes) -> tuple[int, ...]:
    """What `pack_mask` packed; empty where there were too many."""
    return struct.unpack(f"<{len(mask) // MASK_ID_BYTES}i", mask)


def grown(before: tuple[PolicySpan, ...], version: Version, end: int) -> tuple[PolicySpan, ...]:
    """Spans that reach to ``end``, what is new being of ``version``. As they are where they reach there already."""
    start = before[-1].end if before else 0
    if end <= start:
        return before
    if before and before[-1].version == version:
        return (*before[:-1], PolicySpan(version=version, start=before[-1].start, end=end))
    return (*before, PolicySpan(version=version, start=start, end=end))


def spans(versions: Iterable[Version]) -> tuple[PolicySpan, ...]:
    """Fold one version per token into spans: adjacent, in order, covering every token.

    Example: ``7, 7, 8`` gives ``[7, 0, 2)`` and ``[8, 2, 3)``.
    """
    folded: tuple[PolicySpan, ...] = ()
    for index, version in enumerate(versions):
        folded = grown(folded, version, index + 1)
    return folded


def kv_spans(prompt_tokens: int, steps: Sequence[TokenStep]) -> tuple[PolicySpan, ...]:
    """Which versions built the KV that an answer ended with: positions of the prompt, then of the completion.

    The last token has no row yet. Where steps don't tell otherwise, the version that samples the first token built the
    prompt's rows, and each later one built the row of the token before it.
    """
    built: tuple[PolicySpan, ...] = ()
    for index, step in enumerate(steps):
        built = step.kv or grown(built, step.version, prompt_tokens + index)
    return built


def replica_spans(origin: Origin, steps: Sequence[TokenStep]) -> tuple[ReplicaSpan, ...]:
    """Which replica sampled which tokens: adjacent, in order, covering every token; empty where there is none.

    Args:
        origin: Who sampled the first token.
        steps: All tokens, in order.
    """
    starts = [index for index, step in enumerate(steps) if step.moved or not index]
    whos = [steps[start].moved or origin for start in starts]
    return tuple(
        ReplicaSpan(replica=who.replica, boot=who.boot, start=start, end=end)
        for who, start, end in zip(whos, starts, [*starts[1:], len(steps)], strict=False)
    )


def taken_over(step: TokenStep, by: Origin, rows: int) -> TokenStep:
    """A token as the first that another replica samples in an answer under way.

    Args:
        step: As that replica gave it.
        by: That replica.
        rows: Positions before the token: of the prompt, then of the tokens so far.
    """
    built = (PolicySpan(version=step.version, start=0, end=rows),)
    return replace(step, kv=step.kv or built, moved=by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A whole answer. All token-wise fields are equally long."""

    origin: Origin
    steps: tuple[TokenStep, ...]
    finish: Finish

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The sampled ids, in order; the contract of which text is a view."""
        return tuple(step.token_id for step in self.steps)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Behaviour log-probabilities, natural log."""
        return tuple(step.logprob for step in self.steps)

    @property
    def policy(self) -> tuple[PolicySpan, ...]:
        """The policy spans over the completion's tokens."""
        return spans(step.version for step in self.steps)

    @property
    def replicas(self) -> tuple[ReplicaSpan, ...]:
        """The replica spans over the completion's tokens."""
        return replica_spans(self.origin, self.steps)


def collect(origin: Origin, steps: Iterable[TokenStep], finish: Finish | None = None) -> Completion:
    """Join steps into a completion; ``finish`` stands in where the last step carries none (an abort).

    Raises:
        InternalError: No step says how the answer ended and ``finish`` is absent.
    """
    joined = tuple(steps)
    end = joined[-1].finish if joined else None
    end = end or finish
    if end is None:
        raise InternalError("an answer ended without a finish")
    return Completion(origin=origin, steps=joined, finish=end)
