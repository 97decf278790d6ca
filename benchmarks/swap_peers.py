"""What else could change weights in a still moment: a dense copy, vLLM's patches with NaN, and the limit of scattering.

Each writes the new bits over the live parameters, with all that can be made before the pause made before it.

- **Dense copies** read the new checkpoint's file from the page cache: by numpy and by torch tensor for tensor, on one
  thread and on two of ours (torch's own pool is slower wherever something else runs), and in one compiled call whose
  stores go past the caches.
- **NaN patches**: vLLM's sparse weight transfer fills a tensor as large as each one touched with NaN, puts the new
  values in, and copies where it isn't NaN. Only the copying is timed; making the tensors is told beside it.
- **The limit** is a compiled loop that stores the new values at the sorted positions: no check, nothing to undo.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from safetensors.torch import load_file

from pairs import Pair, States
from slackwater.checkpoint.jit import array_at, kernel
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import InternalError

DENSE: Final = ("numpy", "numpy, 2 threads", "torch", "torch, 2 threads", "past the caches")
"""Names of the dense copies."""
NAN: Final = ("nan patch", "nan patch, 2 threads")
"""Names of the NaN patches."""
LIMIT: Final = "scatter limit"

_THREADS: Final = 2
_Tensor = TypeVar("_Tensor", Bits, torch.Tensor)

_TARGET, _PLACES, _VALUES, _COUNT = range(4)
_LINE: Final = 32
"""Elements of bf16 in a cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A way to write the new bits."""

    name: str
    write: Callable[[], object]
    holds: tuple[object, ...] = ()
    """What must live as long as it: addresses lead there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """The parameters that a forward pass reads, by name."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def bits(self) -> dict[str, Bits]:
        """Flat views of 16 bits an element, writable."""
        return {
            name: tensor.view(torch.int16).view(-1).numpy().view(np.uint16) for name, tensor in self.tensors.items()
        }

    def put(self, states: States) -> None:
        """Write a whole state."""
        for name, bits in self.bits.items():
            np.copyto(bits, states[name])

    def holds(self, states: States) -> bool:
        """Whether every bit is that of a state."""
        return all(np.array_equal(bits, states[name]) for name, bits in self.bits.items())


def dense(live: Live, file: Path) -> Iterator[Peer]:
    """The dense copies.

    Args:
        live: What is written.
        file: The new checkpoint: safetensors. It is mapped.
    """
    mapped = load_file(file)
    new = Live(tensors=mapped).bits
    pairs = [(bits, new[name]) for name, bits in live.bits.items()]
    tensors = [(tensor, mapped[name]) for name, tensor in live.tensors.items()]
    table = stream_table(pairs)
    stream(table[:0])
    yield from _both(DENSE[0], lambda pair: np.copyto(*pair), pairs)
    yield from _both(DENSE[2], lambda pair: pair[0].copy_(pair[1]), tensors)
    yield Peer(name=DENSE[4], write=lambda: stream(table), holds=(pairs, mapped))


def stream_table(pairs: Sequence[tuple[Bits, Bits]]) -> npt.NDArray[np.int64]:
    """What `stream` copies: targets and sources of 16 bits an element, which must live while it does."""
    lines = [(_address(target), 0, _address(source), target.size) for target, source in pairs]
    return np.array(lines, dtype=np.int64)


def nan_patches(live: Live, pair: Pair) -> tuple[float, tuple[Peer, ...]]:
    """Seconds that making the tensors of NaN took, and the patches on one thread and on two."""
    begun = time.perf_counter()
    masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in live.tensors.items():
        positions = np.flatnonzero(pair.old[name] != pair.new[name])
        if positions.size:
            mask = torch.full_like(tensor, float("nan"))
            values = torch.from_numpy(pair.new[name][positions].view(np.int16)).view(torch.bfloat16)
            mask.view(-1)[torch.from_numpy(positions)] = values
            masks.append((tensor, mask))
    seconds = time.perf_counter() - begun

    def patch(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensor, mask = pair
        tensor.copy_(torch.where(torch.isnan(mask), tensor, mask))

    return seconds, _both(NAN[0], patch, masks)


def limit(live: Live, pair: Pair) -> Peer:
    """The bare scatter: 32-bit positions, one line of the table for each tensor."""
    holds: list[tuple[Bits, npt.NDArray[np.uint32], Bits]] = []
    for name, bits in live.bits.items():
        positions = np.flatnonzero(pair.old[name] != pair.new[name]).astype(np.uint32)
        holds.append((bits, positions, pair.new[name][positions]))
    lines = [(_address(bits), _address(at), _address(values), at.size) for bits, at, values in holds]
    table = np.array(lines, dtype=np.int64)
    _scatter(table[:0])
    return Peer(name=LIMIT, write=lambda: _scatter(table), holds=tuple(holds))


def check(peer: Peer, live: Live, pair: Pair) -> None:
    """Let a peer write the new bits over the old ones, and put the old ones back.

    Raises:
        InternalError: It doesn't make the new bits.
    """
    live.put(pair.old)
    peer.write()
    if not live.holds(pair.new):
        raise InternalError(f"{peer.name} doesn't make the new bits")
    live.put(pair.old)


def _both(
    name: str, work: Callable[[tuple[_Tensor, _Tensor]], object], pairs: Sequence[tuple[_Tensor, _Tensor]]
) -> tuple[Peer, Peer]:
    """A peer that works through pairs of tensors, on one thread and on two."""
    pool = ThreadPoolExecutor(_THREADS, initializer=torch.set_num_threads, initargs=(1,))

    def each(some: Iterable[tuple[_Tensor, _Tensor]]) -> None:
        for pair in some:
            work(pair)

    parts = _parts(pairs)
    return (
        Peer(name=name, write=lambda: each(pairs)),
        Peer(name=f"{name}, 2 threads", write=lambda: list(pool.map(each, parts))),
    )


def _parts(pairs: Sequence[tuple[_Tensor, _Tensor]]) -> list[list[tuple[_Tensor, _Tensor]]]:
    """A list for each thread, of about as many bytes."""
    parts: list[list[tuple[_Tensor, _Tensor]]] = [[] for _ in range(_THREADS)]
    sizes = [0] * _THREADS
    for pair in sorted(pairs, key=lambda pair: -pair[0].nbytes):
        least = sizes.index(min(sizes))
        parts[least].append(pair)
        sizes[least] += pair[0].nbytes
    return parts


def _address(bits: npt.NDArray[Any]) -> int:
    return bits.ctypes.data


@intrinsic
def _store_past(_context: Any, _target: Any, _source: Any) -> Any:
    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(16), _LINE).as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], line), align=1)
        stored = builder.store(value, builder.inttoptr(arguments[0], line), align=2 * _LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@kernel
def stream(table: npt.NDArray[np.int64]) -> None:
    """Copy every line's elements, whole cache lines with stores that don't read them first."""
    for line in range(len(table)):
        target, source, count = table[line, _TARGET], table[line, _VALUES], table[line, _COUNT]
        bits, values = array_at(target, count, np.uint16), array_at(source, count, np.uint16)
        begin = min(count, -(target // 2) % _LINE)
        for index in range(begin):
            bits[index] = values[index]
        end = begin + (count - begin) // _LINE * _LINE
        for index in range(begin, end, _LINE):
            _store_past(target + 2 * index, source + 2 * index)  # pyright: ignore[reportCallIssue] : numba's own types
        for index in range(end, count):
            bits[index] = values[index]


@kernel
def _scatter(table: npt.NDArray[np.int64]) -> None:
    """Store every line's values at its positions."""
    for line in range(len(table)):
        count = table[line, _COUNT]
        bits = array_at(table[line, _TARGET], count, np.uint16)
        places = array_at(table[line, _PLACES], count, np.uint32)
        values = array_at(table[line, _VALUES], count, np.uint16)
        for index in range(count):
            bits[places[index]] = values[index]
