"""Steps of a training run in any dtype, and bodies made of them: what the codec's tests share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from slackwater.checkpoint.codec import EncodedBody, Level, Place, apply_body, decode_body, encode_body
from slackwater.checkpoint.manifest import BodyEntry, TileEntry
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec, TileWrite, tile_at

SIZES: Final = (1, 2, 3, 4, 5, 8, 63, 64, 65, 66, 100, 127, 129, 1000, 4095, 4096, 4097, 8192, 9001)
"""On, just below and just above every count that a kernel takes at a time."""
DENSITIES: Final = (0.0, 0.0002, 0.002, 0.02, 0.09, 0.11, 0.3, 0.6, 1.0)
LEVELS: Final[tuple[Level, ...]] = ("fast", "wan")

_FLOATS: Final = {
    "F8_E4M3": (3, 4), "F8_E5M2": (2, 5), "F16": (10, 5), "BF16": (7, 8), "F32": (23, 8), "F64": (52, 11),
}  # fmt: skip
"""Lowest bit of the exponent, and its bits."""

_Rng = np.random.Generator
_Mask = npt.NDArray[np.bool_]


def place(dtype: str, size: int, name: str = "w") -> Place:
    """The one tile of a flat tensor."""
    spec = TensorSpec(name=name, dtype=dtype, shape=(size,))
    return Place(spec=spec, tile=tile_at(spec, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Two states of some tiles of one dtype."""

    dtype: str
    olds: tuple[Bits, ...]
    news: tuple[Bits, ...]

    @property
    def places(self) -> list[Place]:
        return [place(self.dtype, old.size, f"t{index}") for index, old in enumerate(self.olds)]

    @property
    def num_changed(self) -> int:
        return sum(int((old != new).sum()) for old, new in zip(self.olds, self.news, strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(old.nbytes for old in self.olds)

    def encode(self, level: Level) -> "Sent | None":
        """Its body, or None where nothing changed."""
        encoded = encode_body(self.places, self.olds, self.news, level)
        return None if encoded is None else Sent.of(encoded, self)


def step(dtype: str, old: Bits, new: Bits) -> Step:
    return Step(dtype=dtype, olds=(old,), news=(new,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A body as a reader gets it, and the tiles that it is for."""

    encoded: EncodedBody
    entry: BodyEntry
    body: bytes
    places: tuple[Place, ...]
    olds: tuple[Bits, ...]
    news: tuple[Bits, ...]

    @classmethod
    def of(cls, encoded: EncodedBody, made: Step) -> "Sent":
        kept = [int(tile.place.spec.name[1:]) for tile in encoded.tiles]
        tiles = tuple(TileEntry(n, t.changed, t.pre, t.post) for n, t in zip(kept, encoded.tiles, strict=True))
        return cls(
            encoded=encoded,
            entry=BodyEntry(0, 0, len(encoded.body), encoded.encoding, tiles),
            body=encoded.body,
            places=tuple(made.places[index] for index in kept),
            olds=tuple(made.olds[index] for index in kept),
            news=tuple(made.news[index] for index in kept),
        )

    def decode(self, held: Sequence[Bits] | None = None) -> list[TileWrite | None]:
        return decode_body(self.places, self.entry, memoryview(self.body), self.olds if held is None else held)

    def apply(self, held: Sequence[Bits]) -> int:
        return apply_body(self.places, self.entry, memoryview(self.body), held)

    def on(self, held: Sequence[Bits]) -> "Sent":
        """The same body for a reader who holds something else."""
        return replace(self, olds=tuple(held))


def sent(made: Step, level: Level = "fast") -> Sent:
    """The body of a step in which something changed."""
    found = made.encode(level)
    assert found is not None
    return found


def written(writes: Sequence[TileWrite | None], held: Sequence[Bits]) -> list[bytes]:
    """What the tiles hold after these writes."""
    result = [bits.copy() for bits in held]
    for write, bits in zip(writes, result, strict=True):
        if write is not None:
            write.put(bits)
    return [bits.tobytes() for bits in result]


def on_line(bits: Bits) -> Bits:
    """A pattern's place on the line of its width, as the format's page says it."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits >= top, ~bits, bits + top).astype(bits.dtype)


def off_line(places: Bits) -> Bits:
    """Undo `on_line`."""
    top = places.dtype.type(1 << (8 * places.itemsize - 1))
    return np.where(places >= top, places - top, ~places).astype(places.dtype)


def specials(dtype: str) -> Bits:
    """Patterns that values would confuse: both zeros, subnormals, infinities, quiet and signalling NaNs, all ones."""
    width = WIDTHS[dtype]
    low, count = _FLOATS.get(dtype, (8 * width - 4, 3))
    top, infinity = 1 << (8 * width - 1), ((1 << count) - 1) << low
    half = [0, 1, infinity, infinity - 1, infinity | 1, infinity | 1 << (low - 1), top - 1]
    return np.array([*half, *(top | pattern for pattern in half)], dtype=f"<u{width}")


def random_bits(rng: _Rng, dtype: str, size: int) -> Bits:
    return rng.integers(0, 256, size * WIDTHS[dtype], dtype=np.uint8).view(f"<u{WIDTHS[dtype]}")


def weights(rng: _Rng, dtype: str, size: int) -> Bits:
    """Patterns whose upper bits are those of normal numbers, as trained weights have them."""
    upper = (rng.standard_normal(size) * 0.02).astype("<f4").view("<u4").astype("<u8")
    width = WIDTHS[dtype]
    return (upper >> np.uint64(32 - 8 * width) if width < 4 else upper << np.uint64(8 * width - 32)).astype(
        f"<u{width}"
    )


STATES: Final[dict[str, Callable[[_Rng, str, int], Bits]]] = {
    "bits": random_bits,
    "weights": weights,
    "zeros": lambda _, dtype, size: np.zeros(size, dtype=f"<u{WIDTHS[dtype]}"),
    "specials": lambda rng, dtype, size: rng.choice(specials(dtype), size),
}
"""What a tile holds before."""


def _neighbours(rng: _Rng, _: str, old: Bits) -> Bits:
    return off_line(on_line(old) + rng.choice(np.array([1, -1]), old.size).astype(old.dtype))


def _mixed(rng: _Rng, dtype: str, old: Bits) -> Bits:
    return np.where(rng.random(old.size) < 0.95, _neighbours(rng, dtype, old), random_bits(rng, dtype, old.size))


def _sign_flips(_: _Rng, __: str, old: Bits) -> Bits:
    return old ^ old.dtype.type(1 << (8 * old.itemsize - 1))


def _largest(_: _Rng, __: str, old: Bits) -> Bits:
    return off_line(on_line(old) + old.dtype.type(1 << (8 * old.itemsize - 1)))


def _almost_largest(rng: _Rng, _: str, old: Bits) -> Bits:
    near = rng.integers(-3, 4, old.size).astype(old.dtype)
    return off_line(on_line(old) + old.dtype.type(1 << (8 * old.itemsize - 1)) + near)


MOVES: Final[dict[str, Callable[[_Rng, str, Bits], Bits]]] = {
    "neighbours": _neighbours,
    "mostly neighbours": _mixed,
    "bits": lambda rng, dtype, old: random_bits(rng, dtype, old.size),
    "specials": lambda rng, dtype, old: rng.choice(specials(dtype), old.size),
    "sign flips": _sign_flips,
    "largest": _largest,
    "almost largest": _almost_largest,
}
"""Where elements go."""


def moved(rng: _Rng, dtype: str, old: Bits, move: str, density: float) -> Bits:
    """A tile after a step in which about this share of it moved."""
    mask: _Mask = rng.random(old.size) < density
    return np.where(mask, MOVES[move](rng, dtype, old), old).astype(old.dtype)


@st.composite
def steps(draw: st.DrawFn, dtypes: Sequence[str] = tuple(WIDTHS), most_tiles: int = 4) -> Step:
    """Any step: tiles of any size, some of which may stay as they are."""
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    state, move = draw(st.sampled_from(sorted(STATES))), draw(st.sampled_from(sorted(MOVES)))
    tiles = draw(
        st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DENSITIES)), min_size=1, max_size=most_tiles)
    )
    olds = [STATES[state](rng, dtype, size) for size, _ in tiles]
    news = [moved(rng, dtype, old, move, density) for old, (_, density) in zip(olds, tiles, strict=True)]
    return Step(dtype=dtype, olds=tuple(olds), news=tuple(news))
