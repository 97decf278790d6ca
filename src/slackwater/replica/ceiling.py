"""Up to where a replica that starts goes, where the newest versions are refused. Values in, values out."""

from dataclasses import dataclass, replace

from slackwater.ids import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Versions whose canary was off, and those that can't be reached but through one."""

    refused: frozenset[Version] = frozenset()

    def without(self, first: Version, last: Version) -> "Ceiling":
        """The same, with ``first`` to ``last`` refused too."""
        return replace(self, refused=self.refused | {Version(number) for number in range(first, last + 1)})

    def under(self, head: Version) -> Version:
        """The newest version up to ``head`` that isn't refused; ``head`` where all are."""
        newest = next((number for number in range(head, -1, -1) if number not in self.refused), head)
        return Version(newest)
