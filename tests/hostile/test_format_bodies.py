"""Bodies that an attacker or a bad disk could send: each is refused by field, and what is held stays as it is."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from bodies.generate import write
from msgspec.structs import replace as altered

from slackwater.checkpoint.codec import Place, apply_body, decode_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import BodyEntry, Encoding, TileEntry
from slackwater.checkpoint.tensor import Bits, TensorSpec, tile_at
from slackwater.errors import CorruptError, InvalidInputError, WrongBaseError

FOLDER: Final = Path(__file__).parent / "bodies"
BOOK: Final[dict[str, Any]] = json.loads((FOLDER / "bodies.json").read_text("utf-8"))
EDGE: Final = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A body, and a reader's place to apply it: bits between elements that nobody may write."""

    encoding: Encoding
    body: bytes
    places: tuple[Place, ...]
    olds: tuple[Bits, ...]
    news: tuple[Bits, ...]
    changed: tuple[int, ...]
    field: str | None

    @property
    def entry(self) -> BodyEntry:
        tiles = tuple(
            TileEntry(number, changed, tile_digest(old), tile_digest(new))
            for number, (changed, old, new) in enumerate(zip(self.changed, self.olds, self.news, strict=True))
        )
        return BodyEntry(0, 0, len(self.body), self.encoding, tiles)

    def apply(self, entry: BodyEntry | None = None) -> list[bytes]:
        """Apply it in place; whatever happens, nothing around is written, and an error leaves all as it was."""
        wholes = [np.pad(old, EDGE, constant_values=0x5A) for old in self.olds]
        held = [whole[EDGE:-EDGE] for whole in wholes]
        try:
            apply_body(self.places, entry or self.entry, memoryview(self.body), held)
        except (CorruptError, WrongBaseError):
            assert [bits.tobytes() for bits in held] == [old.tobytes() for old in self.olds]
            raise
        finally:
            assert all((whole[:EDGE] == 0x5A).all() and (whole[-EDGE:] == 0x5A).all() for whole in wholes)
        return [bits.tobytes() for bits in held]

    def decode(self, entry: BodyEntry | None = None) -> None:
        decode_body(self.places, entry or self.entry, memoryview(self.body), self.olds)

    @property
    def wanted(self) -> list[bytes]:
        return [new.tobytes() for new in self.news]


def load(listed: dict[str, Any]) -> Case:
    tiles = BOOK["tiles"][listed["tiles"]]
    width = {"BF16": 2, "U64": 8}[tiles["dtype"]]
    olds, news = (
        tuple(np.frombuffer(bytes.fromhex(text), dtype=f"<u{width}") for text in tiles[state])
        for state in ("old", "new")
    )
    specs = [TensorSpec(name=f"w{n}", dtype=tiles["dtype"], shape=(old.size,)) for n, old in enumerate(olds)]
    return Case(
        encoding=listed["encoding"],
        body=(FOLDER / listed["file"]).read_bytes(),
        places=tuple(Place(spec=spec, tile=tile_at(spec, 0)) for spec in specs),
        olds=olds,
        news=news,
        changed=tuple(listed.get("changed", tiles["changed"])),
        field=listed["field"],
    )


LISTED: Final = {listed["file"].removesuffix(".bin"): load(listed) for listed in BOOK["bodies"]}
GOOD: Final = {name: case for name, case in LISTED.items() if case.field is None}
BAD: Final = {name: case for name, case in LISTED.items() if case.field is not None}
FLAT, PAIR = GOOD["sparse-flat"], GOOD["sparse-pair"]


def test_the_files_are_what_their_script_writes(tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in {".bin", ".json"}}
    assert len(BAD) > 80


@pytest.mark.parametrize("name", GOOD)
def test_what_the_script_writes_without_a_lie_is_read(name: str) -> None:
    assert GOOD[name].apply() == GOOD[name].wanted


@pytest.mark.parametrize("name", BAD)
def test_a_broken_rule_is_refused_by_field(name: str) -> None:
    case = BAD[name]
    for act in (case.apply, case.decode):
        with pytest.raises(CorruptError, match=rf"^w\d tile 0(?: and 1 more)?: {case.field}") as caught:
            act()
        assert caught.value.hint


@pytest.mark.parametrize("name", GOOD)
def test_every_truncated_byte_is_refused(name: str) -> None:
    case = GOOD[name]
    for end in range(len(case.body)):
        with pytest.raises(CorruptError, match="w0 tile 0"):
            replace(case, body=case.body[:end]).apply()


def is_harmless(case: Case) -> bool:
    """Whether a spoilt body says what the good one says, as with another width it may. If not, it is refused."""
    try:
        result = case.apply()
    except CorruptError:
        return False
    assert result == case.wanted
    return True


@pytest.mark.parametrize("name", GOOD)
def test_a_flipped_bit_never_gives_other_weights(name: str) -> None:
    case = GOOD[name]
    harmless = 0
    for bit in range(8 * len(case.body)):
        body = bytearray(case.body)
        body[bit // 8] ^= 1 << bit % 8
        harmless += is_harmless(replace(case, body=bytes(body)))
    assert harmless <= (12 if case.encoding == "sparse" else 0)


@pytest.mark.parametrize("name", GOOD)
def test_a_byte_set_to_anything_never_gives_other_weights(name: str) -> None:
    case = GOOD[name]
    for place in range(min(len(case.body), 60)):
        for value in (0, 1, 0x55, 0x7F, 0x80, 0xFE, 0xFF):
            body = case.body[:place] + bytes([value]) + case.body[place + 1 :]
            if is_harmless(replace(case, body=body)):
                assert case.encoding == "sparse" or body == case.body


@pytest.mark.parametrize("name", GOOD)
def test_a_body_of_another_length_than_listed_is_refused(name: str) -> None:
    case = GOOD[name]
    for length in (0, len(case.body) - 1, len(case.body) + 1, 2**63 - 1):
        with pytest.raises(CorruptError, match=f"length: the body has {len(case.body)} bytes"):
            case.apply(altered(case.entry, length=length))


@pytest.mark.parametrize("name", GOOD)
def test_a_count_of_changes_that_lies_is_refused(name: str) -> None:
    case = GOOD[name]
    for lie in (1, -1, 2**31):
        with pytest.raises(CorruptError, match=r"changed: \d+ elements change, the manifest says"):
            replace(case, changed=(*case.changed[:-1], case.changed[-1] + lie)).apply()


@pytest.mark.parametrize("name", GOOD)
def test_a_result_that_is_not_the_manifests_is_refused(name: str) -> None:
    case = GOOD[name]
    other = tuple(np.bitwise_xor(new, np.arange(new.size) == new.size - 1, dtype=new.dtype) for new in case.news)
    with pytest.raises(CorruptError, match="post: the decoded tile hasn't the digest"):
        replace(case, news=other).apply()


@pytest.mark.parametrize("name", GOOD)
def test_a1_13_another_tensor_of_the_same_shape_is_a_wrong_base(name: str) -> None:
    case = GOOD[name]
    held = [old[::-1].copy() for old in case.olds]
    before = [bits.tobytes() for bits in held]
    with pytest.raises(WrongBaseError, match="w0 tile 0 isn't what the delta was made on"):
        apply_body(case.places, case.entry, memoryview(case.body), held)
    assert [bits.tobytes() for bits in held] == before


def test_one_wrong_tile_of_several_stops_the_others() -> None:
    for case in (PAIR, GOOD["dense-pair"], GOOD["full-pair"]):
        held = [case.olds[0].copy(), case.olds[1][::-1].copy()]
        before = [bits.tobytes() for bits in held]
        with pytest.raises(WrongBaseError, match="w1 tile 0"):
            apply_body(case.places, case.entry, memoryview(case.body), held)
        assert [bits.tobytes() for bits in held] == before


def test_swapped_tiles_are_refused() -> None:
    """By their digests where they are as large, and by their size where they aren't."""
    twin = replace(
        FLAT,
        places=(FLAT.places[0], PAIR.places[1]),
        olds=(FLAT.olds[0], FLAT.olds[0][::-1].copy()),
    )
    spec = TensorSpec(name="w1", dtype="BF16", shape=(100,))
    places = (FLAT.places[0], Place(spec=spec, tile=tile_at(spec, 0)))
    tiles = tuple(TileEntry(n, 1, tile_digest(old), 1) for n, old in enumerate(twin.olds))
    entry = BodyEntry(0, 0, len(FLAT.body), "sparse", (tiles[1], tiles[0]))
    with pytest.raises(WrongBaseError, match="w0 tile 0"):
        decode_body(places, entry, memoryview(FLAT.body), twin.olds)
    with pytest.raises(InvalidInputError, match="w0 tile 0 has 30 elements"):
        decode_body(PAIR.places, PAIR.entry, memoryview(PAIR.body), PAIR.olds[::-1])


@pytest.mark.parametrize("encoding", ["sparse", "dense", "full"])
@pytest.mark.parametrize("name", ["sparse-pair", "dense-pair", "full-pair"])
def test_a_body_under_anothers_encoding_is_refused(name: str, encoding: Encoding) -> None:
    if not name.startswith(encoding):
        with pytest.raises(CorruptError):
            replace(GOOD[name], encoding=encoding).apply()


def test_a_body_swapped_with_anothers_is_refused() -> None:
    """Of the same tiles and the same length, from another step."""
    other = bytearray(GOOD["full-pair"].body)
    other[8:10] = b"\1\1"
    with pytest.raises(CorruptError, match="w0 tile 0: post"):
        replace(GOOD["full-pair"], body=bytes(other)).apply()


def test_tiles_of_two_dtypes_in_a_body_are_refused() -> None:
    half = TensorSpec(name="w1", dtype="F16", shape=(13,))
    mixed = replace(PAIR, places=(PAIR.places[0], Place(spec=half, tile=tile_at(half, 0))))
    with pytest.raises(CorruptError, match="w1 tile 0: dtype: F16 in a body of BF16"):
        mixed.apply()


@pytest.mark.parametrize("name", GOOD)
def test_a1_15_a_body_whose_tiles_are_done_is_not_even_read(name: str) -> None:
    case = GOOD[name]
    done = replace(case, body=bytes(len(case.body)))
    held = [new.copy() for new in case.news]
    assert apply_body(case.places, done.entry, memoryview(done.body), held) == 0
    assert [bits.tobytes() for bits in held] == case.wanted


def test_a_half_applied_body_of_several_contexts_is_a_wrong_base_and_others_go_on() -> None:
    for done in (0, 1):
        for name in ("sparse-pair", "dense-pair", "full-pair"):
            case = GOOD[name]
            held = [(case.news if index == done else case.olds)[index].copy() for index in range(2)]
            before = [bits.tobytes() for bits in held]
            if name == "sparse-pair":
                with pytest.raises(WrongBaseError, match=f"w{done} tile 0 has its new bits"):
                    apply_body(case.places, case.entry, memoryview(case.body), held)
                assert [bits.tobytes() for bits in held] == before
            else:
                assert apply_body(case.places, case.entry, memoryview(case.body), held) == 1
                assert [bits.tobytes() for bits in held] == case.wanted
