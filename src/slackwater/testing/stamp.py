"""The stamp engine: a table engine whose every token proves which weights and which KV made it.

A *stamp* is a 64-bit number made of a tensor's name and of all its bits, read from memory in every step; the
weights' *mark* is the sum of the stamps. A row of KV is a hash of the row before it, of the mark that built it, and
of its token. A token and its log-probability are a hash of the last row and of the mark in place. So a step over
half-written tensors, a label that is not the weights', and a stale row each give another log-probability, except
by a chance of 2^-52; `replayed` says which one is right.

As in a transformer, the row of a token is built by the step *after* the one that sampled it. The prompt's rows are
built before the first token, or taken from an earlier prompt that begins alike, if the same weights built it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import CommitReport, Proof
from slackwater.ids import BootId, ReplicaId, Version
from slackwater.rollout.evidence import PolicySpan, TokenStep, spans
from slackwater.rollout.request import CompletionRequest
from slackwater.testing.engine import VOCAB_SIZE, TableEngine
from slackwater.testing.exchange import TableStaged
from slackwater.testing.routes import ScriptedRouter
from slackwater.testing.runs import TableRun

_ROOT = b"stamp"
"""What the first row of a prompt follows."""


def tensor_stamp(name: str, bits: Bits) -> int:
    """The number, in [0, 2^64), that a tensor with these bits adds to the mark."""
    hashed = hashlib.blake2b(name.encode() + b"\0", digest_size=8)
    hashed.update(np.ascontiguousarray(bits).tobytes())
    return int.from_bytes(hashed.digest(), "little")


def weights_mark(weights: Mapping[str, Bits]) -> int:
    """The sum of all stamps, modulo 2^64: what the weights in place are known by."""
    return sum(tensor_stamp(name, bits) for name, bits in weights.items()) % 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class KvRow:
    """The KV of one position."""

    token: int
    mark: int
    """Of the weights that built it."""
    version: Version
    """Their label."""
    key: bytes
    """16 bytes that stand for this row and all before it."""


def built(before: Sequence[KvRow], tokens: Iterable[int], mark: int, version: Version) -> tuple[KvRow, ...]:
    """The rows of ``tokens`` after those of ``before``, built by the weights with ``mark``, labelled ``version``."""
    rows: list[KvRow] = []
    key = before[-1].key if before else _ROOT
    for token in tokens:
        key = _hashed(key, mark, token)
        rows.append(KvRow(token=token, mark=mark, version=version, key=key))
    return tuple(rows)


def drawn(key: bytes, mark: int, seed: int) -> int:
    """The token that weights with ``mark`` draw after the row ``key``."""
    return int.from_bytes(_hashed(key, mark, seed)[:8], "little") % VOCAB_SIZE


def logprob(key: bytes, mark: int, token: int) -> float:
    """Its log-probability there, in [-2, -1): 52 bits of evidence, whatever the seed and however it was chosen."""
    return -2.0 + (int.from_bytes(_hashed(key, mark, token)[8:], "little") >> 12) * 2.0**-52


def replayed(
    request: CompletionRequest, seed: int, steps: Sequence[TokenStep], marks: Mapping[Version, int]
) -> list[tuple[int, float]]:
    """What a stamp engine that never errs gives at each position, where the ones before it gave what ``steps`` has.

    Args:
        request: What was asked for.
        seed: What the answer reported as its own.
        steps: The answer's; their labels, and what they tell of the KV, are believed.
        marks: Of the weights that the labels name.

    Returns:
        Token and log-probability, as many as ``steps``.
    """
    right: list[tuple[int, float]] = []
    ids = [*request.prompt_ids, *(step.token_id for step in steps)]
    key, rows = _ROOT, 0
    for index, step in enumerate(steps):
        end = len(request.prompt_ids) + index
        if step.kv:
            key, rows = _ROOT, 0
        for span in step.kv or (PolicySpan(version=step.version, start=rows, end=end),):
            for token in ids[span.start : span.end]:
                key = _hashed(key, marks[span.version], token)
        rows = end
        right.append(_sampled(request, index, key, marks[step.version], seed))
    return right


def _sampled(request: CompletionRequest, index: int, key: bytes, mark: int, seed: int) -> tuple[int, float]:
    token = request.forced_ids[index] if request.forced_ids else drawn(key, mark, seed)
    return token, 0.0 if request.sampling.temperature == 0 else logprob(key, mark, token)


def _hashed(key: bytes, mark: int, number: int) -> bytes:
    return hashlib.blake2b(key + mark.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=16).digest()


@dataclass(eq=False, kw_only=True)
class StampBugs:
    """Bugs to plant, each of a kind that real engines have had: a checker that misses one is of no use."""

    early_label: bool = False
    """A commit flips the label one step before the bits."""
    torn_step: bool = False
    """A commit lets a step happen when half of its writes are in place."""
    keep_kv: bool = False
    """A commit keeps the prompts' KV for later requests, in silence."""
    hide_reuse: bool = False
    """Reused KV is not reported."""
    skip_recompute: bool = False
    """A commit that was to have answers computed again keeps their KV, and says that they were."""
    lose_waiting: bool = False
    """A commit forgets the answers that have no token yet."""


class StampEngine(TableEngine):
    """A `TableEngine`, with its faults and gates, whose tokens are what `replayed` says.

    ``bugs`` plants what a checker must find. ``labelled`` is called in the pause with each new label, and
    with whether spoilt weights are taken back.
    """

    def __init__(  # each is one knob of a fake
        self,
        weights: Mapping[str, Bits],
        specs: Mapping[str, TensorSpec],
        version: Version = Version(0),  # noqa: B008  # a NewType call makes an int, immutable
        *,
        replica: ReplicaId = ReplicaId("replica-0"),  # noqa: B008  # as above
        boot: BootId = BootId("boot-0"),  # noqa: B008  # as above
        slots: int = 4,
        window: int = 4096,
        labelled: Callable[[Version, bool], None] | None = None,
        router: ScriptedRouter | None = None,
    ) -> None:
        super().__init__(weights, specs, version, replica=replica, boot=boot, slots=slots, window=window, router=router)
        self.bugs = StampBugs()
        self._labelled = labelled
        self._mark = weights_mark(weights)
        self._prompts: list[tuple[KvRow, ...]] = []
        self._others: list[tuple[KvRow, ...]] = []

    @property
    def mark(self) -> int:
        """The mark of the weights in place, computed anew."""
        return weights_mark(self._weights)

    @property
    def prompts(self) -> tuple[tuple[KvRow, ...], ...]:
        """The rows that later requests may share, one prompt each."""
        return tuple(self._prompts)

    def _step(self) -> bool:
        self._mark = self.mark
        return super()._step()

    def _prefill(self, run: TableRun) -> None:
        prompt = run.request.prompt_ids
        offered = [*self._prompts, *self._others] if run.request.policy.any_kv else self._prompts
        shared = max((_common(rows, prompt) for rows in offered), key=len, default=())
        rows = (*shared, *built(shared, prompt[len(shared) :], self._mark, self._version))
        if rows != shared:
            (self._prompts if _pure(rows) else self._others).append(rows)
        run.chain = rows[-1].key
        hidden = self.bugs.hide_reuse
        kv = spans(self._version if hidden else row.version for row in rows)
        self._seated(run, 0 if hidden else len(shared), kv)

    def _next(self, run: TableRun) -> tuple[int, float]:
        if run.made and not run.kv:
            run.chain = _hashed(run.chain, self._mark, run.tokens[-1])
        return _sampled(run.request, run.made, run.chain, self._mark, run.origin.seed)

    def _recompute(self, run: TableRun) -> None:
        if not self.bugs.skip_recompute:
            tokens = (*run.request.prompt_ids, *run.tokens)
            run.chain = built((), tokens, weights_mark(self._weights), self._version)[-1].key

    def _commit(self, staged: TableStaged, version: Version, in_flight: InFlight, proof: Proof | None) -> CommitReport:
        if self.bugs.early_label:
            self._version = version
            self._step()
        if self.bugs.torn_step:
            for write in staged.writes[: len(staged.writes) // 2]:
                write.put(self._weights[write.name])
            self._step()
        return super()._commit(staged, version, in_flight, proof)

    def _flip(
        self, staged: TableStaged, version: Version, in_flight: InFlight, *, spoilt: Version | None
    ) -> CommitReport:
        if not self.bugs.keep_kv:
            self._others += self._prompts
            self._prompts.clear()
        self._others = [rows for rows in self._others if all(row.version != spoilt for row in rows)]
        if self.bugs.lose_waiting:
            self._runs = [run for run in self._runs if run.made]
        if self._labelled is not None:
            self._labelled(version, spoilt is not None)
        return super()._flip(staged, version, in_flight, spoilt=spoilt)


def _common(rows: tuple[KvRow, ...], prompt: tuple[int, ...]) -> tuple[KvRow, ...]:
    alike = takewhile(lambda pair: pair[0].token == pair[1], zip(rows, prompt, strict=False))
    return tuple(row for row, _ in alike)


def _pure(rows: tuple[KvRow, ...]) -> bool:
    return len({row.version for row in rows}) == 1
