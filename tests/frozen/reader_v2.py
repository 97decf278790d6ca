"""A reader of `slackwater/2` written from docs/format.md alone: slow, plain, and independent of the package.

It knows nothing of `slackwater.checkpoint`. Whatever the page demands of a reader it checks, and raises `ValueError`.
"""

import base64
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import xxhash

FORMAT = "slackwater/2"
MODULUS = 1 << 64
TILE_BYTES = 8 * 1024 * 1024

WIDTHS = {
    name: width
    for width, names in {
        1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0",
        2: "U16 I16 F16 BF16",
        4: "U32 I32 F32",
        8: "U64 I64 F64",
    }.items()
    for name in names.split()
}
CLASSES = {
    "BF16": (7, 255), "F16": (10, 31), "F32": (23, 255), "F64": (55, 255), "F8_E4M3": (3, 15), "F8_E5M2": (2, 31),
}  # fmt: skip
SECOND_AXIS = re.compile(r"(?:^|\.)(?:o_proj|down_proj|out_proj|w2|wo|wo_b|fc2)\.weight(?:_packed)?\Z")
EXPERT = re.compile(r"(?:^|\.)experts\.[0-9]+\.")


def must(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


# Section 2


@dataclass(frozen=True)
class Tile:
    """A rectangle; contiguous where it has one row."""

    start: int
    rows: int
    cols: int
    stride: int

    @property
    def count(self) -> int:
        return self.rows * self.cols

    def indexes(self) -> Iterator[int]:
        """Flat indexes in the tensor, by position in the tile."""
        for row in range(self.rows):
            yield from range(self.start + row * self.stride, self.start + row * self.stride + self.cols)


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def tiles(self) -> list[Tile]:
        if self.count == 0:
            return []
        if self.count * self.width <= TILE_BYTES:
            return [Tile(start=0, rows=1, cols=self.count, stride=0)]
        expert = EXPERT.search(self.name) is not None
        by_column = not expert and len(self.shape) > 1 and SECOND_AXIS.search(self.name) is not None
        lines = list(self.shape)[1 if by_column else 0]
        line = self.count // lines
        sections = 16 if lines % 16 == 0 and not expert else 1
        section = lines // sections
        most = min(section, max(1, TILE_BYTES // (line * self.width)))
        length = math.ceil(section / math.ceil(section / most))
        cuts = [
            (first, min(first + length, begin + section))
            for begin in range(0, lines, section)
            for first in range(begin, begin + section, length)
        ]
        if not by_column:
            return [Tile(start=first * line, rows=1, cols=(end - first) * line, stride=0) for first, end in cuts]
        rows = next(iter(self.shape))
        inner = line // rows
        return [
            Tile(start=first * inner, rows=rows, cols=(end - first) * inner, stride=lines * inner)
            for first, end in cuts
        ]


def tile_digest(elements: Sequence[int], width: int) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(element.to_bytes(width, "little") for element in elements), seed=0)


def element_sum(name: str, elements: Mapping[int, int]) -> int:
    """The element sum of a part of a tensor: bits by flat index."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    total = 0
    for index, bits in elements.items():
        z = (seed + index * 0x9E3779B97F4A7C15) % MODULUS ^ bits
        z = z * 0xBF58476D1CE4E5B9 % MODULUS
        z ^= z >> 32
        z = z * 0x94D049BB133111EB % MODULUS
        total += z ^ z >> 29
    return total % MODULUS


def state_digest(tensors: Sequence[Tensor], digests: Sequence[int], sums: Sequence[int]) -> str:
    outline = hashlib.sha256(b"slackwater/2 outline\n")
    for tensor in tensors:
        for text in (tensor.name.encode(), tensor.dtype.encode()):
            outline.update(struct.pack("<I", len(text)) + text)
        outline.update(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
    words = [*digests, *sums]
    return hashlib.sha256(
        b"slackwater/2 state\n" + outline.digest() + struct.pack(f"<{len(words)}Q", *words)
    ).hexdigest()


# Section 4


def on_line(bits: int, b: int) -> int:
    top = 1 << (b - 1)
    return bits ^ (2 * top - 1) if bits >= top else bits + top


def off_line(place: int, b: int) -> int:
    top = 1 << (b - 1)
    return place - top if place >= top else place ^ (2 * top - 1)


def stepped(old: int, step: int, b: int) -> int:
    return off_line((on_line(old, b) + step) % (1 << b), b)


class Stream:
    """Bits of one section, lowest first; `end` proves that all of it was read."""

    def __init__(self, section: bytes) -> None:
        self._section = section
        self._bit = 0

    def field(self, bits: int) -> int:
        value = 0
        for place in range(bits):
            must(self._bit < 8 * len(self._section), "a section ends early")
            value |= (self._section[self._bit // 8] >> self._bit % 8 & 1) << place
            self._bit += 1
        return value

    def unary(self) -> int:
        zeros = 0
        while not self.field(1):
            zeros += 1
        return zeros

    def golomb(self, width: int) -> int:
        zeros = self.unary()
        must(zeros + width <= 63, "a Golomb code is too long")
        upper = 1 << zeros | self.field(zeros)
        number = upper - 1 << width | self.field(width)
        must(number < 1 << 63, "a Golomb code's number is too large")
        return number

    def end(self) -> None:
        must(len(self._section) == (self._bit + 7) // 8, "a section is longer than its codes")
        must(self.field(-self._bit % 8) == 0, "a section isn't filled with zeros")


def varint(body: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index in range(5):
        must(at + index < len(body), "a varint is cut")
        byte = body[at + index]
        number |= (byte & 127) << 7 * index
        if byte < 128:
            must(index == 0 or byte > 0, "a varint has a shorter form")
            must(number < 1 << 32, "a varint is too large")
            return number, at + index + 1
    raise ValueError("a varint is too long")


@dataclass(frozen=True)
class Row:
    last: int
    gap_width: int
    run_width: int
    size_width: int
    changes: int
    larger: int


def read_rows(body: bytes, contexts: int) -> tuple[list[Row], int]:
    rows: list[Row] = []
    at = 20
    for _ in range(contexts):
        must(len(body) >= at + 3, "a row is cut")
        last, widths = struct.unpack_from("<BH", body, at)
        changes, at = varint(body, at + 3)
        larger, at = varint(body, at)
        must(widths < 1 << 15, "the highest bit of a row's widths is set")
        rows.append(Row(last, widths & 31, widths >> 5 & 31, widths >> 10, changes, larger))
        must(max(rows[-1].gap_width, rows[-1].run_width, rows[-1].size_width) <= 24, "a width is above 24")
        must(larger <= changes, "more larger steps than changes")
    must(all(before.last < after.last for before, after in pairwise(rows)), "last classes don't rise")
    must(rows[-1].last == 255, "the last class isn't 255")
    return rows, at


def ranks_of(row: Row, quotients: Stream, lows: Stream) -> list[int]:
    """Ranks of a context's changes."""
    at = -1
    ranks: list[int] = []
    for _ in range(row.changes):
        at += (quotients.unary() << row.gap_width | lows.field(row.gap_width)) + 1
        ranks.append(at)
    return ranks


def larger_of(row: Row, quotients: Stream, lows: Stream, sizes: list[int]) -> dict[int, int]:
    """Magnitudes of a context's larger steps, by the index of the change in its context."""
    at = -1
    found: dict[int, int] = {}
    for size in sizes:
        at += (quotients.unary() << row.run_width | lows.field(row.run_width)) + 1
        must(at < row.changes, "a run leaves its context")
        found[at] = size + 2
    return found


def sparse(body: bytes, olds: Sequence[Sequence[int]], dtype: str) -> list[list[int]]:
    must(len(body) >= 20, "the head is cut")
    count, contexts, zero, *lengths = struct.unpack_from("<IHHIII", body)
    must(1 <= count <= sum(map(len, olds)), "changes are out of bounds")
    must(1 <= contexts <= 256, "contexts are out of bounds")
    must(zero == 0, "the head's zero isn't")
    rows, begin = read_rows(body, contexts)
    must(sum(row.changes for row in rows) == count, "changes don't add up")
    gap_lows = (sum(row.changes * row.gap_width for row in rows) + 7) // 8
    run_lows = (sum(row.larger * row.run_width for row in rows) + 7) // 8
    sizes = (lengths[0], gap_lows, (count + 7) // 8, lengths[1], run_lows, lengths[2])
    ends = list(accumulate(sizes, initial=begin))
    must(ends[-1] == len(body), "sections don't fill the body")
    streams = [Stream(body[start:end]) for start, end in pairwise(ends)]
    news = [list(old) for old in olds]
    shift, mask = CLASSES.get(dtype, (0, 0))
    first, b = 0, 8 * WIDTHS[dtype]
    ranks = [ranks_of(row, streams[0], streams[1]) for row in rows]
    signs = [[streams[2].field(1) for _ in range(row.changes)] for row in rows]
    lengths_of = [[streams[5].golomb(row.size_width) for _ in range(row.larger)] for row in rows]
    for row, found, negative, larger in zip(rows, ranks, signs, lengths_of, strict=True):
        members = [
            (tile, position)
            for tile, old in enumerate(olds)
            for position, bits in enumerate(old)
            if first <= (bits >> shift & mask) <= row.last
        ]
        magnitudes = larger_of(row, streams[3], streams[4], larger)
        must(not found or found[-1] < len(members), "a rank is no element's")
        for index, rank in enumerate(found):
            tile, position = members[rank]
            magnitude = magnitudes.get(index, 1)
            must(magnitude <= 1 << (b - 1), "a step is too large")
            news[tile][position] = stepped(olds[tile][position], -magnitude if negative[index] else magnitude, b)
        first = row.last + 1
    for stream in streams:
        stream.end()
    return news


def dense(body: bytes, olds: Sequence[Sequence[int]], dtype: str) -> list[list[int]]:
    must(len(body) >= 4, "the head is cut")
    (count,) = struct.unpack_from("<I", body)
    width = WIDTHS[dtype]
    ends = list(accumulate([*((len(old) + 3) // 4 for old in olds), count * width], initial=4))
    must(ends[-1] == len(body), "parts don't fill the body")
    larger = full(body[ends[-2] :], [[0] * count], dtype)[0]
    news: list[list[int]] = []
    for old, (start, end) in zip(olds, pairwise(ends), strict=False):
        codes = Stream(body[start:end])
        new: list[int] = []
        for bits in old:
            code = codes.field(2)
            must(code < 3 or len(larger) > 0, "there are more codes 3 than new bits")
            new.append(larger.pop(0) if code == 3 else stepped(bits, (0, 1, -1)[code], 8 * width))
        codes.end()
        news.append(new)
    must(not larger, "there are fewer codes 3 than new bits")
    return news


def full(body: bytes, olds: Sequence[Sequence[int]], dtype: str) -> list[list[int]]:
    width = WIDTHS[dtype]
    must(len(body) == width * sum(map(len, olds)), "elements don't fill the body")
    elements = iter([int.from_bytes(body[at : at + width], "little") for at in range(0, len(body), width)])
    return [[next(elements) for _ in old] for old in olds]


ENCODINGS = {"s": sparse, "d": dense, "f": full}


# Sections 1, 3 and 5

MEMBERS = {
    "format", "run", "version", "kind", "parent", "state", "step", "created_at",
    "objects", "tensors", "files", "bodies", "tiles", "quantizers", "nans", "canary",
}  # fmt: skip


def column(text: str, count: int) -> list[int]:
    data = base64.b64decode(text, validate=True)
    must(len(data) == 8 * count and base64.b64encode(data).decode() == text, "a column has another length")
    return list(struct.unpack(f"<{count}Q", data))


LARGEST = (1 << 1024) - (1 << 970)
"""From here on numbers round to an infinity."""


def no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def check_canary(canary: Any) -> None:
    must(type(canary) is dict, "a canary is no object")
    must(canary.keys() - {"tolerance"} == {"prompt", "tokens", "logprobs"}, "a canary's members are others")
    for member, most in (("prompt", 512), ("tokens", 64)):
        ids = canary[member]
        must(type(ids) is list and 1 <= len(ids) <= most, f"a canary's {member} is out of bounds")
        must(all(type(item) is int and 0 <= item < 1 << 31 for item in ids), "a canary's token id is out of bounds")
    must(type(canary["logprobs"]) is list, "a canary has no log-probabilities")
    logprobs: list[Any] = canary["logprobs"]
    tolerance: Any = canary.get("tolerance", 0.25)
    must(len(logprobs) == len(canary["tokens"]), "a token has no log-probability")
    for number in (*logprobs, tolerance):
        must(type(number) in {int, float} and abs(number) < LARGEST, "a canary's number isn't one")
    must(all(number <= 0 for number in logprobs), "a log-probability is above 0")
    must(0 < tolerance <= 100, "a canary's tolerance is out of bounds")


def read_manifest(body: bytes) -> dict[str, Any]:
    manifest = json.loads(body, parse_constant=no_number)
    must(manifest["format"] == FORMAT, f"this is {manifest['format']}, not {FORMAT}")
    must(manifest.keys() <= MEMBERS, "a member is unknown")
    if manifest.get("canary") is not None:
        check_canary(manifest["canary"])
    return manifest


class Reader:
    """A run in a folder, followed from its first manifest: `bits` is every tensor's elements now."""

    def __init__(self, root: Path, run: str) -> None:
        self._root = root
        self._run = run
        self.version = -1
        self.state = ""
        self.bits: dict[str, list[int]] = {}
        self.bodies: list[tuple[str, int]] = []
        """Of the version read last: each body's encoding and, if it is sparse, its contexts."""
        self._tensors: list[Tensor] = []
        self._places: list[tuple[Tensor, Tile]] = []
        self._digests: list[int] = []
        self._sums: list[int] = []
        self._side_files: dict[str, str] = {}

    def next(self) -> bool:
        """Read the next version; False where there is none."""
        path = self._root / self._run / "manifests" / f"{self.version + 1:08d}.json"
        if not path.exists():
            return False
        self._follow(read_manifest(path.read_bytes()), self.version + 1)
        return True

    def fold(self, to: int) -> None:
        """Go to a committed version by one fold from the version held."""
        name = f"{self.version:08d}-{to:08d}.json"
        manifest = read_manifest((self._root / self._run / "folds" / name).read_bytes())
        committed = read_manifest((self._root / self._run / "manifests" / f"{to:08d}.json").read_bytes())
        must(manifest["state"] == committed["state"], "the fold leads somewhere else")
        self._follow(manifest, to)

    def _follow(self, manifest: dict[str, Any], version: int) -> None:
        must((manifest["run"], manifest["version"]) == (self._run, version), "the manifest is another one's")
        objects = [self._object(*item) for item in manifest["objects"]]
        if manifest["kind"] == "anchor":
            self._load(manifest, objects)
        else:
            must(manifest["parent"] == {"version": self.version, "state": self.state}, "the parent is another one")
            self.apply(manifest, objects)
        self.state = state_digest(self._tensors, self._digests, self._sums)
        must(self.state == manifest["state"], "the state is another one")
        self.version = version

    def _object(self, key: str, size: int, sha256: str) -> bytes:
        body = (self._root / key).read_bytes()
        must(key.startswith(f"{self._run}/") and len(body) == size, f"{key} has another size")
        must(hashlib.sha256(body).hexdigest() == sha256, f"{key} has another SHA-256")
        return body

    def _load(self, manifest: dict[str, Any], objects: Sequence[bytes]) -> None:
        files = manifest["files"]
        endings = (".safetensors", ".safetensors.index.json", ".md")
        others = {file: manifest["objects"][at][2] for file, at in files.items() if not file.endswith(endings)}
        must(self.version < 0 or others == self._side_files, "the run's other files have changed")
        self._side_files = others
        entries = [(Tensor(name, dtype, tuple(shape)), *place) for name, dtype, shape, *place in manifest["tensors"]]
        self._tensors = [tensor for tensor, *_ in entries]
        must(all(a.name < b.name for a, b in pairwise(self._tensors)), "names don't rise")
        self._places = [(tensor, tile) for tensor in self._tensors for tile in tensor.tiles()]
        self._digests, self._sums, self.bits, self.bodies = [], [], {}, []
        for tensor, item, offset, digests in entries:
            must(item in files.values(), "a tensor lies in no file")
            raw = objects[item][offset : offset + tensor.count * tensor.width]
            self.bits[tensor.name] = full(raw, [[0] * tensor.count], tensor.dtype)[0]
            *words, total = column(digests, len(tensor.tiles()) + 1)
            must(words == [self._digest(tensor, tile) for tile in tensor.tiles()], f"{tensor.name} has another digest")
            self._digests += words
            self._sums.append(total)
            self._check_sum(len(self._sums) - 1)

    def apply(self, manifest: dict[str, Any], objects: Sequence[bytes]) -> None:
        """Bring the bodies of a delta into the bits held, whichever of its tiles are done already."""
        bodies, tiles = manifest["bodies"], manifest["tiles"]
        count = sum(bodies["tiles"])
        numbers, changed = tiles["number"], tiles["changed"]
        must(len(numbers) == len(set(numbers)) == len(changed) == count, "tiles don't add up")
        digests = column(tiles["digests"], 2 * count)
        listed = iter(zip(numbers, changed, digests[0::2], digests[1::2], strict=True))
        self.bodies = []
        at = [0] * len(objects)
        for item, length, letter, made in zip(*(bodies[name] for name in BODY_COLUMNS), strict=True):
            body = objects[item][at[item] : at[item] + length]
            at[item] += length
            must(len(body) == length, "a body leaves its object")
            self.bodies.append((letter, struct.unpack_from("<H", body, 4)[0] if letter == "s" else 0))
            self._make(letter, body, [next(listed) for _ in range(made)])
        must(at == [len(item) for item in objects], "bodies don't fill their objects")
        tensors = sorted({self._tensors.index(self._places[number][0]) for number in numbers})
        for tensor, total in zip(tensors, column(tiles["sums"], len(tensors)), strict=True):
            self._sums[tensor] = total
            self._check_sum(tensor)

    def _make(self, letter: str, body: bytes, listed: Sequence[tuple[int, int, int, int]]) -> None:
        places = [self._places[number] for number, *_ in listed]
        olds = [self._take(tensor, tile) for tensor, tile in places]
        must(len({tensor.dtype for tensor, _ in places}) == 1, "a body has tiles of two dtypes")
        held = [self._digest(tensor, tile) for tensor, tile in places]
        done = [digest == post for digest, (*_, post) in zip(held, listed, strict=True)]
        must(all(d or h == pre for d, h, (_, _, pre, _) in zip(done, held, listed, strict=True)), "the base is wrong")
        if all(done):
            return
        must(not any(done) or letter != "s" or body[4:6] == b"\1\0", "a body of several contexts is applied by half")
        news = ENCODINGS[letter](body, olds, places[0][0].dtype)
        for (tensor, tile), old, new, is_done, entry in zip(places, olds, news, done, listed, strict=True):
            number, changed, pre, post = entry
            must(pre != post and self._digests[number] in (pre, post), "the digest before isn't the parent's")
            self._digests[number] = post
            if is_done:
                continue
            must(sum(a != b for a, b in zip(old, new, strict=True)) == changed, "another number of elements changes")
            must(tile_digest(new, tensor.width) == post, "the digest after is another one")
            for index, bits in zip(tile.indexes(), new, strict=True):
                self.bits[tensor.name][index] = bits

    def _take(self, tensor: Tensor, tile: Tile) -> list[int]:
        return [self.bits[tensor.name][index] for index in tile.indexes()]

    def _digest(self, tensor: Tensor, tile: Tile) -> int:
        return tile_digest(self._take(tensor, tile), tensor.width)

    def _check_sum(self, index: int) -> None:
        name = self._tensors[index].name
        found = element_sum(name, dict(enumerate(self.bits[name])))
        must(found == self._sums[index], f"{name} has another element sum")


BODY_COLUMNS = ("object", "length", "encoding", "tiles")
