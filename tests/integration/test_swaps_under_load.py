"""Two hundred random swaps and roll-backs of a tiny model that answers meanwhile, exact to the bit."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.engine.base import Staged
from slackwater.engine.torch.engine import TorchEngine
from slackwater.errors import SwapError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Completion, Finish, collect
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

SWAPS = 200
READERS = 4
States = dict[str, Bits]
Undo = tuple[Staged, States]
"""The last commit, and what memory held before it."""


def whole(spec: TensorSpec) -> Tile:
    return Tile(index=0, start=0, cols=spec.num_elements)


def tile_of(spec: TensorSpec, random: np.random.Generator) -> Tile:
    """Some rows, or some columns."""
    if len(spec.shape) == 1 or random.random() < 0.5:
        start = int(random.integers(0, spec.num_elements))
        return Tile(index=0, start=start, cols=int(random.integers(1, spec.num_elements - start + 1)))
    rows, stride = spec.shape
    start = int(random.integers(0, stride))
    return Tile(index=0, start=start, rows=rows, cols=int(random.integers(1, stride - start + 1)), stride=stride)


def step(held: States, specs: Mapping[str, TensorSpec], random: np.random.Generator) -> tuple[list[TileWrite], States]:
    """Writes to some tensors, which flip the lowest bit of a random share of a tile's elements; and what they make."""
    writes: list[TileWrite] = []
    after = dict(held)
    for name in random.choice(sorted(specs), size=3, replace=False).tolist():
        tile = tile_of(specs[name], random)
        values = tile.take(held[name]) ^ held[name].dtype.type(1)
        positions = None
        if random.random() < 0.7:
            positions = np.flatnonzero(random.random(tile.count) < random.choice([0.002, 0.014, 0.2])).astype(np.uint32)
            values = values[positions]
        write = TileWrite(name=name, tile=tile, positions=positions, values=values)
        after[name] = held[name].copy()
        write.put(after[name])
        writes.append(write)
    return writes, after


def memory(engine: TorchEngine) -> States:
    return {name: engine.read(name, whole(spec)).copy() for name, spec in engine.tensors().items()}


def same(one: States, other: States) -> bool:
    return all(np.array_equal(bits, other[name]) for name, bits in one.items())


async def answer(engine: TorchEngine, number: int) -> Completion:
    request = CompletionRequest(
        request_id=RequestId(f"r{number}"),
        prompt_ids=tuple(range(1, 40)),
        sampling=SamplingSpec(max_tokens=200, temperature=0.5, seed=number),
    )
    asked = await engine.generate(request)
    steps = [item async for item in asked]
    await asked.aclose()
    return collect(asked.origin, steps, asked.finish)


async def read_on(engine: TorchEngine, done: asyncio.Event, first: int) -> list[Completion]:
    """Ask again and again until it is done."""
    found: list[Completion] = []
    while not done.is_set():
        found.append(await answer(engine, first + len(found)))
    return found


async def swap_on(engine: TorchEngine, held: States) -> int:
    """Swap and roll back at random; what memory holds is compared each time. Returns how many were rolled back."""
    random = np.random.default_rng(5)
    specs = engine.tensors()
    undone = 0
    last: Undo | None = None
    stale = await engine.stage(step(held, specs, random)[0])
    for number in range(2, SWAPS + 2):
        if last is not None and random.random() < 0.3:
            await engine.undo(last[0], Version(number))
            held, last = last[1], None
            undone += 1
        else:
            writes, after = step(held, specs, random)
            staged = await engine.stage(writes)
            await engine.commit(staged, Version(number))
            last, held = (staged, held), after
        assert same(memory(engine), held)
        if number == SWAPS // 2:
            with pytest.raises(SwapError, match="stage them again"):
                await engine.commit(stale, Version(0))
            assert same(memory(engine), held)
    return undone


async def test_two_hundred_swaps_and_roll_backs_under_load_are_exact_to_the_bit(tmp_path: Path) -> None:
    engine = await TorchEngine.open(
        write_tiny_model(tmp_path, tokenizer=False),
        version=Version(1),
        run=RunId("demo"),
        replica=ReplicaId("r0"),
        boot=BootId("b0"),
        window=512,
    )
    try:
        done = asyncio.Event()
        readers = [asyncio.create_task(read_on(engine, done, 1000 * number)) for number in range(READERS)]
        undone = await swap_on(engine, memory(engine))
        done.set()
        found = [item for answers in await asyncio.gather(*readers) for item in answers]
        assert undone > SWAPS // 10
        assert all(item.finish in (Finish.LENGTH, Finish.STOP) for item in found)
        across = 0
        for item in found:
            versions = [span.version for span in item.policy]
            assert versions == sorted(set(versions))
            assert item.origin.prompt_version == versions[0]
            across += len(versions) > 1
        assert across
        fresh = await answer(engine, 7)
        assert {item.version for item in fresh.steps} == {Version(SWAPS + 1)}
    finally:
        await engine.close()
