"""Text as a view of token ids: bytes per token, an incremental decoder, and stop strings held back. Pure."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""
_BYTE_TOKEN_LENGTH: Final = len("<0x00>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The bytes that each token stands for, by id."""

    pieces: tuple[bytes, ...]
    """True bytes of every token, special ones included; empty where the vocabulary has no such id."""
    special: frozenset[int]
    """Ids that make no text."""
    strips_first_space: bool = False
    """Whether a text that begins with a space loses it, as in most SentencePiece models."""

    def piece(self, token_id: int) -> bytes:
        """True bytes of a token; empty for an id outside the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def longest(self) -> int:
        """Bytes of the longest token; looks at all of them."""
        return max(map(len, self.pieces), default=0)

    def text_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text: none for a special one."""
        return b"" if token_id in self.special else self.piece(token_id)

    def showing(self, marks: Iterable[str]) -> "TokenTable":
        """A view in which special tokens that are part of one of ``marks`` make text too."""
        wanted = tuple(mark.encode() for mark in marks)
        shown = {token_id for token_id in self.special if any(self.piece(token_id) in mark for mark in wanted)}
        return replace(self, special=self.special - shown)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of an answer: special tokens skipped, ill-formed UTF-8 as U+FFFD."""
        stream = TextStream(self)
        return "".join([*(stream.push(token_id) for token_id in token_ids), stream.flush()])


def byte_level_table(vocabulary: Mapping[str, int], special: frozenset[int]) -> TokenTable:
    """Table of a byte-level vocabulary (GPT-2 and its heirs): a token's characters stand for bytes."""
    symbols = _byte_symbols()

    def piece(token: str) -> bytes:
        try:
            return bytes([symbols[character] for character in token])
        except KeyError:  # an added token, in plain letters
            return token.encode()

    return TokenTable(pieces=_pieces(vocabulary, piece), special=special)


def sentencepiece_table(
    vocabulary: Mapping[str, int], special: frozenset[int], *, strips_first_space: bool
) -> TokenTable:
    """Table of a SentencePiece vocabulary with byte fallback (Llama 2, Mistral, Gemma)."""

    def piece(token: str) -> bytes:
        if len(token) == _BYTE_TOKEN_LENGTH and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()

    return TokenTable(pieces=_pieces(vocabulary, piece), special=special, strips_first_space=strips_first_space)


def _pieces(vocabulary: Mapping[str, int], piece: Callable[[str], bytes]) -> tuple[bytes, ...]:
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for token, token_id in vocabulary.items():
        table[token_id] = piece(token)
    return tuple(table)


def _byte_symbols() -> dict[str, int]:
    """The byte behind each character: printable Latin-1 stands for itself, the rest is shifted past 255."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(shifted)}


class TextStream:
    """Turns tokens into text as they come.

    It never emits half a character, nor one that may belong to a stop string. What it emits joins to the text of
    all its tokens, cut before the first stop string. First is the one that is complete first, and of those the
    longest, so the cut doesn't depend on how the text was cut into tokens.
    """

    def __init__(self, table: TokenTable, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string has come; nothing is emitted after it."""
        self._table = table
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = table.strips_first_space
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that has become safe to show, often empty."""
        return self._take(self._decoder.decode(self._table.text_bytes(token_id)))

    def flush(self) -> str:
        """The end: what was held back, half a character as U+FFFD. Call once."""
        shown = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _take(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        if self._strip:
            text, self._strip = text.removeprefix(" "), False
        if not self._stops:
            return text
        self._held += text
        cut = first_stop(self._held, self._stops)
        self.stopped = cut is not None
        safe = len(self._held) - tail_of(self._held, self._stops) if cut is None else cut
        shown, self._held = self._held[:safe], "" if self.stopped else self._held[safe:]
        return shown


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins; None where there is none."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def tail_of(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    longest = min(len(text), max(map(len, stops)) - 1)
    ends = (length for length in range(longest, 0, -1) if text.endswith(tuple(stop[:length] for stop in stops)))
    return next(ends, 0)
