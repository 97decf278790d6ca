"""The table engine: a whole `slackwater.engine.base.Engine` in numpy, with gates and faults.

It is a *stamp model*: each token is a hash of the prompt, the tokens so far, the digest of the weights at every
position, and the seed, so a wrong bit, a stale KV or a wrong label changes what comes out. `stamp_tokens` says
what must. It digests the weights once an exchange, and a prompt's KV knows none: `slackwater.testing.stamp` reads the
bits in every step and stamps the prompt's rows too.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import CommitReport, EngineDescription, EngineStats, Proof, Staged
from slackwater.errors import (
    ContextLengthError,
    InvalidInputError,
    NotFoundError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    SwapError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, Origin, PolicySpan, TokenStep, grown, pack_mask
from slackwater.rollout.request import CompletionRequest
from slackwater.testing.exchange import EngineFaults, TableStaged, ours, write_all
from slackwater.testing.routes import ScriptedRouter, check_forced
from slackwater.testing.runs import TableAnswer, TableRun

VOCAB_SIZE = 1000
"""Tokens that a table engine draws from."""


def weights_stamp(weights: Mapping[str, Bits]) -> bytes:
    """A digest of all bits in place; what a table engine stamps its tokens with."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(name.encode() + b"\0")
        sha.update(np.ascontiguousarray(weights[name]).tobytes())
    return sha.digest()


def stamp_tokens(prompt_ids: Sequence[int], stamps: Sequence[bytes], seed: int = 0) -> list[int]:
    """The tokens that a table engine must draw when ``stamps[i]`` are the weights that sample token ``i``."""
    chain = _prompt_chain(prompt_ids)
    tokens: list[int] = []
    for stamp in stamps:
        tokens.append(_draw(chain, stamp, seed))
        chain = _extend(chain, stamp, tokens[-1])
    return tokens


def _prompt_chain(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).digest()


def _draw(chain: bytes, stamp: bytes, seed: int) -> int:
    drawn = hashlib.sha256(chain + stamp + seed.to_bytes(8, "little")).digest()
    return int.from_bytes(drawn[:8], "little") % VOCAB_SIZE


def _extend(chain: bytes, stamp: bytes, token: int) -> bytes:
    """The KV of one more position: everything before it, the weights that built it, and its token."""
    return hashlib.sha256(chain + stamp + token.to_bytes(4, "little")).digest()


class TableEngine:
    """A full engine over ``weights``: canonical name to flat bits, which it copies.

    ``faults`` scripts what goes wrong. ``hold`` stops the engine between two steps, ``release`` lets it go
    for some steps or for good. Commits happen while it is held too: it stands at a step boundary then.
    """

    def __init__(  # each is one knob of a fake
        self,
        weights: Mapping[str, Bits],
        specs: Mapping[str, TensorSpec],
        version: Version = Version(0),  # noqa: B008  # a NewType call makes an int, immutable
        *,
        run: RunId = RunId("demo"),  # noqa: B008  # as above
        replica: ReplicaId = ReplicaId("replica-0"),  # noqa: B008  # as above
        boot: BootId = BootId("boot-0"),  # noqa: B008  # as above
        slots: int = 4,
        window: int = 4096,
        router: ScriptedRouter | None = None,
    ) -> None:
        self.faults = EngineFaults()
        self.commits = 0
        self._weights = {name: bits.copy() for name, bits in weights.items()}
        self._specs = dict(specs)
        self._version = version
        self._stamp = weights_stamp(self._weights)
        self._origin = Origin(replica=replica, boot=boot, run=run, seed=0)
        self._slots = slots
        self._window = window
        self._router = router
        self._runs: list[TableRun] = []
        self._controls: deque[tuple[Callable[[], CommitReport], asyncio.Future[CommitReport]]] = deque()
        self._last: TableStaged | None = None
        self._generation = object()
        self._seeds = count(1)
        self._cached: dict[tuple[int, ...], Version] = {}
        self._older: dict[tuple[int, ...], Version] = {}
        self._draining = False
        self._steps_allowed: int | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._closed = False
        self._failure = ""

    @property
    def stamp(self) -> bytes:
        """The stamp of the weights in place, computed anew."""
        return weights_stamp(self._weights)

    @property
    def weights(self) -> Mapping[str, Bits]:
        """Copies of the bits in place."""
        return {name: bits.copy() for name, bits in self._weights.items()}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def hold(self) -> None:
        """Make no further token."""
        self._steps_allowed = 0

    def release(self, steps: int | None = None) -> None:
        """Go on for ``steps`` steps, then hold again; None: go on for good."""
        self._steps_allowed = None if steps is None else (self._steps_allowed or 0) + steps
        self._wake.set()

    def die(self, why: str) -> UnavailableError:
        """A rank of the engine's group dies: memory stays as it is, every answer under way ends in a ReplicaLostError.

        From here on nothing is made, and calls raise the error returned. Only the first death counts.
        """
        self._failure = self._failure or why
        for run in self._runs:
            run.end(None, ReplicaLostError(f"the engine died: {self._failure}", hint="start the replica again"))
        self._refuse_controls(self._unavailable())
        self._wake.set()
        return self._unavailable()

    def poke(self, name: str, position: int) -> None:
        """Flip the lowest bit of one element, as a stray write would."""
        self._weights[name][position] ^= 1
        self._stamp = self.stamp

    def describe(self) -> EngineDescription:
        """See `Engine.describe`."""
        return EngineDescription(
            model="TableForCausalLM",
            window=self._window,
            vocab_size=VOCAB_SIZE,
            slots=self._slots,
            numerics="table",
            eos_token_ids=(),
            routing=self._router.routing if self._router else None,
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        live = sum(not run.ended for run in self._runs)
        active = min(live, self._slots)
        failure = self._failure or ("closed" if self._closed else "")
        return EngineStats(version=self._version, active=active, waiting=live - active, failure=failure)

    async def generate(self, request: CompletionRequest, *, ahead: bool = False) -> Answer:
        """See `Engine.generate`."""
        self._check_open()
        room = self._window - len(request.prompt_ids)
        if room < 1:
            raise ContextLengthError(f"the prompt has {len(request.prompt_ids)} tokens, the window {self._window}")
        named = (*request.prompt_ids, *request.forced_ids, *request.sampling.named_ids)
        if any(not 0 <= token < VOCAB_SIZE for token in named):
            raise InvalidInputError(f"a token id is outside the vocabulary of {VOCAB_SIZE}")
        if request.sampling.grammar is not None:
            raise UnsupportedError("grammar can't be followed: a table has no tokenizer", hint="leave it out")
        check_forced(request, self._router)
        seed = next(self._seeds) if request.sampling.seed is None else request.sampling.seed
        wanted = len(request.forced_ids) or request.sampling.max_tokens
        run = TableRun(
            request=request,
            origin=replace(self._origin, seed=seed),
            limit=min(wanted, room),
            chain=_prompt_chain(request.prompt_ids),
        )
        begun = sum(bool(other.made) for other in self._runs)
        self._runs.insert(begun if ahead else len(self._runs), run)
        self._kick()
        return TableAnswer(run)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """See `Engine.tensors`."""
        return self._specs

    def read(self, name: str, tile: Tile) -> Bits:
        """See `Engine.read`."""
        if name not in self._weights:
            raise NotFoundError(f"the engine holds no tensor {name!r}")
        bits = tile.take(self._weights[name]).view()
        bits.flags.writeable = False
        return bits

    async def stage(self, writes: Sequence[TileWrite]) -> Staged:
        """See `Engine.stage`."""
        self._check_open()
        fault, self.faults.stage = self.faults.stage, None
        if fault is not None:
            raise fault
        for write in writes:
            self._check_write(write)
        saved = tuple(write.tile.take(self._weights[write.name]).copy() for write in writes)
        return TableStaged(writes=tuple(writes), saved=saved, generation=self._generation)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        self._check_open()
        self._draining = True
        try:
            for run in [run for run in self._runs if run.made]:
                await run.over.wait()
        except asyncio.CancelledError:
            self.proceed()
            raise

    def proceed(self) -> None:
        """See `Engine.proceed`."""
        self._draining = False
        self._kick()

    async def commit(
        self,
        staged: Staged,
        version: Version,
        *,
        in_flight: InFlight = InFlight.CONTINUE,
        proof: Proof | None = None,
    ) -> CommitReport:
        """See `Engine.commit`."""
        return await self._between_steps(lambda: self._commit(ours(staged), version, in_flight, proof))

    async def undo(
        self, staged: Staged, version: Version, *, in_flight: InFlight = InFlight.CONTINUE, spoilt: bool = False
    ) -> CommitReport:
        """See `Engine.undo`."""
        return await self._between_steps(lambda: self._undo(ours(staged), version, in_flight, spoilt=spoilt))

    async def abort_all(self) -> int:
        """See `Engine.abort_all`."""
        self._check_open()
        return self._abort_all()

    def _abort_all(self) -> int:
        live = [run for run in self._runs if not run.ended]
        for run in live:
            run.end(Finish.ABORT)
        return len(live)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self._abort_all()
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        self._refuse_controls(SwapError("the engine was closed"))

    def _refuse_controls(self, error: SlackwaterError) -> None:
        for _, future in self._controls:
            if not future.done():
                future.set_exception(error)
        self._controls.clear()

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"the engine doesn't answer: {self.stats().failure}", hint="start the replica again")

    def _check_open(self) -> None:
        if self._closed or self._failure:
            raise self._unavailable()

    def _check_write(self, write: TileWrite) -> None:
        spec = self._specs.get(write.name)
        if spec is None:
            raise NotFoundError(f"the engine holds no tensor {write.name!r}")
        size = write.tile.count if write.positions is None else len(write.positions)
        inside = write.tile.fits(spec.num_elements)
        rising = write.positions is None or bool(np.all(write.positions[1:] > write.positions[:-1]))
        sized = len(write.values) == size and write.values.dtype == spec.bits_dtype
        if not (inside and rising and sized):
            raise InvalidInputError(f"a write does not fit {write.name!r}")

    async def _between_steps(self, change: Callable[[], CommitReport]) -> CommitReport:
        self._check_open()
        future: asyncio.Future[CommitReport] = asyncio.get_running_loop().create_future()
        self._controls.append((change, future))
        self._kick()
        return await future

    def _commit(self, staged: TableStaged, version: Version, in_flight: InFlight, proof: Proof | None) -> CommitReport:
        if staged.generation is not self._generation:
            raise SwapError("these writes were staged on other weights")
        dies_at, self.faults.commit_dies_at_write = self.faults.commit_dies_at_write, None
        if dies_at is not None:
            staged.put(self._weights, dies_at)
            raise self.die(f"a rank died before write {dies_at} of a commit")
        write_all(staged, self._weights, self.faults)
        self._prove(staged, proof)
        self._last = staged
        self.commits += 1
        return self._flip(staged, version, in_flight, spoilt=None)

    def _prove(self, staged: TableStaged, proof: Proof | None) -> None:
        wrong: str | None = "a proof that didn't end"
        try:
            wrong = proof() if proof else None
        finally:
            if wrong is not None:
                staged.put_back(self._weights)
        if wrong is not None:
            raise SwapError(f"{wrong} was not what it should be")

    def _undo(self, staged: TableStaged, version: Version, in_flight: InFlight, *, spoilt: bool) -> CommitReport:
        fail, self.faults.undo = self.faults.undo, False
        flip, self.faults.flip_undo = self.faults.flip_undo, False
        if fail or staged is not self._last:
            raise SwapError("this is not the last commit" if not fail else "the undo failed")
        dies_at, self.faults.undo_dies_at_write = self.faults.undo_dies_at_write, None
        staged.put_back(self._weights, dies_at)
        if dies_at is not None:
            raise self.die(f"a rank died before write {dies_at} of an undo")
        if flip:
            staged.spoil(self._weights)
        self._last = None
        return self._flip(staged, version, in_flight, spoilt=self._version if spoilt else None)

    def _flip(
        self, staged: TableStaged, version: Version, in_flight: InFlight, *, spoilt: Version | None
    ) -> CommitReport:
        begun = time.perf_counter()
        self._version = version
        self._stamp = self.stamp
        self._generation = object()
        self._older.update(self._cached)
        self._older = {prompt: by for prompt, by in self._older.items() if by != spoilt}
        self._cached.clear()
        begun_runs = [run for run in self._runs if run.made and not run.ended]
        for run in begun_runs:
            self._turn(run, in_flight, spoilt)
        written = sum(write.values.nbytes for write in staged.writes)
        return CommitReport(
            pause_s=time.perf_counter() - begun,
            bytes_written=written,
            in_flight=self.stats().active,
            ended=sum(run.ended for run in begun_runs),
        )

    def _turn(self, run: TableRun, in_flight: InFlight, spoilt: Version | None) -> None:
        """Do with an answer that has tokens what an exchange does."""
        exact = run.request.policy.exact_version
        if spoilt is not None and run.version == spoilt:
            run.end(None, UnavailableError(f"version {spoilt} was taken back"))
        elif exact not in (None, self._version):
            run.end(Finish.POLICY_CHANGED)
        elif in_flight in (InFlight.ABORT, InFlight.DRAIN):
            run.end(Finish.SWAPPED)
        elif in_flight is InFlight.RECOMPUTE or any(span.version == spoilt for span in run.kv):
            self._recompute(run)
            rows = len(run.request.prompt_ids) + run.made
            run.kv = (PolicySpan(version=self._version, start=0, end=rows),)

    def _recompute(self, run: TableRun) -> None:
        """Build the KV of an answer's prompt and tokens anew."""
        run.chain = _prompt_chain(run.request.prompt_ids)
        for token in run.tokens:
            run.chain = _extend(run.chain, self._stamp, token)

    def _kick(self) -> None:
        self._wake.set()
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        while not self._failure:
            stepped = self._step()
            if not (self._settle_controls() or stepped):
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(0)

    def _settle_controls(self) -> bool:
        settled = False
        while self._controls and not self.faults.stall:
            change, future = self._controls.popleft()
            self._draining, settled = False, True
            if future.done():  # its caller was cancelled before the boundary: nothing changes
                continue
            try:
                future.set_result(change())
            except SlackwaterError as error:
                future.set_exception(error)
        return settled

    def _step(self) -> bool:
        """One token for each active answer; False where there is nothing to do."""
        self._runs = [run for run in self._runs if not run.ended]
        able = [run for run in self._runs[: self._slots] if run.made or not self._draining]
        if not able or self._steps_allowed == 0 or (self.faults.stall and self._controls):
            return False
        if self._steps_allowed is not None:
            self._steps_allowed -= 1
        for run in able:
            self._sample(run)
        return True

    def _sample(self, run: TableRun) -> None:
        request = run.request
        if not run.made:
            if not request.policy.admits(self._version):
                held = self._version
                message = f"the replica holds version {held}, not {request.policy}"
                run.end(None, PolicyUnmetError(message, versions=(held,)))
                return
            self._prefill(run)
        token, logprob = self._next(run)
        logprob = 0.0 if request.sampling.temperature == 0 else logprob
        some = bool(request.sampling.top_logprobs)
        raw = request.sampling.raw_logprobs
        run.give(
            TokenStep(
                token_id=token,
                logprob=logprob,
                version=self._version,
                top_ids=(token,) if some else (),
                top_logprobs=(logprob,) if some else (),
                raw_logprob=logprob if raw else None,
                raw_top_ids=(token,) if some and raw else (),
                raw_top_logprobs=(logprob,) if some and raw else (),
                mask=pack_mask((token,)) if request.sampling.sampling_mask else None,
                kv=run.kv,
                routes=self._router.told(request, run.tokens) if self._router else None,
                finish=run.finish_with(token),
            )
        )

    def _next(self, run: TableRun) -> tuple[int, float]:
        """A run's next token and its log-probability; takes the token into the run's KV."""
        forced = run.request.forced_ids
        token = forced[run.made] if forced else _draw(run.chain, self._stamp, run.origin.seed)
        run.chain = _extend(run.chain, self._stamp, token)
        return token, -1.0 - run.chain[8] / 256

    def _prefill(self, run: TableRun) -> None:
        """Build the KV of a run's prompt, or take what there is of it."""
        prompt = run.request.prompt_ids
        known = {**self._older, **self._cached} if run.request.policy.any_kv else self._cached
        cached = len(prompt) if prompt in known else 0
        self._seated(run, cached, grown((), known.get(prompt, self._version), len(prompt)))
        if not cached:
            self._cached[prompt] = self._version

    def _seated(self, run: TableRun, cached: int, kv: tuple[PolicySpan, ...]) -> None:
        """Note who has built the KV of a run's prompt, ``cached`` tokens of it before."""
        builders = {span.version for span in kv}
        run.kv = () if builders == {self._version} else kv
        built_by = builders.pop() if len(builders) == 1 else None
        run.origin = replace(run.origin, prompt_version=built_by, cached_tokens=cached)
