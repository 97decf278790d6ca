"""What ranks tell each other while they publish, and errors on their way between them."""

from collections.abc import Mapping
from typing import Final, Literal, Self

import msgspec

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.pieces import Piece, Pieces
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import SlackwaterError
from slackwater.ids import Version


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks."""

    kind: str
    message: str
    hint: str = ""
    is_unsure: bool = False
    """Whether the commit may have happened all the same."""

    @classmethod
    def of(cls, error: SlackwaterError) -> Self:
        """What an error says."""
        return cls(kind=error.kind, message=error.message, hint=error.hint)

    def error(self) -> SlackwaterError:
        """The error as it is raised there."""
        return _kinds().get(self.kind, SlackwaterError)(self.message, hint=self.hint)


STOPPED: Final = Failure(kind=SlackwaterError.kind, message="it stopped without telling why; see its log")


class Turn(msgspec.Struct, frozen=True):
    """What rank 0 decides for all."""

    head: Version | None = None
    label: tuple[int, str] = (0, "")
    """Step and time."""
    canary: Canary | None = None
    anchor: bool = False
    failure: Failure | None = None


class Offer(msgspec.Struct, frozen=True):
    """What a rank is about to publish."""

    names: tuple[str, ...] = ()
    """The tensors that it has whole."""
    pieces: tuple[tuple[TensorSpec, Piece], ...] = ()
    """Those of which it has a piece, and which."""
    failure: Failure | None = None

    @property
    def held(self) -> Pieces:
        """The pieces, by their tensors' names."""
        return {spec.name: piece for spec, piece in self.pieces}


class Gather(msgspec.Struct, frozen=True):
    """A tensor whose pieces all ranks send to rank 0, and in how many rounds."""

    name: str
    rounds: int
    most: int
    """Bytes that a rank sends in each."""


class Plan(msgspec.Struct, frozen=True):
    """What all ranks do, once each has told what it has."""

    kind: Literal["anchor", "delta"] = "delta"
    gathers: tuple[Gather, ...] = ()
    """What an anchor needs whole, in this order."""
    failure: Failure | None = None


class Part(msgspec.Struct, frozen=True):
    """What a rank has ready: a manifest of its own; with neither that nor a failure it stopped for another's."""

    manifest: Manifest | None = None
    failure: Failure | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What became of it."""

    manifest: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


def _kinds() -> Mapping[str, type[SlackwaterError]]:
    """The error tree by machine code."""
    found: dict[str, type[SlackwaterError]] = {}
    waiting: list[type[SlackwaterError]] = [SlackwaterError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.kind, kind)
        waiting += kind.__subclasses__()
    return found
