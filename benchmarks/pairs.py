"""Two states of a model in this process's memory: what every codec of the benchmark is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import deltas
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.weights.source import ShardSource

States = Mapping[str, Bits]
"""Flat, writable bits of each tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Some tensors in memory: a `slackwater.weights.source.TensorSource`."""

    tensors: Mapping[str, TensorSpec]
    states: States

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self.tensors

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`."""
        return self.states[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A model before and after a step."""

    outline: Outline
    old: States
    new: States

    @property
    def num_bytes(self) -> int:
        """Dense bytes of one state."""
        return self.outline.num_bytes

    @property
    def before(self) -> Memory:
        """The state before, as a source."""
        return Memory(tensors=self._specs(), states=self.old)

    @property
    def after(self) -> Memory:
        """The state after, as a source."""
        return Memory(tensors=self._specs(), states=self.new)

    def _specs(self) -> Mapping[str, TensorSpec]:
        return {spec.name: spec for spec in self.outline.specs}


def load(name: str) -> Pair:
    """Read one set of `deltas` into memory.

    Raises:
        NotFoundError: It was not made.
        CorruptError: It is not what was made.
    """
    found = deltas.load(name)
    path = deltas.cache_folder() / f"{name}.old.safetensors"
    specs = ShardSource({path.name: np.memmap(path, dtype=np.uint8, mode="r")}).specs()
    return Pair(outline=Outline(specs.values()), old=copy(found.old), new=copy(found.new))


def read(path: Path) -> Pair:
    """Read a file that holds both states of some tensors, as ``old.<name>`` and ``new.<name>``."""
    source = ShardSource({path.name: memoryview(path.read_bytes())})
    specs = [
        TensorSpec(name=name.removeprefix("old."), dtype=spec.dtype, shape=spec.shape)
        for name, spec in source.specs().items()
        if name.startswith("old.")
    ]
    states = {age: {spec.name: source.bits(f"{age}.{spec.name}").copy() for spec in specs} for age in ("old", "new")}
    return Pair(outline=Outline(specs), old=states["old"], new=states["new"])


def copy(states: States) -> dict[str, Bits]:
    """Fresh, writable arrays of the same bits."""
    return {name: np.array(bits) for name, bits in states.items()}


def copy_onto(held: States, states: States) -> None:
    """Write the bits of ``states`` over ``held``, which has the same tensors."""
    for name, bits in states.items():
        np.copyto(held[name], bits)


def same(one: States, other: States) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(np.array_equal(bits, other[name]) for name, bits in one.items())
