"""How much memory it takes to apply a delta to a checkpoint of 4 GB that is mapped.

The checkpoint is made in a temporary folder: every tile has the same bits, so that one body makes each of them. See
`applying` for what is measured.
"""

import json
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

import applying
import densities
from slackwater.checkpoint.codec import Level, Place, encode_body
from slackwater.checkpoint.manifest import BodyEntry, TileEntry
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits, TensorSpec, tiles
from slackwater.errors import InternalError, UnsupportedError

TENSORS: Final = 16
SHAPE: Final = (16384, 8192)
"""Of each tensor: 256 MiB of bf16."""

_KINDS: Final = ("up_proj", "down_proj")
"""One is cut by row, and its tiles are views of the file; the other by column, and they are copies."""
_STEPS: Final[tuple[tuple[str, Level, float], ...]] = (
    ("fast, 1.42 %", "fast", 0.0142),
    ("wan, 1.42 %", "wan", 0.0142),
    ("fast, 30 %", "fast", 0.3),
)
_SPREAD: Final = 0.02
"""Standard deviation of the weights, as of a language model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    outline: Outline
    pattern: Bits
    """The bits of each tile."""

    def tensor(self, index: int) -> Bits:
        """All bits of one tensor."""
        spec = self.outline.specs[self.outline.by_name[_name(index)]]
        bits = np.empty(spec.num_elements, dtype=spec.bits_dtype)
        for tile in tiles(spec):
            tile.put(bits, self.pattern)
        return bits


def measure(work: Path, tensors: int = TENSORS, shape: tuple[int, int] = SHAPE) -> list[applying.Applied]:
    """Make a checkpoint and deltas below ``work``, apply them in a process of its own, and remove them.

    Raises:
        UnsupportedError: The system doesn't tell a process's anonymous memory.
    """
    if not applying.STATUS.is_file():
        raise UnsupportedError(f"this system has no {applying.STATUS}", hint="run the benchmark on Linux")
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        folder = Path(scratch)
        checkpoint = _prepare(folder / applying.FILE, tensors, shape)
        (folder / applying.STEPS).write_bytes(msgspec.json.encode(_steps(checkpoint)))
        command = [sys.executable, str(Path(applying.__file__)), scratch]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(found, type=list[applying.Applied])


def _prepare(path: Path, tensors: int, shape: tuple[int, int]) -> _Checkpoint:
    specs = [TensorSpec(name=_name(index), dtype="BF16", shape=shape) for index in range(tensors)]
    outline = Outline(specs)
    sizes = {outline.place(number)[1].count for number in range(outline.num_tiles)}
    if len(sizes) != 1:
        raise InternalError(f"tiles of {sorted(sizes)} elements can't have the same bits")
    checkpoint = _Checkpoint(outline=outline, pattern=_weights(sizes.pop()))
    written = [checkpoint.tensor(index) for index in range(min(tensors, len(_KINDS)))]
    with path.open("wb") as file:
        file.write(_header(specs))
        for index in range(tensors):
            written[index % len(_KINDS)].tofile(file)
    return checkpoint


def _name(index: int) -> str:
    return f"model.layers.{index}.mlp.{_KINDS[index % len(_KINDS)]}.weight"


def _weights(count: int) -> Bits:
    values: npt.NDArray[np.float32] = np.random.default_rng(0).normal(0, _SPREAD, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _header(specs: list[TensorSpec]) -> bytes:
    entries = {
        spec.name: {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (index * spec.num_bytes, (index + 1) * spec.num_bytes),
        }
        for index, spec in enumerate(specs)
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _steps(checkpoint: _Checkpoint) -> list[applying.Step]:
    """Deltas one after the other, each from the state that the one before made."""
    rng = np.random.default_rng(1)
    spec, tile = checkpoint.outline.place(0)
    place, old, steps = Place(spec=spec, tile=tile), checkpoint.pattern, list[applying.Step]()
    for name, level, share in _STEPS:
        new = old.copy()
        where = np.flatnonzero(rng.random(new.size) < share)
        new[where] = densities.by_steps(new[where], rng)
        steps.append(_step(name, place, old, new, level))
        old = new
    return steps


def _step(name: str, place: Place, old: Bits, new: Bits, level: Level) -> applying.Step:
    encoded = encode_body([place], [old], [new], level)
    if encoded is None:
        raise InternalError("a delta of the mapped checkpoint is empty")
    tiles = tuple(TileEntry(0, tile.changed, tile.pre, tile.post) for tile in encoded.tiles)
    entry = BodyEntry(object=0, offset=0, length=len(encoded.body), encoding=encoded.encoding, tiles=tiles)
    return applying.Step(name=name, entry=entry, body=encoded.body)
