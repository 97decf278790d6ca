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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.engine.base import CommitReport, EngineDescription, EngineStats, Staged
from slackwater.errors import (
    InvalidInputError,
    NotFoundError,
    PolicyUnmetError,
    SlackwaterError,
    SwapError,
    UnavailableError,
)
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest

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


@dataclass(eq=False)
class TableStaged:
    """Copies of the writes, and the bits that they replace."""

    writes: tuple[TileWrite, ...]
    saved: tuple[Bits, ...]
    generation: int
    """How often weights had been exchanged when it was staged; on others it is refused."""

    @property
    def num_bytes(self) -> int:
        """See `Staged.num_bytes`."""
        return sum(write.num_bytes for write in self.writes) + sum(bits.nbytes for bits in self.saved)


@dataclass(eq=False, kw_only=True)
class EngineFaults:
    """What is to go wrong; a test sets fields, each fires once unless it says otherwise."""

    stage: SlackwaterError | None = None
    """The next stage raises this."""
    commit_at_write: int | None = None
    """The next commit raises before this write; the writes before it are put back."""
    flip_bit: bool = False
    """The next commit flips one bit of its first write: corruption between decoding and applying."""
    undo: bool = False
    """The next undo raises."""
    flip_undo: bool = False
    """The next undo puts back a wrong bit."""
    stall: bool = False
    """Commits and undos begin and never end, until this is unset and `TableEngine.release` is called."""


@dataclass(eq=False, kw_only=True)
class TableRun:
    """One answer inside the engine."""

    request: CompletionRequest
    origin: Origin
    limit: int
    chain: bytes
    """Stands for the KV so far."""
    steps: "asyncio.Queue[TokenStep | SlackwaterError | None]" = field(
        default_factory=asyncio.Queue[TokenStep | SlackwaterError | None]
    )
    made: int = 0
    last: int = -1
    """The last token made."""
    finish: Finish | None = None
    ended: bool = False

    def end(self, finish: Finish | None, last: SlackwaterError | None = None) -> None:
        """End it, once: with a finish, or with an error that its reader is given."""
        if not self.ended:
            self.ended = True
            self.finish = finish
            self.steps.put_nowait(last)


class TableAnswer:
    """See `slackwater.rollout.completer.Answer`."""

    def __init__(self, run: TableRun) -> None:
        self._run = run

    @property
    def origin(self) -> Origin:
        """See `Answer.origin`."""
        return self._run.origin

    @property
    def finish(self) -> Finish | None:
        """See `Answer.finish`."""
        return self._run.finish

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        """See `Answer.__aiter__`."""
        steps = self._run.steps
        while not (self._run.ended and steps.empty()) and (item := await steps.get()) is not None:
            if isinstance(item, SlackwaterError):
                raise item
            yield item
            if item.finish is not None:
                return

    async def aclose(self) -> None:
        """See `Answer.aclose`."""
        self._run.end(Finish.ABORT)


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
        self._runs: list[TableRun] = []
        self._controls: deque[tuple[Callable[[], CommitReport], asyncio.Future[CommitReport]]] = deque()
        self._last: TableStaged | None = None
        self._generation = 0
        self._seeds = count(1)
        self._cached: set[tuple[int, ...]] = set()
        self._steps_allowed: int | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._closed = False

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
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        live = sum(not run.ended for run in self._runs)
        active = min(live, self._slots)
        failure = "the engine is closed" if self._closed else ""
        return EngineStats(version=self._version, active=active, waiting=live - active, failure=failure)

    async def generate(self, request: CompletionRequest) -> Answer:
        """See `Engine.generate`."""
        self._check_open()
        room = self._window - len(request.prompt_ids)
        if room < 1:
            raise InvalidInputError(f"the prompt has {len(request.prompt_ids)} tokens, the window {self._window}")
        if any(not 0 <= token < VOCAB_SIZE for token in (*request.prompt_ids, *request.forced_ids)):
            raise InvalidInputError(f"a token id is outside the vocabulary of {VOCAB_SIZE}")
        seed = next(self._seeds) if request.sampling.seed is None else request.sampling.seed
        wanted = len(request.forced_ids) or request.sampling.max_tokens
        run = TableRun(
            request=request,
            origin=replace(self._origin, seed=seed),
            limit=min(wanted, room),
            chain=_prompt_chain(request.prompt_ids),
        )
        self._runs.append(run)
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

    async def commit(self, staged: Staged, version: Version) -> CommitReport:
        """See `Engine.commit`."""
        ours = _ours(staged)
        return await self._between_steps(lambda: self._commit(ours, version))

    async def undo(self, staged: Staged, version: Version) -> CommitReport:
        """See `Engine.undo`."""
        ours = _ours(staged)
        return await self._between_steps(lambda: self._undo(ours, version))

    async def abort_all(self) -> int:
        """See `Engine.abort_all`."""
        live = [run for run in self._runs if not run.ended]
        for run in live:
            run.end(Finish.ABORT)
        return len(live)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        await self.abort_all()
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        for _, future in self._controls:
            if not future.done():
                future.set_exception(SwapError("the engine was closed"))
        self._controls.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is closed")

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

    def _commit(self, staged: TableStaged, version: Version) -> CommitReport:
        fail_at, self.faults.commit_at_write = self.faults.commit_at_write, None
        flip, self.faults.flip_bit = self.faults.flip_bit, False
        if staged.generation != self._generation:
            raise SwapError("these writes were staged on other weights")
        for index, write in enumerate(staged.writes):
            if index == fail_at:
                self._restore(staged)
                raise SwapError(f"the commit failed at write {index}, {write.name!r}")
            write.put(self._weights[write.name])
        if fail_at is not None and fail_at >= len(staged.writes):
            self._restore(staged)
            raise SwapError("the commit failed after its last write")
        if flip and staged.writes:
            self._spoil(staged.writes[0])
        self._last = staged
        self.commits += 1
        return self._flip(staged, version)

    def _undo(self, staged: TableStaged, version: Version) -> CommitReport:
        fail, self.faults.undo = self.faults.undo, False
        flip, self.faults.flip_undo = self.faults.flip_undo, False
        if fail or staged is not self._last:
            raise SwapError("this is not the last commit" if not fail else "the undo failed")
        self._restore(staged)
        if flip and staged.writes:
            self._spoil(staged.writes[0])
        self._last = None
        return self._flip(staged, version)

    def _restore(self, staged: TableStaged) -> None:
        for write, saved in zip(staged.writes, staged.saved, strict=True):
            write.tile.put(self._weights[write.name], saved)

    def _spoil(self, write: TileWrite) -> None:
        self._weights[write.name][write.tile.start] ^= 1

    def _flip(self, staged: TableStaged, version: Version) -> CommitReport:
        begun = time.perf_counter()
        self._version = version
        self._stamp = self.stamp
        self._generation += 1
        self._cached.clear()
        for run in self._runs:
            exact = run.request.policy.exact_version
            if run.made and exact is not None and exact != version:
                run.end(Finish.POLICY_CHANGED)
        written = sum(write.values.nbytes for write in staged.writes)
        return CommitReport(
            pause_s=time.perf_counter() - begun,
            bytes_written=written,
            in_flight=self.stats().active,
        )

    def _kick(self) -> None:
        self._wake.set()
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            stepped = self._step()
            self._settle_controls()
            if not stepped:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(0)

    def _settle_controls(self) -> None:
        while self._controls and not self.faults.stall:
            change, future = self._controls.popleft()
            if future.done():  # its caller was cancelled before the boundary: nothing changes
                continue
            try:
                future.set_result(change())
            except SlackwaterError as error:
                future.set_exception(error)

    def _step(self) -> bool:
        """One token for each active answer; False where there is nothing to do."""
        self._runs = [run for run in self._runs if not run.ended]
        if not self._runs or self._steps_allowed == 0 or (self.faults.stall and self._controls):
            return False
        if self._steps_allowed is not None:
            self._steps_allowed -= 1
        for run in self._runs[: self._slots]:
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
            run.origin = self._prefilled(run)
        token, logprob = self._next(run)
        run.made += 1
        logprob = 0.0 if request.sampling.temperature == 0 else logprob
        finish = _finish(run, token)
        some = bool(request.sampling.top_logprobs)
        run.steps.put_nowait(
            TokenStep(
                token_id=token,
                logprob=logprob,
                version=self._version,
                top_ids=(token,) if some else (),
                top_logprobs=(logprob,) if some else (),
                finish=finish,
            )
        )
        if finish is not None:
            run.finish = finish
            run.ended = True

    def _next(self, run: TableRun) -> tuple[int, float]:
        """A run's next token and its log-probability; takes the token into the run's KV."""
        forced = run.request.forced_ids
        token = forced[run.made] if forced else _draw(run.chain, self._stamp, run.origin.seed)
        run.chain = _extend(run.chain, self._stamp, token)
        return token, -1.0 - run.chain[8] / 256

    def _prefilled(self, run: TableRun) -> Origin:
        prompt = run.request.prompt_ids
        cached = len(prompt) if prompt in self._cached else 0
        self._cached.add(prompt)
        return replace(run.origin, prompt_version=self._version, cached_tokens=cached)


def _finish(run: TableRun, token: int) -> Finish | None:
    if run.request.forced_ids and run.made == len(run.request.forced_ids):
        return Finish.STOP
    if token in run.request.sampling.stop_token_ids:
        return Finish.STOP
    return Finish.LENGTH if run.made >= run.limit else None


def _ours(staged: Staged) -> TableStaged:
    if not isinstance(staged, TableStaged):
        raise SwapError("these writes were staged by another engine")
    return staged
