"""The embedded engine: a core on a thread of its own, behind the engine seam."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.clock import Clock, SystemClock
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import CommitReport, EngineDescription, EngineStats, Proof, Staged
from slackwater.engine.scatter import warm
from slackwater.engine.torch import sampler
from slackwater.engine.torch.answer import TorchAnswer
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.grammars import Grammars, Matching
from slackwater.engine.torch.loop import StepLoop
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.sequence import Began, Ended, Event, Made
from slackwater.engine.torch.weights import StagedWrites, WeightBits
from slackwater.errors import InvalidInputError, ReplicaLostError, SlackwaterError, SwapError, UnavailableError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import Finish, Origin
from slackwater.rollout.request import CompletionRequest

DEFAULT_WINDOW: Final = 4096
"""Longest window that is served unless a longer one is asked for."""
_LEAST_KV: Final = 2

_Value = TypeVar("_Value")


class TorchEngine:
    """See `slackwater.engine.base.Engine`. Made by `open`, on the event loop that uses it."""

    def __init__(self, model: LoadedModel, core: Core, *, grammars: Grammars, description: EngineDescription,
                 origin: Origin, threads: int, clock: Clock) -> None:  # fmt: skip
        self._weights: WeightBits | None = WeightBits(model.parameters, model.specs)
        self._core: Core | None = core
        self._grammars: Final = grammars
        self._description: Final = description
        self._origin: Final = origin
        self._clock: Final = clock
        self._answers: Final[dict[int, TorchAnswer]] = {}
        self._keys: Final = count()
        self._failure = ""
        self._version = core.version
        self._events: Final = asyncio.get_running_loop()
        self._loop: Final = StepLoop(
            core,
            threads=threads,
            deliver=lambda events: self._on_event_loop(lambda: self._deliver(events)),
            died=lambda error: self._on_event_loop(lambda: self._die(error)),
        )
        self._loop.start()

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        version: Version,
        run: RunId,
        replica: ReplicaId,
        boot: BootId,
        slots: int = 16,
        threads: int = 1,
        window: int | None = None,
        batch_invariant: bool = False,
        kv_tokens: int | None = None,
        clock: Clock | None = None,
    ) -> "TorchEngine":
        """Load a Hugging Face folder and begin to serve it as ``version``.

        Args:
            folder: config.json, safetensors, perhaps generation_config.json; tokenizer.json, for grammars.
            version: Label of the folder's weights.
            run: The lineage that the label counts in.
            replica: Named as the origin of every answer.
            boot: Likewise.
            slots: Answers decoded at once.
            threads: Of torch. It changes this process's setting; other threads should keep off torch.
            window: Most tokens of prompt and completion; the model's, up to `DEFAULT_WINDOW`, by default.
            batch_invariant: No bit of an answer depends on who else is served or on shared prefixes. Slower; see
                `slackwater.engine.torch.batch.Shaping`.
            kv_tokens: Most positions of KV in use, at least 2; the window is cut to it. Over it the answers that were
                seated last give way, and go on later. By default it is ``slots`` times the window.
            clock: Measures pauses.

        Raises:
            NotFoundError: The folder lacks a file.
            CorruptError: A file can't be parsed.
            UnsupportedError: The model isn't supported.
            InvalidInputError: The window is longer than the model's, slots or threads aren't positive, or there is KV
                for less than a prompt's token and an answer's.
        """
        if slots < 1 or threads < 1:
            raise InvalidInputError("slots and threads must be positive", hint="give at least 1 of each")
        model = await asyncio.to_thread(load, folder)
        served = min(model.window, DEFAULT_WINDOW) if window is None else window
        if not 1 < served <= model.window:
            raise InvalidInputError(f"a window of {served} doesn't fit the model", hint=f"2 to {model.window}")
        if kv_tokens is not None and kv_tokens < _LEAST_KV:
            raise InvalidInputError(f"KV for {kv_tokens} tokens serves nobody", hint=f"give at least {_LEAST_KV}")
        shaping = Shaping(slots=slots, invariant=batch_invariant)
        # Compiling stops every thread for seconds: here nobody is served yet.
        await asyncio.to_thread(warm, {spec.bits_dtype for spec in model.specs.values()})
        await asyncio.to_thread(sampler.warm)
        core = await asyncio.to_thread(
            Core, model, shaping, window=served, version=version, threads=threads, kv_tokens=kv_tokens
        )
        description = _describe(model, core, slots=slots, numerics=model.numerics(f"{shaping}, {threads} threads"))
        origin = Origin(replica=replica, boot=boot, run=run, seed=0)
        grammars = await asyncio.to_thread(Grammars, folder, ends=model.eos_token_ids, vocabulary=model.vocab_size)
        return cls(model, core, grammars=grammars, description=description, origin=origin,
                   threads=threads, clock=clock or SystemClock())  # fmt: skip

    def describe(self) -> EngineDescription:
        """See `Engine.describe`."""
        return self._description

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        core = self._core
        active = core.active if core else 0
        return EngineStats(
            version=core.version if core else self._version,
            active=active,
            waiting=max(0, len(self._answers) - active),
            kv_used=core.kv_used if core else 0,
            preemptions=core.preemptions if core else 0,
            failure=self._failure,
        )

    async def generate(self, request: CompletionRequest, *, ahead: bool = False) -> TorchAnswer:
        """See `Engine.generate`."""
        core = self._living()
        core.check(request)
        matching = await self._matching(request)
        core = self._living()  # it may have been closed meanwhile
        key = next(self._keys)
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        answer = TorchAnswer(self._origin_of(seed), abandon=lambda: self._abandon(key))
        self._answers[key] = answer
        self._loop.between_steps(lambda: core.add(key, request, seed=seed, ahead=ahead, matching=matching))
        return answer

    async def _matching(self, request: CompletionRequest) -> Matching | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        ids = request.prompt_ids
        return await self._grammars.begin(grammar, ids[len(ids) - request.continued :])

    def tensors(self) -> Mapping[str, TensorSpec]:
        """See `Engine.tensors`."""
        return self._bits().specs

    def read(self, name: str, tile: Tile) -> Bits:
        """See `Engine.read`."""
        return self._bits().read(name, tile)

    async def stage(self, writes: Sequence[TileWrite]) -> Staged:
        """See `Engine.stage`."""
        return await asyncio.to_thread(self._bits().stage, writes)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        core = self._living()
        try:
            begun = await self._between_steps(core.drain)
            # These and no later ones: whoever ends this drain meanwhile lets others begin, and they never cease.
            for answer in [self._answers[key] for key in begun if key in self._answers]:
                await answer.ended()
        except asyncio.CancelledError:
            self.proceed()
            raise

    def proceed(self) -> None:
        """See `Engine.proceed`."""
        if self._core and not self._failure:
            self._loop.between_steps(self._core.proceed)

    async def commit(
        self,
        staged: Staged,
        version: Version,
        *,
        in_flight: InFlight = InFlight.CONTINUE,
        proof: Proof | None = None,
    ) -> CommitReport:
        """See `Engine.commit`."""
        weights = self._bits()
        return await self._exchange(lambda: weights.commit(_ours(staged), proof), version, in_flight, spoilt=False)

    async def undo(
        self, staged: Staged, version: Version, *, in_flight: InFlight = InFlight.CONTINUE, spoilt: bool = False
    ) -> CommitReport:
        """See `Engine.undo`."""
        weights = self._bits()
        return await self._exchange(lambda: weights.undo(_ours(staged)), version, in_flight, spoilt=spoilt)

    async def abort_all(self) -> int:
        """See `Engine.abort_all`."""
        core = self._living()

        def work() -> int:
            events = core.abort_all()
            self._on_event_loop(lambda: self._deliver(events))
            return len(events)

        return await self._between_steps(work)

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._core is None:
            return
        core, self._version, self._core = self._core, self._core.version, None
        self._failure = self._failure or "closed"
        self._grammars.close()
        self._loop.stop()
        await asyncio.to_thread(self._loop.join)
        core.close()
        self._loop.refuse_rest(self._unavailable())
        for answer in self._answers.values():
            answer.end(Finish.ABORT)
        self._answers.clear()
        self._weights = None

    async def _exchange(
        self, write: Callable[[], int], version: Version, in_flight: InFlight, *, spoilt: bool
    ) -> CommitReport:
        core = self._living()

        def work() -> CommitReport:
            began = self._clock.monotonic()
            try:
                written = write()
            finally:
                core.proceed()
            events = core.relabel(version, in_flight=in_flight, spoilt=spoilt)
            pause = self._clock.monotonic() - began
            self._on_event_loop(lambda: self._deliver(events))
            kept = core.active + core.preempted
            return CommitReport(pause_s=pause, bytes_written=written, in_flight=kept, ended=len(events))

        try:
            return await self._between_steps(work)
        except asyncio.CancelledError:
            self.proceed()  # it may not have come to its turn
            raise

    async def _between_steps(self, work: Callable[[], _Value]) -> _Value:
        return await asyncio.wrap_future(self._loop.between_steps(work))

    def _abandon(self, key: int) -> None:
        self._answers.pop(key, None)
        core = self._core
        if core and not self._failure:
            self._loop.between_steps(lambda: core.abort(key))

    def _on_event_loop(self, call: Callable[[], None]) -> None:
        try:
            self._events.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed: nobody is left to read
            self._loop.stop()

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            answer = self._answers.get(event.key)
            if answer is None:
                continue  # closed by its reader while this step ran
            _tell(answer, event)
            if answer.over:
                del self._answers[event.key]

    def _die(self, error: Exception) -> None:
        self._failure = self._failure or f"its loop died: {error}"
        self._loop.refuse_rest(self._unavailable())
        lost = ReplicaLostError(f"the engine died: {error}", hint="start the replica again")
        for answer in self._answers.values():
            answer.fail(lost)
        self._answers.clear()

    def _unavailable(self) -> SlackwaterError:
        return UnavailableError(f"the engine doesn't answer: {self._failure}", hint="start the replica again")

    def _living(self) -> Core:
        if self._core is None or self._failure:
            raise self._unavailable()
        return self._core

    def _bits(self) -> WeightBits:
        if self._weights is None:
            raise self._unavailable()
        return self._weights

    def _origin_of(self, seed: int) -> Origin:
        return replace(self._origin, seed=seed)


def _describe(model: LoadedModel, core: Core, *, slots: int, numerics: str) -> EngineDescription:
    return EngineDescription(
        model=model.architecture,
        window=core.window,
        vocab_size=model.vocab_size,
        slots=slots,
        numerics=numerics,
        eos_token_ids=model.eos_token_ids,
        routing=model.routing,
        kv_tokens=core.kv_tokens,
    )


def _ours(staged: Staged) -> StagedWrites:
    if not isinstance(staged, StagedWrites):
        raise SwapError("these writes were staged by another engine", hint="stage them on this one")
    return staged


def _tell(answer: TorchAnswer, event: Event) -> None:
    if isinstance(event, Began):
        answer.began(cached_tokens=event.cached_tokens, prompt_version=event.prompt_version)
    elif isinstance(event, Made):
        answer.push(event.step)
    elif isinstance(event, Ended):
        answer.end(event.finish)
    else:
        answer.fail(event.error)
