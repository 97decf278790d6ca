"""What ranks tell each other while they publish, and errors on their way between them."""

from collections.abc import Mapping
from typing import Final, Self

import msgspec

from slackwater.checkpoint.manifest import Manifest
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
    anchor: bool = False
    anchor_every: int = 1
    failure: Failure | None = None


class Part(msgspec.Struct, frozen=True):
    """What a rank has ready."""

    manifest: Manifest | None = None
    names: tuple[str, ...] = ()
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
