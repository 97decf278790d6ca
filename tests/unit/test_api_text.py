"""Text is a view of ids: never half a character, never a part of a stop string."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slackwater.api.text import TextStream, TokenTable, first_stop, sentencepiece_table
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.testing.tiny_model import END_OF_TEXT, IM_END, TINY_VOCAB, write_tiny_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = TokenTable(pieces=tuple(bytes([value]) for value in range(256)), special=frozenset())
STOPS = st.lists(st.text("ab\U0001f60a", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(ids=st.lists(st.integers(0, TINY_VOCAB - 1), max_size=40))
def test_joined_pieces_are_the_tokenizers_own_text(
    tokenizer: ChatTokenizer, reference: Tokenizer, ids: list[int]
) -> None:
    stream = tokenizer.stream()
    joined = "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])
    assert joined == reference.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@given(text=st.lists(st.text(max_size=20) | st.sampled_from(SPECIALS), max_size=4).map("".join))
@example(text=SPECIALS[0])
def test_text_comes_back_through_its_ids_but_for_special_tokens_in_it(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == re.sub("|".join(map(re.escape, SPECIALS)), "", text)


@given(data=st.binary(max_size=24), stops=STOPS)
def test_no_piece_holds_half_a_character_and_the_cut_ignores_tokens(data: bytes, stops: list[str]) -> None:
    whole = data.decode("utf-8", "replace")
    stream = TextStream(BYTES, stops)
    joined = "".join([*(stream.push(value) for value in data), stream.flush()])
    assert joined == whole[: _reference_cut(whole, stops)]


@given(text=st.text("ab\U0001f60a", max_size=24), cuts=st.sets(st.integers(0, 24)), stops=STOPS)
def test_a_stop_string_is_found_across_any_tokens(text: str, cuts: set[int], stops: list[str]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end].encode() for start, end in pairwise(edges)]
    stream = TextStream(TokenTable(pieces=tuple(parts), special=frozenset()), stops)
    pieces = [stream.push(index) for index in range(len(parts))]
    assert "".join([*pieces, stream.flush()]) == text[: _reference_cut(text, stops)]


def _reference_cut(text: str, stops: list[str]) -> int:
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return len(text)


def test_a3_18_a_character_in_four_tokens_comes_with_the_last() -> None:
    stream = TextStream(BYTES)
    assert [stream.push(value) for value in (240, 159, 152, 138)] == ["", "", "", "\U0001f60a"]
    assert [BYTES.piece(value) for value in (240, 138)] == [b"\xf0", b"\x8a"]


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    stream = TextStream(BYTES)
    assert stream.push(240) == ""
    assert stream.flush() == "\ufffd"


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(BYTES, ["ab"])
    assert [stream.push(value) for value in b"xabab"] == ["x", "", "", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


def test_what_began_like_a_stop_string_comes_when_it_is_none() -> None:
    stream = TextStream(BYTES, ["\n\nUser"])
    assert [stream.push(value) for value in b"a\n\nUs."] == ["a", "", "", "", "", "\n\nUs."]
    assert first_stop("xxab", ["b", "ab"]) == 2


def test_special_tokens_and_unknown_ids_make_no_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([END_OF_TEXT, 72, IM_END, 105, 10**9, -1]) == "Hi"
    assert tokenizer.table.piece(IM_END) == b"<|im_end|>"


def test_a_conversation_is_rendered_by_its_template(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.render([{"role": "user", "content": "hi"}])
    pieces = b"".join(map(tokenizer.table.piece, ids))
    assert pieces == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_is_refused_only_if_the_longest_tokens_cannot_make_it(tokenizer: ChatTokenizer) -> None:
    full = "<|endoftext|>" * 4
    assert tokenizer.encode(full, window=4) == (END_OF_TEXT,) * 4
    with pytest.raises(InvalidInputError, match="53 bytes, more than 4 tokens"):
        tokenizer.encode(full + "x", window=4)
    assert tokenizer.encode("\U0001f60a", window=1) == (240, 159, 152, 138)
    with pytest.raises(InvalidInputError):
        tokenizer.encode("\U0001f60a" * 4, window=1)


def test_a_sentencepiece_table_knows_bytes_and_spaces() -> None:
    vocabulary = {"\u2581Hello": 0, "\u2581you": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x8A>": 5, "</s>": 6}
    table = sentencepiece_table(vocabulary, frozenset({6}), strips_first_space=True)
    assert table.decode([0, 1, 2, 3, 4, 5, 6]) == "Hello you\U0001f60a"
    assert table.piece(2) == b"\xf0"


def test_a_folder_without_a_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ChatTokenizer(tmp_path)
