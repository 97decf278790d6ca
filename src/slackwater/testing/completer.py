"""The table completer: a whole `slackwater.rollout.completer.Completer` in plain Python, with gates and faults.

Position ``i`` of every answer draws from logits row ``i % len(rows)``; draws depend on (seed, position) alone. One that
is ``anchored`` counts positions from the start of the prompt, as engines do: an answer then goes on from its tokens.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from slackwater.errors import (
    InvalidInputError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    UnsupportedError,
)
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import Finish, Origin, PolicySpan, TokenStep, pack_mask
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.rollout.routes import Routing
from slackwater.testing.distribution import adjusted, processed, raw_logprob, raw_ranked
from slackwater.testing.routes import ScriptedRouter, check_forced

DEFAULT_SEED: Final = 11
"""The seed that a table completer picks for a request without one, unless it is told another."""


class TableCompleter:
    """Answers from fixed logits.

    Args:
        rows: Logits by position; all of one length, the vocabulary.
        window: Most tokens of prompt and completion together.
        versions: The version that samples position ``i`` is ``versions[min(i, last)]``.
        end_token: Sampling it ends the answer; None: nothing does.
        anchored: Whether rows and draws count from the start of the prompt instead of the answer.
        replica: Its name.
        boot: Its start.
        run: Its lineage.
        router: What tells of routes; None: the model has no routers.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[float]],
        *,
        window: int = 256,
        versions: Sequence[int] = (7,),
        end_token: int | None = None,
        anchored: bool = False,
        replica: str = "table",
        boot: str = "boot-0",
        run: str = "demo",
        router: ScriptedRouter | None = None,
    ) -> None:
        self.rows = tuple(tuple(row) for row in rows)
        self.versions = tuple(map(Version, versions))
        self.end_token = end_token
        self.anchored = anchored
        self.router = router
        self.seed = DEFAULT_SEED
        """Picked for a request without one."""
        self.active = 0
        """Answers admitted and not closed or ended."""
        self.waiting = 0
        """Answers whose readers wait for `release`."""
        self.requests: list[CompletionRequest] = []
        """All that were admitted, in order."""
        self.admission_error: SlackwaterError | None = None
        """Raised by `complete` while it is set."""
        self.kv: Mapping[int, tuple[PolicySpan, ...]] = {}
        """What tokens say of the KV before them, by their numbers, counted from 0."""
        self.provisional: Collection[int] = ()
        """Numbers of the tokens whose version isn't confirmed yet."""
        self._window = window
        self._name = (ReplicaId(replica), BootId(boot), RunId(run))
        self._changed = asyncio.Event()
        self._held_from: int | None = None
        self._aborts = 0
        self._severs = 0
        self._failure: tuple[int, SlackwaterError] | None = None
        self._cut: tuple[int, Finish] | None = None

    def window(self) -> int:
        """See `Completer.window`."""
        return self._window

    def routing(self) -> Routing | None:
        """See `Completer.routing`."""
        return self.router.routing if self.router else None

    def hold(self, *, position: int = 0) -> None:
        """Let no answer take token number ``position``, counted from 0, or a later one until `release`."""
        self._held_from = position

    def release(self) -> None:
        """Let all go on."""
        self._held_from = None
        self._changed.set()

    def fail_after(self, tokens: int, error: SlackwaterError | None) -> None:
        """From now on raise ``error`` in place of token number ``tokens``, counted from 0; None: fail no more."""
        self._failure = None if error is None else (tokens, error)

    def cut_after(self, tokens: int, finish: Finish) -> None:
        """From now on end answers with ``finish`` in place of token number ``tokens``, counted from 0."""
        self._cut = (tokens, finish)

    def abort_all(self) -> None:
        """End every answer under way with `Finish.ABORT`; one that is held ends once released."""
        self._aborts += 1

    def sever(self) -> None:
        """Fail every answer under way with ReplicaLostError, held or not."""
        self._severs += 1
        self._changed.set()

    async def complete(self, request: CompletionRequest) -> "TableAnswer":
        """See `Completer.complete`."""
        if self.admission_error is not None:
            raise self.admission_error
        vocabulary = len(self.rows[0])
        ids = (*request.prompt_ids, *request.forced_ids, *request.sampling.named_ids)
        if len(request.prompt_ids) >= self._window or not all(0 <= token_id < vocabulary for token_id in ids):
            raise InvalidInputError(
                "prompt_ids doesn't fit this model", hint=f"window {self._window}, {vocabulary} ids"
            )
        if request.sampling.grammar is not None:
            raise UnsupportedError("grammar can't be followed: a table has no tokenizer", hint="leave it out")
        check_forced(request, self.router)
        self.requests.append(request)
        self.count(1)
        return TableAnswer(self, request, self._name)

    async def until_active(self, answers: int) -> None:
        """Return once exactly so many answers are under way."""
        while self.active != answers:
            self._changed.clear()
            await self._changed.wait()

    async def until_waiting(self, answers: int) -> None:
        """Return once exactly so many readers wait for `release`."""
        while self.waiting != answers:
            self._changed.clear()
            await self._changed.wait()

    def count(self, answers: int) -> None:
        """An answer began, or one ended."""
        self.active += answers
        self._changed.set()

    @property
    def aborts(self) -> int:
        """How often `abort_all` was called."""
        return self._aborts

    @property
    def severs(self) -> int:
        """How often `sever` was called."""
        return self._severs

    def cut(self, position: int) -> Finish | None:
        """How an answer ends in place of token number ``position``; None where it doesn't."""
        return self._cut[1] if self._cut is not None and position >= self._cut[0] else None

    async def gate(self, position: int, severs: int, is_over: Callable[[], bool]) -> None:
        """Wait until the answer may take its next token; raises the fault that is set for it.

        Args:
            position: Of that token.
            severs: As `severs` was when the answer was admitted.
            is_over: Whether the answer has ended. One that has waits for nothing and isn't failed.
        """
        await self._wait_until(lambda: is_over() or severs != self._severs or not self._holds(position))
        if is_over():
            return
        if severs != self._severs:
            raise ReplicaLostError("the table was severed")
        if self._failure is not None and position >= self._failure[0]:
            raise self._failure[1]

    def _holds(self, position: int) -> bool:
        return self._held_from is not None and position >= self._held_from

    async def _wait_until(self, may_go: Callable[[], bool]) -> None:
        if may_go():
            return
        self.waiting += 1
        self._changed.set()
        try:
            while not may_go():
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.waiting -= 1
            self._changed.set()


class TableAnswer:
    """See `slackwater.rollout.completer.Answer`."""

    def __init__(
        self, owner: TableCompleter, request: CompletionRequest, name: tuple[ReplicaId, BootId, RunId]
    ) -> None:
        seed = request.sampling.seed
        replica, boot, run = name
        self._owner = owner
        self._request = request
        self._aborts = owner.aborts
        self._severs = owner.severs
        self._held = True
        self._tokens: list[int] = []
        self.finish: Finish | None = None
        self.origin = Origin(
            replica=replica,
            boot=boot,
            run=run,
            seed=owner.seed if seed is None else seed,
            prompt_version=_only(owner.kv.get(0, ()), owner.versions[0]),
        )

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        position = 0
        while self.finish is None:
            await self._owner.gate(position, self._severs, lambda: not self._held)
            if not self._held:
                return
            if self._owner.aborts != self._aborts:
                self._end(Finish.ABORT)
                return
            cut = self._owner.cut(position)
            if cut is not None:
                self._end(cut)
                return
            step = self._step(position)
            if step is None:
                self._end(Finish.POLICY_CHANGED)
                return
            if step.finish is not None:
                self._end(step.finish)
            position += 1
            yield step

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        self._end(Finish.ABORT)

    def _end(self, finish: Finish) -> None:
        self.finish = self.finish or finish
        if self._held:
            self._held = False
            self._owner.count(-1)

    def _step(self, position: int) -> TokenStep | None:
        request, owner = self._request, self._owner
        version = owner.versions[min(position, len(owner.versions) - 1)]
        if position == 0 and not request.policy.admits(version):
            raise PolicyUnmetError(f"{request.policy} isn't met: version {version} is held", versions=(version,))
        if request.policy.exact_version not in (None, version):
            return None
        place = position + len(request.prompt_ids) * owner.anchored
        logits, sampling = owner.rows[place % len(owner.rows)], request.sampling
        drawn = _distribution(self._changed(logits), sampling)
        ranked = drawn.ranked
        forced = request.forced_ids[position : position + 1]
        token_id = forced[0] if forced else drawn.draw(self.origin.seed, place)
        routes = owner.router.told(request, self._tokens) if owner.router else None
        self._tokens.append(token_id)
        width = sampling.top_logprobs
        raws = raw_ranked(logits)[:width] if sampling.raw_logprobs else []
        return TokenStep(
            token_id=token_id,
            logprob=drawn.logprobs.get(token_id, -math.inf),
            version=version,
            top_ids=tuple(other for other, _ in ranked[:width]),
            top_logprobs=tuple(logprob for _, logprob in ranked[:width]),
            kv=owner.kv.get(position, ()),
            raw_logprob=raw_logprob(logits, token_id) if sampling.raw_logprobs else None,
            raw_top_ids=tuple(other for other, _ in raws),
            raw_top_logprobs=tuple(logprob for _, logprob in raws),
            mask=pack_mask(sorted(token for token, _ in ranked)) if sampling.sampling_mask else None,
            routes=routes,
            provisional=position in owner.provisional,
            finish=self._ends(token_id, position),
        )

    def _changed(self, logits: tuple[float, ...]) -> tuple[float, ...]:
        prompt, begin = self._request.prompt_ids, len(self._request.prompt_ids) - self._request.continued
        sampling = self._request.sampling
        banned = self._stops() if len(self._tokens) < sampling.min_tokens else frozenset[int]()
        if not (sampling.penalises or sampling.logit_bias or banned):
            return logits
        so_far = (*prompt[begin:], *self._tokens)
        return tuple(adjusted(logits, sampling, prompt_ids=prompt[:begin], token_ids=so_far, ends=banned))

    def _stops(self) -> frozenset[int]:
        sampling, end = self._request.sampling, self._owner.end_token
        own = () if sampling.ignore_eos or end is None else (end,)
        return frozenset((*own, *sampling.stop_token_ids))

    def _ends(self, token_id: int, position: int) -> Finish | None:
        request = self._request
        if position + 1 == len(request.forced_ids):
            return Finish.STOP
        if not request.forced_ids and token_id in self._stops():
            return Finish.STOP
        left = self._owner.window() - len(request.prompt_ids)
        return Finish.LENGTH if position + 1 >= min(request.sampling.max_tokens, left) else None


def _only(kv: Sequence[PolicySpan], assumed: Version) -> Version | None:
    """The version that built ``kv``, ``assumed`` where it is empty; None where several did."""
    builders = {span.version for span in kv} or {assumed}
    return builders.pop() if len(builders) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Distribution:
    """What a token is drawn from, made once for a row."""

    ranked: Sequence[tuple[int, float]]
    logprobs: Mapping[int, float]
    masses: Sequence[float]
    """Probabilities of ``ranked``, each with all before it."""

    def draw(self, seed: int, position: int) -> int:
        source = random.Random(f"{seed}:{position}")  # noqa: S311 - a fake's reproducible draw
        return source.choices(self.ranked, cum_weights=self.masses)[0][0]


@lru_cache(maxsize=256)
def _distribution(logits: tuple[float, ...], sampling: SamplingSpec) -> _Distribution:
    ranked = processed(logits, sampling)
    masses = list(accumulate(math.exp(logprob) for _, logprob in ranked))
    return _Distribution(ranked=ranked, logprobs=dict(ranked), masses=masses)
