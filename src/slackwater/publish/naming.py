"""Whether a source merely names a tensor otherwise: what a lineage would call it.

Trainers wrap models, save text models without the prefix of the whole, or rename modules. No table of models: names
are compared from their ends, segment by segment.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

_TRIES: Final = 64
"""Names that are looked for: where so many have no counterpart, it is another model."""
_ALIKE: Final = 1024
"""Most names with the same numbers and end that are compared; models have a few dozen in a layer."""
_TELLS_NOTHING: Final = frozenset({"weight", "bias"})
"""Ends that modules of any kind share."""


def find_renamed(unknown: Iterable[str], missing: Iterable[str]) -> tuple[str, str] | None:
    """The first name of a source, as names rise, that stands for one of the lineage's, and that one.

    Two names are one tensor's if they have the same numbers in the same order (layer, expert), no other has a longer
    common end with either, and that end names a module. Between equal ends the longer common start decides; where
    that leaves two, neither is taken.

    Args:
        unknown: Names that only the source has.
        missing: Names that only the lineage has.

    Examples:
        >>> find_renamed(["model.layers.0.mlp.up_proj.weight"], ["language_model.layers.0.mlp.up_proj.weight"])
        ('model.layers.0.mlp.up_proj.weight', 'language_model.layers.0.mlp.up_proj.weight')
        >>> find_renamed(["model.layers.0.mlp.up_proj.weight"], ["model.layers.1.mlp.up_proj.weight"])
    """
    theirs, ours = _Names(unknown), _Names(missing)
    for name in theirs.sorted[:_TRIES]:
        found = ours.closest(name)
        if found is not None and theirs.closest(found) == name:
            return name, found
    return None


class _Names:
    """Names, to be found by their numbers and last segment."""

    def __init__(self, names: Iterable[str]) -> None:
        self.sorted: Final = sorted(names)
        self._alike: Final[dict[tuple[str, ...], list[str]]] = defaultdict(list)
        for name in self.sorted:
            self._alike[_kind(name)].append(name)

    def closest(self, name: str) -> str | None:
        """The one name with the longest common end; None where there is none, or two, or too many to compare."""
        alike = self._alike.get(_kind(name), ())
        ranked = sorted(((_likeness(name, other), other) for other in alike[:_ALIKE]), reverse=True)
        if not ranked or len(alike) > _ALIKE or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
            return None
        (end, _), found = ranked[0]
        return found if end > 1 or _last(name) not in _TELLS_NOTHING else None


def _kind(name: str) -> tuple[str, ...]:
    *_, last = segments = name.split(".")
    return (*(segment for segment in segments if segment.isdecimal()), last)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _likeness(one: str, other: str) -> tuple[int, int]:
    """Segments that two names have in common at their ends, and at their starts."""
    left, right = one.split("."), other.split(".")
    return _common(left[::-1], right[::-1]), _common(left, right)


def _common(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
