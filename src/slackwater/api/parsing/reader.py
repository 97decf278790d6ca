"""Takes an answer's text apart as it comes. What it says doesn't depend on how the text was cut."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from slackwater.api.parsing.formats import Call, Item, ReasoningFormat, Schemas, Text, Thought, ToolFormat
from slackwater.api.text import tail_of

MAX_TRIES: Final = 16
"""Closing marks within the values of one call that are passed over."""


class _Mode(Enum):
    START = auto()
    THOUGHT = auto()
    CONTENT = auto()
    CALL = auto()


class ReplyReader:
    """One answer's text, in pieces, to reasoning, content and calls.

    A call comes at once when it has ended and is well-formed; what isn't stays content, marks included. Line breaks
    around reasoning and blanks around calls are left out; so are the marks of a format's scaffold.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: None leaves calls in the content.
        schemas: Of the request's tools.
        is_open: Whether the prompt has opened the reasoning already.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        schemas: Schemas,
        *,
        is_open: bool = False,
    ) -> None:
        self._think_mark, self._think_end = (reasoning.opener, reasoning.closer) if reasoning else ("", "")
        self._call_mark, self._call_end = (tools.opener, tools.closer) if tools else ("", "")
        self._tools = tools
        self._schemas = schemas
        self._mode = _Mode.CONTENT if reasoning is None else _Mode.THOUGHT if is_open else _Mode.START
        scaffold = (*(reasoning.scaffold if reasoning else ()), *(tools.scaffold if tools else ()))
        self._marks = scaffold if tools is None else (tools.opener, *scaffold)
        self._text = ""
        """What isn't decided yet."""
        self._more: list[str] = []
        """What comes after that within a call, not looked at."""
        self._from = 0
        """Where the search for a call's end goes on."""
        self._tries = 0
        self._blank = ""
        """The end of the content so far, which may be the blank before a call."""
        self._trimmed = "\n" if is_open else ""
        """Characters that are left out at the beginning of what comes next."""
        self._called = False

    def push(self, text: str) -> list[Item]:
        """Take a piece of text; returns what has become certain, often nothing."""
        if not text:
            return []
        if self._mode is _Mode.CALL and not self._may_end(text):
            self._more.append(text)
            return []
        self._text = "".join((self._text, *self._more, text))
        self._more.clear()
        return self._advance(final=False)

    def flush(self) -> list[Item]:
        """The end: what was held back. Call once."""
        self._text = "".join((self._text, *self._more))
        self._more.clear()
        items = self._advance(final=True)
        if self._blank and not self._called:
            items.append(Text(text=self._blank))
        return items

    def _may_end(self, text: str) -> bool:
        reach = len(self._call_end) - 1
        before = self._text[-reach:] + "".join(self._more[-reach:])  # no piece is empty
        return self._call_end in before[-reach:] + text

    def _advance(self, *, final: bool) -> list[Item]:
        items: list[Item] = []
        step = {
            _Mode.START: self._start, _Mode.THOUGHT: self._thought, _Mode.CONTENT: self._content, _Mode.CALL: self._call
        }  # fmt: skip
        while self._text and step[self._mode](items, final):
            pass
        return items

    def _start(self, items: list[Item], final: bool) -> bool:
        """Whether the answer opens its reasoning itself."""
        del items
        bare = self._text.lstrip()
        if bare.startswith(self._think_mark):
            self._enter(_Mode.THOUGHT, bare[len(self._think_mark) :], trimmed="\n")
        elif not final and self._think_mark.startswith(bare):
            return False
        else:
            self._mode = _Mode.CONTENT
        return True

    def _thought(self, items: list[Item], final: bool) -> bool:
        """Reasoning up to its end; the line breaks before that are no part of it, so they wait."""
        end = self._text.find(self._think_end)
        safe = end if end >= 0 else len(self._text) - (0 if final else tail_of(self._text, (self._think_end,)))
        known = self._text[:safe].rstrip("\n")
        if shown := self._trim(known):
            items.append(Thought(text=shown))
        if end < 0:
            self._text = self._text[len(known) :]
            return False
        self._enter(_Mode.CONTENT, self._text[end + len(self._think_end) :], trimmed="\n")
        return True

    def _content(self, items: list[Item], final: bool) -> bool:
        found = [(at, mark) for mark in self._marks if (at := self._text.find(mark)) >= 0]
        if not found:
            held = 0 if final or not self._marks else tail_of(self._text, self._marks)
            self._show(items, self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
            return False
        at, mark = min(found)
        self._show(items, self._text[:at])
        if self._tools and mark == self._call_mark:
            self._begin_call(at)
        else:
            self._text = self._text[at + len(mark) :]
        return True

    def _begin_call(self, at: int) -> None:
        self._enter(_Mode.CALL, self._text[at:], trimmed=self._trimmed)
        self._from, self._tries = len(self._call_mark), 0

    def _call(self, items: list[Item], final: bool) -> bool:
        if self._tools is None:
            return False
        end = self._text.find(self._call_end, self._from)
        after = end + len(self._call_end)
        if end < 0:
            self._from = max(self._from, len(self._text) - len(self._call_end) + 1)
            return final and self._give_up(items, len(self._text), len(self._text))
        inner = self._text[len(self._call_mark) : end]
        call = self._tools.read(inner, self._schemas)
        if call is not None:
            self._called, self._blank = True, ""
            items.append(call)
            self._enter(_Mode.CONTENT, self._text[after:], trimmed=" \t\r\n")
        elif self._tries < MAX_TRIES and self._tools.is_open(inner):
            self._from, self._tries = after, self._tries + 1
        else:
            self._give_up(items, end, after)
        return True

    def _give_up(self, items: list[Item], end: int, after: int) -> bool:
        """No call: content up to the last opener before ``end``, which may be one's, or else up to ``after``."""
        again = self._text.rfind(self._call_mark, 1, end)
        cut = after if again < 0 else again
        self._show(items, self._text[:cut])
        if again < 0:
            self._enter(_Mode.CONTENT, self._text[cut:], trimmed=self._trimmed)
        else:
            self._begin_call(cut)
        return True

    def _enter(self, mode: _Mode, rest: str, *, trimmed: str) -> None:
        self._mode, self._text, self._trimmed = mode, rest, trimmed

    def _show(self, items: list[Item], text: str) -> None:
        whole = self._blank + self._trim(text)
        shown = whole.rstrip() if self._tools else whole
        self._blank = whole[len(shown) :]
        if shown:
            items.append(Text(text=shown))

    def _trim(self, text: str) -> str:
        bare = text.lstrip(self._trimmed) if self._trimmed else text
        if bare:
            self._trimmed = ""
        return bare


def said(items: Sequence[Item]) -> tuple[str, str, tuple[Call, ...]]:
    """Reasoning, content and calls of a whole answer."""
    thoughts = "".join(item.text for item in items if isinstance(item, Thought))
    texts = "".join(item.text for item in items if isinstance(item, Text))
    return thoughts, texts, tuple(item for item in items if isinstance(item, Call))
