"""The engine seam: what a replica needs of an inference engine, and nothing about where bytes come from.

An engine generates under one set of weights and can exchange them between two steps. The order of an exchange:

1. ``read`` old bits while serving: the caller decodes and checks the delta against them.
2. ``stage`` while serving: the engine translates to its own storages and saves what undo needs.
3. ``drain``, where answers under way are to end under the old weights.
4. ``commit``: at the next step boundary, write everything, flip the label and the cache namespace.
5. ``undo`` puts back what the last commit replaced, at a step boundary too.

Implementations live on one event loop; methods may be called concurrently where they don't say otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.config.in_flight import InFlight
from slackwater.ids import Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing

Proof = Callable[[], str | None]
"""Looks at the bits that a commit has written, and says what is wrong with them. Blocks; any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDescription:
    """What never changes while an engine runs."""

    model: str
    """Architecture, as the checkpoint's config names it."""
    window: int
    """Most tokens of prompt and completion together."""
    vocab_size: int
    slots: int
    """Answers decoded at once; more wait in order."""
    numerics: str
    """Fingerprint of the arithmetic: library versions, dtype, kernel shapes, threads. Equal fingerprints on equal
    hardware give equal log-probabilities."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, from the checkpoint's generation config."""
    routing: Routing | None = None
    """What its routers choose from; None: it has none, or doesn't tell."""
    kv_tokens: int | None = None
    """Most positions of KV that answers hold together; None: it doesn't tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """One moment of an engine."""

    version: Version
    """The label of the weights in place."""
    active: int
    """Answers in a slot."""
    waiting: int
    """Answers admitted and waiting for a slot."""
    kv_used: int = 0
    """Positions of KV in use, those kept for later prompts too; 0 where it doesn't tell."""
    preemptions: int = 0
    """How often an answer under way had to leave its slot to others, to go on later."""
    failure: str = ""
    """Why it no longer answers, for people; empty while it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """What a commit or an undo did."""

    pause_s: float
    """Seconds between the two steps that the exchange stood between: no token was made in it."""
    bytes_written: int
    in_flight: int
    """Answers that went on across it."""
    ended: int = 0
    """Answers that it ended."""


class Staged(Protocol):
    """Writes that an engine has translated and holds ready, with what undoing them needs."""

    @property
    def num_bytes(self) -> int:
        """Host memory held: O(what changes), never O(model) for a sparse delta."""
        ...


class TileReader(Protocol):
    """Reads weights back, tile by tile."""

    def read(self, name: str, tile: Tile) -> Bits:
        """The bits now in place, without a copy where the engine can: ``tile.count`` elements, not to be written.
        Valid until the next commit or undo begins. Any thread; the caller doesn't overlap it with those.

        Raises:
            NotFoundError: The engine holds no such tensor.
            UnsupportedError: This engine can't read its weights back.
        """
        ...


class Engine(TileReader, Protocol):
    """See the module's docstring for the order of an exchange."""

    def describe(self) -> EngineDescription:
        """What never changes. Cheap, any thread."""
        ...

    def stats(self) -> EngineStats:
        """This moment. Cheap, any thread."""
        ...

    async def generate(self, request: CompletionRequest, *, ahead: bool = False) -> Answer:
        """Queue a request; tokens carry the version that samples them. The policy is checked in the step that
        samples the first token: unmet, iteration raises PolicyUnmetError before any token. `InFlight` says what a
        commit does to answers that have tokens; those that have none start over under the new weights, so one
        version builds a whole prompt's KV.

        Args:
            request: What is asked for.
            ahead: Before all that wait: for the replica's own checks.

        Raises:
            ContextLengthError: Prompt plus one token exceeds the window. ``max_tokens`` past the window is cut to it;
                the answer then ends with ``Finish.LENGTH``.
            InvalidInputError: A token id is outside the vocabulary, or the grammar can't be followed.
            UnsupportedError: It has a grammar, and the engine can't follow any.
            UnavailableError: The engine is closed or its loop died.
        """
        ...

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The checkpoint tensors that the engine holds, by canonical name. A tied tensor appears once."""
        ...

    async def stage(self, writes: Sequence[TileWrite]) -> Staged:
        """Translate writes and save the bits they will replace, while serving. Nothing changes yet.

        Raises:
            NotFoundError: A write names a tensor that the engine does not hold.
            InvalidInputError: A write doesn't fit its tensor.
        """
        ...

    async def drain(self) -> None:
        """Give no further answer its first token, and return once every answer that has one has ended.

        Answers that have none wait, until the next commit or undo, whatever comes of it, or until `proceed`. Cancelled,
        it is as if `proceed` were called.
        """
        ...

    def proceed(self) -> None:
        """End a drain without an exchange. Nothing where there is none."""
        ...

    async def commit(
        self,
        staged: Staged,
        version: Version,
        *,
        in_flight: InFlight = InFlight.CONTINUE,
        proof: Proof | None = None,
    ) -> CommitReport:
        """At the next step boundary: write all of ``staged``, label the weights ``version``, flip the cache
        namespace. All or nothing: on any error the old bits are put back before it is raised.

        Args:
            staged: Writes that were staged on the weights in place.
            version: The new label.
            in_flight: What becomes of answers that have tokens. For ``DRAIN`` they have ended by now: what is left is
                treated as for ``ABORT``.
            proof: Called once everything is written, before the label flips; no token is made meanwhile. If it finds
                something wrong the commit fails.

        Raises:
            SwapError: It failed; the old version is in place and serves.
            UnavailableError: The engine died; nobody knows what its memory holds.
        """
        ...

    async def undo(
        self, staged: Staged, version: Version, *, in_flight: InFlight = InFlight.CONTINUE, spoilt: bool = False
    ) -> CommitReport:
        """Put back what the commit of ``staged``, the last one, replaced, and label the weights ``version``.

        Args:
            staged: The last commit's.
            version: The label from before it.
            in_flight: As for `commit`.
            spoilt: The weights that go were not what their label says: answers with tokens of theirs end in an
                UnavailableError, and their KV is never reused.

        Raises:
            SwapError: ``staged`` isn't the last commit.
            UnavailableError: As for `commit`.
        """
        ...

    async def abort_all(self) -> int:
        """End every answer with ``Finish.ABORT``; tokens so far stand. Returns how many."""
        ...

    async def close(self) -> None:
        """Abort everything, stop the loop, free the weights. Idempotent."""
        ...
