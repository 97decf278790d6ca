"""Writes the bodies of this folder, and `bodies.json`, which says what each is and what is wrong with it.

::

    python tests/hostile/bodies/generate.py

A writer of docs/format.md, section 4, that can lie in every field and shares nothing with the package. A reader of
the format is right where it makes the new bits of each case without a ``field``, refuses all others, and then holds
what it held before. ``field`` is the part of the page whose rule is broken.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_WIDTHS: Final = {"BF16": 2, "U64": 8}
_ONES: Final = 0xFFFFFFFF


def little(number: int, width: int) -> str:
    """The low bits of a number, the lowest first."""
    return "".join(str(number >> bit & 1) for bit in range(width))


def packed(text: str) -> bytes:
    """Bits to bytes; the last one is filled with zeros."""
    parts = (text[begin : begin + 8] for begin in range(0, len(text), 8))
    return bytes(sum(1 << place for place, bit in enumerate(part) if bit == "1") for part in parts)


def varint(number: int) -> bytes:
    """Unsigned LEB128."""
    return bytes([number]) if number < 128 else bytes([number % 128 | 128]) + varint(number >> 7)


def golomb(number: int, width: int) -> str:
    """An exponential Golomb code."""
    upper = (number >> width) + 1
    prefix = upper.bit_length() - 1
    return "0" * prefix + "1" + little(upper, prefix) + little(number, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One context as its body says it."""

    gaps: tuple[int, ...]
    signs: str
    """A one for each negative step."""
    runs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    last: int = 255
    widths: tuple[int, int, int] = (2, 1, 1)
    changes: int | None = None
    """What the row says instead of the truth."""
    larger: int | None = None
    """Likewise."""

    def row(self) -> bytes:
        """Its row of the table."""
        gaps, runs, sizes = self.widths
        changes = len(self.gaps) if self.changes is None else self.changes
        larger = len(self.runs) if self.larger is None else self.larger
        return struct.pack("<BH", self.last, gaps | runs << 5 | sizes << 10) + varint(changes) + varint(larger)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Rank and step of each change."""
        at, rank = -1, -1
        sizes: dict[int, int] = {}
        for run, size in zip(self.runs, self.sizes, strict=True):
            at += run + 1
            sizes[at] = size + 2
        for index, (gap, sign) in enumerate(zip(self.gaps, self.signs, strict=True)):
            rank += gap + 1
            yield rank, sizes.get(index, 1) * (-1 if sign == "1" else 1)


def sparse(
    contexts: Sequence[Context], *, head: Mapping[str, int] = _NONE, sections: Mapping[str, bytes] = _NONE
) -> bytes:
    """A sparse body.

    Args:
        contexts: What it says.
        head: Fields of the head that lie.
        sections: Sections to be put in the place of the right ones; the head tells their lengths.
    """
    unary = {
        "gap quotients": "".join("0" * (gap >> c.widths[0]) + "1" for c in contexts for gap in c.gaps),
        "gap lows": "".join(little(gap, c.widths[0]) for c in contexts for gap in c.gaps),
        "signs": "".join(c.signs for c in contexts),
        "run quotients": "".join("0" * (run >> c.widths[1]) + "1" for c in contexts for run in c.runs),
        "run lows": "".join(little(run, c.widths[1]) for c in contexts for run in c.runs),
        "sizes": "".join(golomb(size, c.widths[2]) for c in contexts for size in c.sizes),
    }
    parts = {"rows": b"".join(c.row() for c in contexts), **{name: packed(text) for name, text in unary.items()}}
    parts.update(sections)
    fields = {
        "count": sum(len(c.gaps) for c in contexts),
        "contexts": len(contexts),
        "zero": 0,
        "gap bytes": len(parts["gap quotients"]),
        "run bytes": len(parts["run quotients"]),
        "size bytes": len(parts["sizes"]),
    }
    fields.update(head)
    return struct.pack("<IHHIII", *fields.values()) + b"".join(parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """What a reader holds, and what it shall hold."""

    dtype: str
    old: tuple[tuple[int, ...], ...]
    contexts: tuple[Context, ...]
    """How its sparse body says it."""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return _WIDTHS[self.dtype]

    def new(self) -> list[list[int]]:
        """The new bits, element by element."""
        steps = [dict(context.steps()) for context in self.contexts]
        seen, result = [0] * len(steps), list[list[int]]()
        for tile in self.old:
            result.append([])
            for bits in tile:
                exponent = bits >> 7 & 255 if self.dtype == "BF16" else 0
                context = next(i for i, c in enumerate(self.contexts) if exponent <= c.last)
                result[-1].append(_moved(bits, steps[context].get(seen[context], 0), 8 * self.width))
                seen[context] += 1
        return result

    def hexes(self, tiles: Sequence[Sequence[int]]) -> list[str]:
        """The bytes of each tile, in hex."""
        return [b"".join(bits.to_bytes(self.width, "little") for bits in tile).hex() for tile in tiles]

    def changed(self) -> list[int]:
        """Changed elements of each tile."""
        pairs = zip(self.old, self.new(), strict=True)
        return [sum(before != after for before, after in zip(old, new, strict=True)) for old, new in pairs]

    def full(self) -> bytes:
        """The full body."""
        return bytes.fromhex("".join(self.hexes(self.new())))

    def dense(self, *, count: int | None = None, also: Mapping[tuple[int, int], int] = _NONE) -> bytes:  # pyright: ignore[reportArgumentType]
        """The dense body.

        Args:
            count: What the head says instead of the truth.
            also: Codes to be put in the place of the right ones, by tile and element.
        """
        packs, larger = list[bytes](), list[int]()
        for number, (old, new) in enumerate(zip(self.old, self.new(), strict=True)):
            codes = [_code(before, after, 8 * self.width) for before, after in zip(old, new, strict=True)]
            codes += [0] * (-len(codes) % 4)
            larger += [after for code, after in zip(codes, new, strict=False) if code == 3]
            codes = [also.get((number, index), code) for index, code in enumerate(codes)]
            packs.append(packed("".join(little(code, 2) for code in codes)))
        tail = b"".join(bits.to_bytes(self.width, "little") for bits in larger)
        return struct.pack("<I", len(larger) if count is None else count) + b"".join(packs) + tail


def _line(bits: int, width: int) -> int:
    top = 1 << (width - 1)
    return bits ^ (2 * top - 1) if bits >= top else bits + top


def _moved(bits: int, step: int, width: int) -> int:
    top = 1 << (width - 1)
    place = (_line(bits, width) + step) % (2 * top)
    return place - top if place >= top else place ^ (2 * top - 1)


def _code(old: int, new: int, width: int) -> int:
    step = (_line(new, width) - _line(old, width)) % (1 << width)
    return {0: 0, 1: 1, (1 << width) - 1: 2}.get(step, 3)


ONE: Final = Context(gaps=(0, 3, 10, 1, 20), signs="01001", runs=(1,), sizes=(4,))
LOW: Final = Context(gaps=(2, 0, 13), signs="010", runs=(0, 1), sizes=(0, 9), last=125, widths=(1, 0, 2))
HIGH: Final = Context(gaps=(1, 7, 9), signs="110", runs=(2,), sizes=(3,), widths=(3, 1, 0))
WIDE: Final = Context(gaps=(0, 2, 1), signs="101", runs=(0, 0), sizes=(2**63 - 2, 2**63 - 9), widths=(0, 0, 24))

TILES: Final = {
    "flat": Tiles(dtype="BF16", old=(tuple(0x3C00 + 37 * i for i in range(100)),), contexts=(ONE,)),
    "pair": Tiles(
        dtype="BF16",
        old=(
            tuple((120 + 10 * (i % 2)) << 7 | i for i in range(30)),
            tuple((130 - 10 * (i % 3 == 0)) << 7 | 64 + i for i in range(13)),
        ),
        contexts=(LOW, HIGH),
    ),
    "wide": Tiles(dtype="U64", old=((2**64 - 1, 1, 2, 2**63, 4, 0, 6, 7, 8),), contexts=(WIDE,)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One file."""

    name: str
    tiles: str
    body: bytes
    field: str | None
    """What is wrong; None where nothing is."""
    why: str
    changed: tuple[int, ...] = ()
    """What the manifest says instead of the truth."""

    @property
    def encoding(self) -> str:
        """As the manifest says it."""
        return self.name.partition("-")[0]

    @property
    def file(self) -> str:
        """Its name in this folder."""
        return f"{self.name}.bin"


def _good() -> Iterator[Case]:
    for name, tiles in TILES.items():
        yield Case(name=f"sparse-{name}", tiles=name, body=sparse(tiles.contexts), field=None, why="right")
        if name != "wide":  # most of its steps are larger, which is dense's right, too
            yield Case(name=f"dense-{name}", tiles=name, body=tiles.dense(), field=None, why="right")
        yield Case(name=f"full-{name}", tiles=name, body=tiles.full(), field=None, why="right")


def _flat(name: str, field: str, why: str, body: bytes) -> Case:
    return Case(name=f"sparse-{name}", tiles="flat", body=body, field=field, why=why)


def _pair(name: str, field: str, why: str, *contexts: Context) -> Case:
    return Case(name=f"sparse-{name}", tiles="pair", body=sparse(contexts), field=field, why=why)


def _heads() -> Iterator[Case]:
    good = sparse([ONE])
    yield _flat("head-cut", "head", "19 bytes", good[:19])
    for name, count in (("zero", 0), ("above-the-tile", 101), ("all-ones", _ONES)):
        yield _flat(f"count-{name}", "count", f"{count} changes", sparse([ONE], head={"count": count}))
    for name, count in (("too-few", 4), ("too-many", 6)):
        yield _flat(
            f"count-{name}", "rows", f"{count} changes, and the rows have 5", sparse([ONE], head={"count": count})
        )
    for contexts in (0, 257, 0xFFFF):
        yield _flat(f"contexts-{contexts}", "contexts", "1 to 256", sparse([ONE], head={"contexts": contexts}))
    yield _flat("reserved", "reserved", "zero it must be", sparse([ONE], head={"zero": 1}))
    for section in ("gap", "run", "size"):
        for name, count in (("all-ones", _ONES), ("zero", 0), ("two", 9)):
            lie = {f"{section} bytes": count}
            yield _flat(f"{section}-bytes-{name}", "sections", "the head lies", sparse([ONE], head=lie))
    yield _flat("cut", "sections", "the last byte is missing", good[:-1])
    yield _flat("trailing", "sections", "a byte follows", good + b"\0")


def _rows() -> Iterator[Case]:
    def lying(name: str, field: str, why: str, **lies: Any) -> Case:
        return _flat(f"row-{name}", field, why, sparse([replace(ONE, **lies)]))

    yield lying("last-254", "rows", "the last class isn't 255", last=254)
    for name, first, second in (("equal", 255, 255), ("falling", 255, 125), ("unfinished", 100, 125)):
        low, high = replace(LOW, last=first), replace(HIGH, last=second)
        yield _pair(f"row-last-{name}", "rows", f"last classes {first} and {second}", low, high)
    for index, name in enumerate(("gap", "run", "size")):
        for width in (25, 31):
            widths = tuple(width if place == index else 1 for place in range(3))
            yield lying(f"{name}-width-{width}", "row 0", "a width above 24", widths=widths)
    yield lying("larger-than-changes", "row 0", "6 larger steps among 5", larger=6)
    yield lying("changes-too-few", "rows", "4 of 5 changes", changes=4)
    yield lying("changes-all-ones", "rows", "2**32 - 1 changes of 5", changes=_ONES)
    right = ONE.row()
    for name, field, why, row in (
        ("high-bit", "row 0", "bit 15 of the widths", right[:2] + bytes([right[2] | 0x80]) + right[3:]),
        ("varint-long", "varint", "5 in two bytes", right[:3] + b"\x85\0" + right[4:]),
        ("varint-six-bytes", "varint", "more than five bytes", right[:3] + b"\x85\x80\x80\x80\x80\0" + right[4:]),
        ("varint-33-bits", "varint", "2**32", right[:3] + b"\x80\x80\x80\x80\x10" + right[4:]),
    ):
        yield _flat(f"row-{name}", field, why, sparse([ONE], sections={"rows": row}))
    yield _flat("row-missing", "row 0", "the body ends after its head", sparse([ONE])[:20])
    yield _flat("row-cut", "row 0", "the body ends in the row", sparse([ONE])[:22])
    yield _flat("row-varint-cut", "varint", "the body ends in the row", sparse([ONE])[:23])
    yield _flat("row-second-missing", "row 1", "a row of two", sparse([ONE], head={"contexts": 2})[:25])


def _streams() -> Iterator[Case]:
    quotients = packed("1" + "1" + "001" + "1" + "000001")
    lows = packed("".join(little(gap, 2) for gap in ONE.gaps))
    for name, field, why, sections in (
        ("gaps-end-early", "gaps", "no last one", {"gap quotients": packed("1" + "1" + "001" + "1" + "000000")}),
        ("gaps-empty", "gaps", "zeros alone", {"gap quotients": bytes(2)}),
        (
            "gaps-one-after-the-last",
            "gaps",
            "a sixth one",
            {"gap quotients": quotients[:1] + bytes([quotients[1] | 0x80])},
        ),
        ("gaps-byte-after-the-last", "gaps", "a byte too many", {"gap quotients": quotients + b"\0"}),
        ("gaps-far-past-the-tile", "gaps", "a gap of 2000", {"gap quotients": packed("1111" + "0" * 500 + "1")}),
        ("gaps-lows-padding", "gaps", "a bit after the last", {"gap lows": lows[:1] + bytes([lows[1] | 0x80])}),
        ("signs-padding", "signs", "a bit after the last", {"signs": packed("010011")}),
        ("runs-end-early", "runs", "no one", {"run quotients": b"\0"}),
        ("runs-byte-after-the-last", "runs", "a byte too many", {"run quotients": b"\1\0"}),
        ("runs-one-after-the-last", "runs", "a second one", {"run quotients": b"\3"}),
        ("runs-past-the-changes", "runs", "a run of 5", {"run quotients": packed("001")}),
        ("runs-lows-padding", "runs", "a bit after the last", {"run lows": b"\3"}),
        ("sizes-end-early", "sizes", "zeros alone", {"sizes": b"\0"}),
        ("sizes-cut", "sizes", "the low bits are missing", {"sizes": packed("0000001" + "0")}),
        ("sizes-byte-after-the-last", "sizes", "a byte too many", {"sizes": packed(golomb(4, 1)) + b"\0"}),
        ("sizes-padding", "sizes", "a bit after the last", {"sizes": packed(golomb(4, 1).ljust(7, "0") + "1")}),
        ("sizes-above-the-width", "sizes", "a step of 2**15 + 1 in 16 bits", {"sizes": packed(golomb(2**15 - 1, 1))}),
        ("sizes-63-bits", "sizes", "2**63 - 1", {"sizes": packed(golomb(2**63 - 1, 1))}),
        ("sizes-64-bits", "sizes", "2**63", {"sizes": packed(golomb(2**63, 1))}),
        ("sizes-100-bits", "sizes", "2**100", {"sizes": packed(golomb(2**100, 1))}),
    ):
        yield _flat(name, field, why, sparse([ONE], sections=sections))
    past = replace(ONE, gaps=(*ONE.gaps[:-1], 82))
    yield _flat("gaps-just-past-the-tile", "gaps", "position 100 of 100", sparse([past]))
    high = replace(HIGH, gaps=(1, 7, 30))
    yield _pair("gaps-past-their-context", "gaps", "a rank that only other contexts together have", LOW, high)
    wide = replace(WIDE, sizes=(2**63 - 1, 0))
    yield Case(
        name="sparse-sizes-above-64-bits", tiles="wide", body=sparse([wide]), field="sizes", why="a step of 2**63 + 1"
    )


def _dense() -> Iterator[Case]:
    tiles = TILES["pair"]
    good, count = tiles.dense(), sum(len(context.runs) for context in tiles.contexts)
    for name, field, why, body in (
        ("head-cut", "head", "3 bytes", good[:3]),
        ("cut", "sections", "the last byte is missing", good[:-1]),
        ("trailing", "sections", "a byte follows", good + b"\0"),
        ("count-all-ones", "sections", "more larger steps than bytes", tiles.dense(count=_ONES)),
        ("count-too-few", "sections", "fewer larger steps than bytes", tiles.dense(count=count - 1)),
        ("larger-too-few", "codes", "a code 3 without its bits", tiles.dense(count=count - 1)[:-2]),
        ("larger-too-many", "codes", "bits without their code 3", tiles.dense(count=count + 1) + b"\1\2"),
        ("padding-of-the-first-tile", "codes", "a code after the last", tiles.dense(also={(0, 30): 1})),
        ("padding-of-the-last-tile", "codes", "a code after the last", tiles.dense(also={(1, 15): 2})),
        ("one-more-change", "changed", "an element that shall stay moves", tiles.dense(also={(1, 12): 1})),
    ):
        yield Case(name=f"dense-{name}", tiles="pair", body=body, field=field, why=why)


def _results() -> Iterator[Case]:
    tiles = TILES["pair"]
    full = tiles.full()
    yield Case(name="full-cut", tiles="pair", body=full[:-1], field="length", why="the last byte is missing")
    yield Case(name="full-trailing", tiles="pair", body=full + b"\0", field="length", why="a byte follows")
    yield Case(name="full-empty-but-one", tiles="pair", body=b"\0", field="length", why="one byte")
    swapped = full[60:] + full[:60]
    yield Case(name="full-swapped", tiles="pair", body=swapped, field="changed", why="the tiles in another order")
    flip = bytes([full[8] ^ 4])  # an element that changes either way
    yield Case(name="full-flipped", tiles="pair", body=full[:8] + flip + full[9:], field="post", why="a flipped bit")
    signs = replace(ONE, signs="11001")
    yield _flat("other-signs", "post", "a step the other way", sparse([signs]))
    moved = replace(ONE, gaps=(1, *ONE.gaps[1:]))
    yield _flat("other-positions", "post", "all one further", sparse([moved]))
    for name, body in (("sparse", sparse(tiles.contexts)), ("dense", tiles.dense()), ("full", full)):
        first, second = tiles.changed()
        yield Case(
            name=f"{name}-changed-lies", tiles="pair", body=body, field="changed", why="the manifest says one less",
            changed=(first, second - 1),
        )  # fmt: skip


def cases() -> list[Case]:
    """All of them, by file name."""
    found = [*_good(), *_heads(), *_rows(), *_streams(), *_dense(), *_results()]
    return sorted(found, key=lambda case: case.name)


def describe() -> dict[str, Any]:
    """What `bodies.json` says."""
    return {
        "format": "slackwater/2",
        "tiles": {
            name: {
                "dtype": tiles.dtype,
                "old": tiles.hexes(tiles.old),
                "new": tiles.hexes(tiles.new()),
                "changed": tiles.changed(),
            }
            for name, tiles in TILES.items()
        },
        "bodies": [
            {"file": case.file, "encoding": case.encoding, "tiles": case.tiles, "field": case.field, "why": case.why}
            | ({"changed": case.changed} if case.changed else {})
            for case in cases()
        ],
    }


def write(folder: Path) -> None:
    """Write all files."""
    for case in cases():
        (folder / case.file).write_bytes(case.body)
    (folder / "bodies.json").write_text(json.dumps(describe(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
