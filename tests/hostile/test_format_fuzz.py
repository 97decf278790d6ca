"""Noise in bodies and bodies of noise: a typed refusal or exactly the right bits, in bounds, in little memory."""

import struct
import tracemalloc
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
from bodies.generate import Context, sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.codec import EncodedBody, Level, Place, apply_body, decode_body, encode_body
from slackwater.checkpoint.manifest import BodyEntry, Encoding, TileEntry
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec, tile_at
from slackwater.errors import CorruptError, SlackwaterError

EDGE: Final = 64
LIES: Final = (0, 1, 0x7F, 0x80, 0xFF)
ENCODINGS: Final[list[Encoding]] = ["sparse", "dense", "full"]
ONES: Final = 2**32 - 1
Edits = list[tuple[str, int, int]]


def places(dtype: str, olds: Sequence[Bits]) -> list[Place]:
    specs = [TensorSpec(name=f"w{index}", dtype=dtype, shape=(old.size,)) for index, old in enumerate(olds)]
    return [Place(spec=spec, tile=tile_at(spec, 0)) for spec in specs]


def drawn(seed: int, dtype: str, density: float, *, tiles: int) -> tuple[list[Bits], list[Bits]]:
    """Old and new bits of tiles in which something changes: mostly by little."""
    rng = np.random.default_rng(seed)
    olds = [
        rng.integers(0, 256, WIDTHS[dtype] * size, np.uint8).view(f"<u{WIDTHS[dtype]}") for size in (90, 700)[:tiles]
    ]
    news: list[Bits] = []
    for old in olds:
        step = np.where(rng.random(old.size) < 0.9, 1, rng.integers(0, 99, old.size)).astype(old.dtype)
        new = np.where(rng.random(old.size) < density, old + step, old).astype(old.dtype)
        new[3] = old[3] ^ 1
        news.append(new)
    return olds, news


def entry_of(made: EncodedBody, encoding: Encoding, body: bytes) -> BodyEntry:
    tiles = tuple(TileEntry(index, t.changed, t.pre, t.post) for index, t in enumerate(made.tiles))
    return BodyEntry(0, 0, len(body), encoding, tiles)


def spoilt(body: bytes, edits: Edits) -> bytes:
    result = bytearray(body)
    for kind, where, value in edits:
        place = where % max(1, len(result))
        if kind == "set" and result:
            result[place] = value
        elif kind == "flip" and result:
            result[place] ^= 1 << value % 8
        elif kind == "insert":
            result.insert(place, value)
        elif kind == "delete" and result:
            del result[place]
        elif kind == "cut":
            del result[place:]
    return bytes(result)


def apply_in_canaries(
    held_places: list[Place], entry: BodyEntry, body: bytes, olds: Sequence[Bits], news: Sequence[Bits]
) -> None:
    """Right, or refused with everything as it was; never a write around the tiles."""
    wholes = [np.pad(old, EDGE, constant_values=0x5A) for old in olds]
    held = [whole[EDGE:-EDGE] for whole in wholes]
    try:
        apply_body(held_places, entry, memoryview(body), held)
    except CorruptError:
        assert [bits.tobytes() for bits in held] == [old.tobytes() for old in olds]
    else:
        assert [bits.tobytes() for bits in held] == [new.tobytes() for new in news]
    assert all((whole[:EDGE] == 0x5A).all() and (whole[-EDGE:] == 0x5A).all() for whole in wholes)


PLACES = st.integers(0, 40) | st.integers(0, 5000)
EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "flip"]), PLACES, st.sampled_from(LIES) | st.integers(0, 255)),
    min_size=1,
    max_size=3,
) | st.lists(
    st.tuples(st.sampled_from(["set", "flip", "insert", "delete", "cut"]), PLACES, st.integers(0, 255)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(250))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["U8", "BF16", "F64"]),
    st.sampled_from([0.02, 0.3, 1.0]),
    st.sampled_from(["fast", "wan"]),
    st.integers(1, 2),
    EDITS,
)
def test_spoilt_bodies_are_refused_or_right(
    seed: int, dtype: str, density: float, level: Level, tiles: int, edits: Edits
) -> None:
    olds, news = drawn(seed, dtype, density, tiles=tiles)
    held_places = places(dtype, olds)
    made = encode_body(held_places, olds, news, level)
    assert made is not None
    body = spoilt(made.body, edits)
    apply_in_canaries(held_places, entry_of(made, made.encoding, body), body, olds, news)


@settings(max_examples=examples(100))
@given(st.sampled_from(ENCODINGS), st.sampled_from(["BF16", "F32"]), st.binary(max_size=300), st.integers(1, 2))
def test_bodies_of_noise_are_refused(encoding: Encoding, dtype: str, body: bytes, tiles: int) -> None:
    olds, news = drawn(1, dtype, 0.3, tiles=tiles)
    held_places = places(dtype, olds)
    made = encode_body(held_places, olds, news, "fast")
    assert made is not None
    apply_in_canaries(held_places, entry_of(made, encoding, body), body, olds, news)


@st.composite
def contexts(draw: st.DrawFn) -> list[Context]:
    """What a sparse body may say: each stream well made, and each number perhaps out of bounds."""
    lasts = sorted(draw(st.sets(st.integers(0, 254), max_size=3)))
    found: list[Context] = []
    for last in (*lasts, 255):
        gaps = draw(st.lists(st.integers(0, 9) | st.integers(0, 3000), max_size=12))
        larger = draw(st.integers(0, len(gaps)))
        runs = draw(st.lists(st.integers(0, 1) | st.integers(0, 20), min_size=larger, max_size=larger))
        sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 2**66), min_size=larger, max_size=larger))
        signs = "".join(draw(st.lists(st.sampled_from("01"), min_size=len(gaps), max_size=len(gaps))))
        widths = draw(st.tuples(*[st.integers(0, 24)] * 3))
        found.append(
            Context(gaps=tuple(gaps), signs=signs, runs=tuple(runs), sizes=tuple(sizes), last=last, widths=widths)
        )
    return found


@settings(max_examples=examples(120))
@given(contexts(), st.sampled_from(["U8", "BF16", "F64"]), EDITS | st.just([]))
def test_well_made_bodies_of_any_numbers_are_refused(said: list[Context], dtype: str, edits: Edits) -> None:
    olds, news = drawn(2, dtype, 0.3, tiles=2)
    held_places = places(dtype, olds)
    made = encode_body(held_places, olds, news, "wan")
    assert made is not None
    body = spoilt(sparse(said), edits)
    apply_in_canaries(held_places, entry_of(made, "sparse", body), body, olds, news)
    with pytest.raises(CorruptError):
        decode_body(held_places, entry_of(made, "sparse", body), memoryview(body), olds)


def claims() -> dict[str, tuple[Encoding, bytes]]:
    """A hundred bytes that claim to be all of memory."""
    row = struct.pack("<BH", 255, 0)
    most = b"\xff\xff\xff\xff\x0f"
    heads: dict[str, tuple[Encoding, bytes]] = {
        "changes": ("sparse", struct.pack("<IHHIII", ONES, 1, 0, 1, 0, 0) + row + most + b"\0"),
        "changes of the tile": ("sparse", struct.pack("<IHHIII", 2**22, 1, 0, 1, 0, 0) + row + b"\x80\x80\x80\x02\0"),
        "larger steps": ("sparse", struct.pack("<IHHIII", 2**22, 1, 0, 1, 1, 1) + row + b"\x80\x80\x80\x02" * 2),
        "rows": ("sparse", struct.pack("<IHHIII", 1, 256, 0, 1, 0, 0) + (row + b"\x01\0") * 16),
        "sections": ("sparse", struct.pack("<IHHIII", 1, 1, 0, ONES, ONES, ONES) + row + b"\x01\x01"),
        "wide gaps": (
            "sparse",
            struct.pack("<IHHIII", 2**22, 1, 0, 1, 0, 0) + struct.pack("<BH", 255, 24) + most + b"\0",
        ),
        "larger dense steps": ("dense", struct.pack("<I", ONES)),
        "full": ("full", b""),
    }
    return {name: (encoding, head.ljust(100, b"\xff")) for name, (encoding, head) in heads.items()}


@pytest.mark.parametrize("name", claims())
def test_a8_09_a_body_that_claims_more_than_it_has_costs_no_memory(name: str) -> None:
    encoding, body = claims()[name]
    old: Bits = np.zeros(2**22, dtype="<u2")
    new = old.copy()
    new[7] = 1
    held_places = places("BF16", [old])
    made = encode_body(held_places, [old], [new], "fast")
    assert made is not None
    entry = entry_of(made, encoding, body)
    tracemalloc.start()
    try:
        for act in (decode_body, apply_body):
            with pytest.raises(CorruptError, match="w0 tile 0: "):
                act(held_places, entry, memoryview(body), [old])
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert not old.any()


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a8_09_the_most_that_a_body_can_hold_stays_within_a_few_tiles(level: Level) -> None:
    """Every element changes, and most of them by a larger step: nothing expands past the tile."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 2**16, 2**19, dtype=np.uint16)
    new = (old + rng.choice(np.array([1, 2, 2**16 - 3], dtype=np.uint16), old.size, p=[0.8, 0.1, 0.1])).astype("<u2")
    held_places, held = places("BF16", [old]), [old.copy()]
    made = encode_body(held_places, [old], [new], level)
    assert made is not None
    tracemalloc.start()
    try:
        apply_body(held_places, entry_of(made, made.encoding, made.body), memoryview(made.body), held)
        assert tracemalloc.get_traced_memory()[1] < 40 * old.nbytes
    finally:
        tracemalloc.stop()
    assert held[0].tobytes() == new.tobytes()


@given(st.sampled_from(ENCODINGS), st.binary(max_size=64), st.integers(-5, 2**40), st.integers(0, 2**64 - 1))
def test_any_entry_of_a_manifest_is_met_with_a_typed_error(
    encoding: Encoding, body: bytes, changed: int, post: int
) -> None:
    olds, news = drawn(4, "F32", 0.1, tiles=1)
    held_places = places("F32", olds)
    made = encode_body(held_places, olds, news, "fast")
    assert made is not None
    entry = BodyEntry(0, 0, len(body), encoding, (TileEntry(0, changed, made.tiles[0].pre, post),))
    with pytest.raises(SlackwaterError):
        decode_body(held_places, entry, memoryview(body), olds)
