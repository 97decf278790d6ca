"""One chat answer as OpenAI's shapes word it: content, reasoning and calls, whole or piece by piece. Pure."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from slackwater.api.parsing.formats import Call, Item, Text, Thought
from slackwater.api.parsing.reader import ReplyReader, said
from slackwater.api.replies import AssistantMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from slackwater.ids import RequestId

_ID_BYTES: Final = 12


class Voice:
    """One answer.

    Args:
        reader: Takes its text apart; None leaves all of it in the content.
        request_id: Unique; ids of calls are made from it where the model names none.
    """

    def __init__(self, reader: ReplyReader | None, request_id: RequestId) -> None:
        self.calls = 0
        """Calls so far."""
        self._reader = reader
        self._request_id = request_id

    def message(self, text: str) -> AssistantMessage:
        """The whole answer from its whole text. Call it instead of `deltas`."""
        if self._reader is None:
            return AssistantMessage(content=text)
        thoughts, content, calls = said([*self._reader.push(text), *self._reader.flush()])
        made = tuple(
            ToolCall(id=self._next_id(call), function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in calls
        )
        return AssistantMessage(
            content=None if not content and (thoughts or made) else content,
            reasoning_content=thoughts or UNSET,
            tool_calls=made or UNSET,
        )

    def deltas(self, text: str, *, opens: bool, ends: bool) -> list[Delta]:
        """What the next piece of its text adds, a chunk each.

        Args:
            text: The piece, perhaps empty.
            opens: Whether it is the first.
            ends: Whether it is the last.
        """
        if self._reader is None:
            made = [Delta(content=text)] if text or opens or not ends else []
        else:
            made = [delta for item in self._heard(self._reader, text, ends=ends) for delta in self._worded(item)]
        if not opens:
            return made
        first, *more = made or [Delta(content=None)]
        content = None if first.content is UNSET else first.content
        return [replace(first, role="assistant", content=content), *more]

    def _heard(self, reader: ReplyReader, text: str, *, ends: bool) -> list[Item]:
        return [*reader.push(text), *(reader.flush() if ends else ())]

    def _worded(self, item: Item) -> Iterator[Delta]:
        match item:
            case Text(text=text):
                yield Delta(content=text)
            case Thought(text=text):
                yield Delta(reasoning_content=text)
            case Call():
                yield from self._called(item)

    def _called(self, call: Call) -> Iterator[Delta]:
        index = self.calls
        opening = ToolCallDelta(
            index=index,
            id=self._next_id(call),
            type="function",
            function=FunctionDelta(name=call.name, arguments=""),
        )
        yield Delta(tool_calls=(opening,))
        yield Delta(tool_calls=(ToolCallDelta(index=index, function=FunctionDelta(arguments=call.arguments)),))

    def _next_id(self, call: Call) -> str:
        index, self.calls = self.calls, self.calls + 1
        digest = blake2b(f"{self._request_id}/{index}".encode(), digest_size=_ID_BYTES)
        return call.id or f"call_{digest.hexdigest()}"
