"""What an audit finds: classes of damage, and a report that lists it."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from slackwater.errors import AuthError, CorruptError, NotFoundError, UnavailableError, WrongBaseError

_Result = TypeVar("_Result")

Depth = Literal["manifest", "objects", "tensors"]
"""``manifest``: every manifest to the anchor, and that each fits the one before. ``objects``: also the size and SHA-256
of every object that they name. ``tensors``: also every tile and every element sum, of the version rebuilt."""

Damage = Literal["missing", "manifest", "lineage", "object", "tensor", "unavailable"]
"""``missing``: a manifest or an object isn't there. ``manifest``: one breaks the format. ``lineage``: one doesn't fit
what it was made on. ``object``: one has another size or SHA-256. ``tensor``: bits aren't what their digests say.
``unavailable``: the bucket didn't answer or refused, so that the rest isn't known."""

MAX_FINDINGS: Final = 100
"""What a report lists; it counts the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One piece of damage."""

    damage: Damage
    where: str
    """A key, a file, or a tensor and its tile."""
    what: str


@dataclass(kw_only=True, slots=True)
class Report:
    """What an audit has found so far."""

    depth: Depth
    counts: Counter[Damage] = field(default_factory=Counter[Damage])
    """All that was found."""
    findings: list[Finding] = field(default_factory=list[Finding])
    """The first `MAX_FINDINGS` of it."""
    num_manifests: int = 0
    """Manifests that are as they should be: they can be read, and fit what they were made on."""
    num_objects: int = 0
    """Objects that are as their manifests say."""
    num_bytes: int = 0
    """Bytes of those objects, or of the tensors of a folder without manifests."""
    num_tiles: int = 0
    """Tiles that were read."""
    state: str | None = None
    """State digest of the snapshot, as its manifest says; of a folder without manifests, as it was read. None where it
    isn't known: its manifest can't be taken, or no anchor leads there."""

    @property
    def is_rebuildable(self) -> bool:
        """Whether all manifests and objects are there and whole, so far."""
        return self.counts.keys() <= {"tensor"}

    def note(self, damage: Damage, where: str, what: str) -> None:
        """Add a finding."""
        self.counts[damage] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(damage=damage, where=where, what=what))

    @contextmanager
    def noting(self, damage: Damage, where: str) -> Generator[None]:
        """Note what the block raises; wrong bytes are of the class ``damage``. A bucket that can't be asked goes on up.

        Raises:
            UnavailableError: The bucket didn't answer.
            AuthError: It refused.
        """
        try:
            yield
        except (UnavailableError, AuthError) as error:
            self.note("unavailable", where, error.message)
            raise
        except NotFoundError as error:
            self.note("missing", where, error.message)
        except WrongBaseError as error:
            self.note("lineage", where, error.message)
        except CorruptError as error:
            self.note(damage, where, error.message)

    def attempt(self, damage: Damage, where: str, work: Callable[[], _Result]) -> _Result | None:
        """Do something as `noting` does; None where it raised what was noted."""
        done: list[_Result] = []
        with self.noting(damage, where):
            done.append(work())
        return done[0] if done else None

    @contextmanager
    def until_unavailable(self, where: str) -> Generator[None]:
        """End the block where the bucket can't be asked, and note that, unless `noting` has: it knows the place."""
        try:
            yield
        except (UnavailableError, AuthError) as error:
            if not self.counts["unavailable"]:
                self.note("unavailable", where, error.message)
