"""What a trainer gets of one answer: ids, log-probabilities and the policy of every token. Text is a view of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from slackwater.api.engine_data import PROVISIONAL, EngineData, Masks
from slackwater.api.engine_data import Logprobs as TokenLogprobs
from slackwater.api.routed import RoutedExperts
from slackwater.errors import CorruptError, UnsupportedError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, ReplicaSpan
from slackwater.trainer.routes import Routes, read_routes

Logprobs = npt.NDArray[np.float32]
"""Natural logs, one per completion token."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMask:
    """The tokens that each draw was made from, as the sampler had them, in compressed rows. Read-only."""

    indptr: npt.NDArray[np.int64]
    """Of shape [tokens + 1]: row ``i`` is ``ids[indptr[i]:indptr[i + 1]]``."""
    ids: npt.NDArray[np.int32]
    """Rising within a row."""

    def row(self, token: int) -> npt.NDArray[np.int32] | None:
        """The support of one token; None where it was too wide to be told."""
        ids = self.ids[self.indptr[token] : self.indptr[token + 1]]
        return ids if len(ids) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One answer to one prompt, ready for a loss. All token-wise fields cover exactly the sampled tokens."""

    prompt_ids: tuple[int, ...]
    """As the engine saw the prompt."""
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    """Behaviour log-probabilities: of the distribution that each token was drawn from. Read-only."""
    policy: tuple[PolicySpan, ...]
    """Which version sampled which tokens; in order, without gaps."""
    text: str
    """Of the completion, cut before a stop string; not to be encoded again."""
    finish: Finish
    run: RunId
    """The lineage that the versions count in."""
    replica: ReplicaId
    """Who began it."""
    boot: BootId
    seed: int
    prompt_version: Version | None = None
    """The version that built the prompt's KV; None where the replica doesn't say, or where several did."""
    kv: tuple[PolicySpan, ...] = ()
    """Which version built the KV that the answer ended with: positions of prompt and completion, but for the last.
    Empty where the server doesn't say, as older ones don't, and where the answer has no token."""
    replicas: tuple[ReplicaSpan, ...] = ()
    """Which replica sampled which tokens: several where one was lost and others went on. Empty as ``kv``."""
    raw_logprobs: Logprobs | None = None
    """Of the model's raw logits. None where they weren't asked for, or the replica doesn't give them."""
    sampling_mask: SamplingMask | None = None
    """Likewise."""
    routes: Routes | None = None
    """Likewise: which experts processed which positions of prompt and completion."""
    provisional: bool = False
    """The bits of some token's version had not been compared with its manifest yet."""
    cached_tokens: int = 0

    @property
    def versions(self) -> tuple[Version, ...]:
        """One version per token."""
        return tuple(span.version for span in self.policy for _ in range(span.start, span.end))

    @property
    def is_partial(self) -> bool:
        """Whether an operator, an exchange of weights or the request's exact version cut it; its tokens stand, and a
        request with the ids of prompt and completion as its prompt goes on from there.
        """
        return self.finish in (Finish.ABORT, Finish.SWAPPED, Finish.POLICY_CHANGED)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: _Message | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    engine_data: EngineData | None = None


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    choices: tuple[_Choice, ...]
    prompt_token_ids: tuple[int, ...] | None = None


_REPLIES: Final = msgspec.json.Decoder(_Reply)
_HINT: Final = "the server must know return_token_ids and engine_data; text is never encoded again"


def read_samples(body: bytes, count: int) -> tuple[Sample, ...]:
    """Read a reply that was asked for with ``return_token_ids`` and ``engine_data``.

    Args:
        body: Of a whole reply to either completion route.
        count: How many choices were asked for.

    Raises:
        UnsupportedError: It has no ids or no evidence: this server doesn't give them.
        CorruptError: It is no such reply, or its fields contradict each other.
    """
    try:
        reply = _REPLIES.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the reply can't be read: {error}") from error
    if sorted(choice.index for choice in reply.choices) != list(range(count)):
        raise CorruptError(f"the reply has {len(reply.choices)} choices of {count}")
    if reply.prompt_token_ids is None:
        raise UnsupportedError("the reply has no prompt_token_ids", hint=_HINT)
    ordered = sorted(reply.choices, key=lambda choice: choice.index)
    return tuple(_sample(choice, reply.prompt_token_ids) for choice in ordered)


def _sample(choice: _Choice, prompt_ids: tuple[int, ...]) -> Sample:
    data = choice.engine_data
    if choice.token_ids is None or data is None:
        raise UnsupportedError("a choice has no token_ids or no engine_data", hint=_HINT)
    logprobs = _floats(data.logprobs)
    raws = None if data.raw_logprobs is None else _floats(data.raw_logprobs)
    policy, kv = _spans(data.policy), _spans(data.kv or ())
    _check(choice.token_ids, data, len(logprobs), policy)
    if data.kv is not None and not _covers(kv, _rows(prompt_ids, choice.token_ids)):
        raise CorruptError("a choice's KV spans don't cover its prompt and tokens")
    if raws is not None and len(raws) != len(choice.token_ids):
        raise CorruptError(f"a choice has {len(choice.token_ids)} tokens and {len(raws)} raw log-probabilities")
    replicas = _replicas(data, len(choice.token_ids))
    text = choice.message.content if choice.message else choice.text
    return Sample(
        prompt_ids=prompt_ids,
        token_ids=choice.token_ids,
        logprobs=logprobs,
        policy=policy,
        text=text or "",
        finish=data.finish,
        run=data.run,
        replica=data.replica,
        boot=data.boot_id,
        seed=data.seed,
        prompt_version=data.prompt_version,
        kv=kv,
        replicas=replicas,
        raw_logprobs=raws,
        sampling_mask=None if data.sampling_mask is None else _mask(data.sampling_mask, len(choice.token_ids)),
        routes=None if data.routed_experts is None else _routes(data.routed_experts, prompt_ids, choice.token_ids),
        provisional=data.status.get("policy") == PROVISIONAL,
        cached_tokens=data.cached_tokens,
    )


def _floats(told: TokenLogprobs) -> Logprobs:
    values = np.array(told.values.values(), dtype=np.float32)
    values.flags.writeable = False
    return values


def _mask(told: Masks, num_tokens: int) -> SamplingMask:
    indptr = np.array(told.indptr.values(), dtype=np.int64)
    ids = np.frombuffer(told.indices.raw(), dtype="<i4")
    whole = told.indices.dtype == "int32" and len(indptr) == num_tokens + 1
    if not whole or indptr[0] != 0 or indptr[-1] != len(ids) or np.any(indptr[1:] < indptr[:-1]):
        raise CorruptError(f"a choice's sampling mask doesn't fit its {num_tokens} tokens")
    indptr.flags.writeable = False
    return SamplingMask(indptr=indptr, ids=ids)


def _routes(told: RoutedExperts, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Routes:
    routes = read_routes(told)
    end = told.start + told.shape[0] + sum(high - low for low, high in told.missing)
    # Without a token the whole prompt was read, or nothing was.
    ends = (_rows(prompt_ids, token_ids),) if token_ids else (told.start, len(prompt_ids))
    if end not in ends:
        raise CorruptError(f"a choice's routes end before position {end}, and not before {ends[-1]}")
    return routes


def _spans(plain: Sequence[tuple[Version, int, int]]) -> tuple[PolicySpan, ...]:
    return tuple(PolicySpan(version=version, start=start, end=end) for version, start, end in plain)


def _replicas(data: EngineData, num_tokens: int) -> tuple[ReplicaSpan, ...]:
    told = data.replicas or ()
    found = tuple(ReplicaSpan(replica=name, boot=boot, start=start, end=end) for name, boot, start, end in told)
    begun = [(span.replica, span.boot) for span in found[:1]]
    if data.replicas is not None and (
        not _covers(found, num_tokens) or begun not in ([], [(data.replica, data.boot_id)])
    ):
        raise CorruptError("a choice's replica spans don't cover its tokens from who began it")
    return found


def _rows(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    return len(prompt_ids) + len(token_ids) - 1 if token_ids else 0


def _covers(spans: Sequence[PolicySpan] | Sequence[ReplicaSpan], end: int) -> bool:
    """Whether spans are adjacent, none is empty, and they reach from 0 to ``end``."""
    edges = [0, *(span.end for span in spans)]
    gapless = [span.start for span in spans] == edges[:-1] and all(span.start < span.end for span in spans)
    return gapless and edges[-1] == end


def _check(token_ids: Sequence[int], data: EngineData, num_logprobs: int, policy: Sequence[PolicySpan]) -> None:
    if data.token_ids.values() != tuple(token_ids):
        raise CorruptError("a choice's token_ids differ from its engine_data")
    if len(token_ids) != num_logprobs or not _covers(policy, len(token_ids)):
        raise CorruptError(f"a choice's {len(token_ids)} ids, {num_logprobs} log-probabilities and spans don't fit")
