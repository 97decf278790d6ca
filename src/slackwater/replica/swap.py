"""The swap machine: how one replica goes from one version to the next. Values in, values out.

The rules, which the table below spells out and `docs/swap.md` draws:

1. One exchange at a time. It begins in ``idle`` and comes back there, or ends in ``retired``.
2. Until ``committed`` nothing has changed: whatever fails, the old version serves on and the exchange is
   forgotten.
3. The label follows the weights: ``version`` changes in ``committed`` and ``undone``, the two events that
   report that the engine exchanged bits, and nowhere else.
4. A commit that fails has put the old bits back by itself. A commit that gives no answer, or whose engine died, is
   not trusted: ``retired``.
5. What was committed is provisional until its bits, read back, have the manifest's digests. If they differ,
   it is undone. An undo that fails, or whose bits differ, retires the replica: it serves nothing any more.
6. Only the last commit can be undone, once.
7. A newer target ends an exchange only before its commit. After it, the exchange finishes first.
8. Several deltas are one exchange, which aims at the last one. If a later one can't be prepared, the exchange is
   shortened: it aims at the one before.
9. Where answers in flight are to end under the old weights, the engine is drained between staging and commit. A newer
   target ends that too.
10. A pair that the table lacks is illegal. It is a bug, and says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from slackwater.errors import InternalError
from slackwater.ids import Version


class Stage(StrEnum):
    """Where an exchange stands."""

    IDLE = "idle"
    """None is under way."""
    PREPARING = "preparing"
    """Bytes are fetched, checked and decoded while the old version serves."""
    STAGED = "staged"
    """The engine holds the writes and what undoing them needs."""
    DRAINING = "draining"
    """Answers under way end under the old weights; later ones wait."""
    COMMITTING = "committing"
    """The engine exchanges the bits at its next step boundary."""
    VERIFYING = "verifying"
    """The new version serves, provisionally; its bits are read back and compared."""
    UNDOING = "undoing"
    """The last commit is being put back."""
    RETIRED = "retired"
    """What the engine holds is unknown: nothing is served. Only a restart helps."""


class Event(StrEnum):
    """What happened to an exchange."""

    BEGIN = "begin"
    """The next version towards the target was chosen."""
    SUPERSEDE = "supersede"
    """The target moved to where this exchange doesn't lead."""
    SHORTENED = "shortened"
    """A delta after the first failed: the exchange makes the version before it."""
    PREPARED = "prepared"
    """The writes are decoded and staged."""
    DRAIN = "drain"
    """The engine is told to let its answers end."""
    COMMIT = "commit"
    """The engine is told to exchange."""
    COMMITTED = "committed"
    """The engine exchanged the bits and resumed."""
    AGREED = "agreed"
    """The bits read back are the manifest's, and the canary's answer is as expected."""
    DIFFERED = "differed"
    """They are not, or it is not, or that could not be found out."""
    ROLL_BACK = "roll_back"
    """The last commit is to be undone."""
    UNDONE = "undone"
    """The old bits are in place again and were read back."""
    FAILED = "failed"
    """The work of this stage raised."""
    SPOILT = "spoilt"
    """The engine's memory isn't what the version in place has, and no swap wrote that."""
    HUNG = "hung"
    """The engine gave no answer by the deadline, or died."""


class Effect(StrEnum):
    """What a transition does to the value."""

    AIM = "aim"
    """Note the version that this exchange makes."""
    FORGET = "forget"
    """Drop that note."""
    RELABEL = "relabel"
    """The new version is in place, provisionally; the old one is what an undo gives."""
    CONFIRM = "confirm"
    """The version in place is what its manifest says."""
    REVERT = "revert"
    """The version before is in place; nothing is left to undo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One row of the table."""

    to: Stage
    effects: tuple[Effect, ...] = ()


def _move(to: Stage, *effects: Effect) -> Move:
    return Move(to=to, effects=effects)


MOVES: Final[Mapping[tuple[Stage, Event], Move]] = MappingProxyType({
    (Stage.IDLE, Event.BEGIN): _move(Stage.PREPARING, Effect.AIM),
    (Stage.IDLE, Event.ROLL_BACK): _move(Stage.UNDOING),
    (Stage.PREPARING, Event.SUPERSEDE): _move(Stage.IDLE, Effect.FORGET),
    (Stage.PREPARING, Event.FAILED): _move(Stage.IDLE, Effect.FORGET),
    (Stage.PREPARING, Event.SPOILT): _move(Stage.RETIRED, Effect.FORGET),
    (Stage.PREPARING, Event.SHORTENED): _move(Stage.PREPARING, Effect.AIM),
    (Stage.PREPARING, Event.PREPARED): _move(Stage.STAGED),
    (Stage.STAGED, Event.SUPERSEDE): _move(Stage.IDLE, Effect.FORGET),
    (Stage.STAGED, Event.DRAIN): _move(Stage.DRAINING),
    (Stage.DRAINING, Event.SUPERSEDE): _move(Stage.IDLE, Effect.FORGET),
    (Stage.DRAINING, Event.FAILED): _move(Stage.IDLE, Effect.FORGET),
    (Stage.DRAINING, Event.COMMIT): _move(Stage.COMMITTING),
    (Stage.STAGED, Event.COMMIT): _move(Stage.COMMITTING),
    (Stage.COMMITTING, Event.FAILED): _move(Stage.IDLE, Effect.FORGET),
    (Stage.COMMITTING, Event.HUNG): _move(Stage.RETIRED, Effect.FORGET),
    (Stage.COMMITTING, Event.COMMITTED): _move(Stage.VERIFYING, Effect.RELABEL, Effect.FORGET),
    (Stage.VERIFYING, Event.AGREED): _move(Stage.IDLE, Effect.CONFIRM),
    (Stage.VERIFYING, Event.DIFFERED): _move(Stage.UNDOING),
    (Stage.UNDOING, Event.UNDONE): _move(Stage.IDLE, Effect.REVERT),
    (Stage.UNDOING, Event.FAILED): _move(Stage.RETIRED),
    (Stage.UNDOING, Event.HUNG): _move(Stage.RETIRED),
})  # fmt: skip
"""Every legal transition. A missing key is an illegal one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One replica's exchange, as a value."""

    version: Version
    """The label of the weights in place."""
    stage: Stage = Stage.IDLE
    goal: Version | None = None
    """The version that the exchange under way makes; None where none is."""
    previous: Version | None = None
    """What an undo gives; None where there is nothing to undo."""
    provisional: bool = False
    """``version`` has been committed and its bits are not compared yet."""

    @property
    def serves(self) -> bool:
        """Whether the weights in place may answer."""
        return self.stage is not Stage.RETIRED

    @property
    def unproven(self) -> frozenset[Version]:
        """Versions that may make tokens now although their bits are not compared with their manifests yet."""
        doubts = {
            self.version if self.provisional else None,
            self.goal if self.stage is Stage.COMMITTING else None,
            self.previous if self.stage is Stage.UNDOING else None,
        }
        return frozenset(version for version in doubts if version is not None)

    @property
    def settles_at(self) -> Version:
        """What is in place once a commit or an undo that is being made is over."""
        if self.stage is Stage.COMMITTING and self.goal is not None:
            return self.goal
        return self.previous if self.stage is Stage.UNDOING and self.previous is not None else self.version

    @property
    def undo_version(self) -> Version | None:
        """What undoing the last commit gives, also while that commit is being made; None: nothing to undo."""
        return self.version if self.stage is Stage.COMMITTING else self.previous

    def after(self, event: Event, goal: Version | None = None) -> "Swap":
        """The exchange after ``event``; ``goal`` belongs to ``begin`` and ``shortened``.

        Raises:
            InternalError: The table has no such transition from here.
        """
        move = MOVES.get((self.stage, event))
        if move is None:
            raise InternalError(f"swap machine: {event.value!r} is illegal in {self.stage.value!r}")
        return replace(_applied(self, move.effects, goal), stage=move.to)


def _applied(swap: Swap, effects: tuple[Effect, ...], goal: Version | None) -> Swap:
    for effect in effects:
        swap = _apply(swap, effect, goal)
    return swap


def _apply(swap: Swap, effect: Effect, goal: Version | None) -> Swap:
    match effect:
        case Effect.AIM:
            return replace(swap, goal=_needed(goal, "a goal"))
        case Effect.FORGET:
            return replace(swap, goal=None)
        case Effect.RELABEL:
            return replace(swap, version=_needed(swap.goal, "a goal"), previous=swap.version, provisional=True)
        case Effect.CONFIRM:
            return replace(swap, provisional=False)
        case Effect.REVERT:
            back = _needed(swap.previous, "a commit to undo")
            return replace(swap, version=back, previous=None, provisional=False)


def _needed(version: Version | None, what: str) -> Version:
    if version is None:
        raise InternalError(f"swap machine: the transition needs {what}")
    return version


def keeps(swap: Swap, target: Version) -> bool:
    """Whether the exchange under way still leads to ``target``.

    A step upwards that doesn't pass the target is kept when the target moves on: a publisher that is faster
    than this replica must not starve it.
    """
    if swap.goal is None or swap.stage not in (Stage.PREPARING, Stage.STAGED, Stage.DRAINING):
        return True
    return swap.goal == target or swap.version < swap.goal < target


def diagram() -> str:
    """The table as a Mermaid state diagram, for `docs/swap.md`."""
    rows = [f"    {stage.value} --> {move.to.value}: {event.value}" for (stage, event), move in MOVES.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> idle", *rows, "    retired --> [*]"])
