"""Value types of the formats, and what answers are taken apart into."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

Properties = Mapping[str, object]
"""JSON schemas of a tool's parameters, by parameter."""
Schemas = Mapping[str, Properties]
"""By the tool's name."""

_NAME: Final = re.compile(r"[^\s<>{}\"'|\uff5c]{1,256}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One well-formed tool call."""

    name: str
    arguments: str
    """One JSON object, as text."""
    id: str | None = None
    """The model's own; None where its format has none."""


Item = Text | Thought | Call


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """How a family marks reasoning. Only what an answer begins with is reasoning."""

    opener: str
    closer: str
    scaffold: tuple[str, ...] = ()
    """Marks around content that are no content."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All that its reader must see."""
        return (self.opener, self.closer, *self.scaffold)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How a family writes tool calls."""

    opener: str
    """Begins one call."""
    closer: str
    """Ends it."""
    read: Callable[[str, Schemas], Call | None]
    """The call between the two; None where that is none. Never raises."""
    is_open: Callable[[str], bool]
    """Whether a value is still open at the end of this beginning of a call, so that a closer there belongs to it."""
    inner: tuple[str, ...] = ()
    """Marks within a call."""
    scaffold: tuple[str, ...] = ()
    """Marks around calls, such as those of a section: no content."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All that its reader must see."""
        return (self.opener, self.closer, *self.inner, *self.scaffold)


def is_name(text: str) -> bool:
    """Whether a tool may be called so: no blanks, quotes or brackets, which are left-overs of marks."""
    return _NAME.fullmatch(text) is not None
