"""Pauses of an engine under load, and in the same still moments what else could have written the same bits.

Sixteen requests stream. Each sample is one commit: when the engine stands still for it, the peers are run first, each
after its caches were emptied and the old bits put back, in the same thread and on the same memory; then the caches are
emptied again and the engine's own pause begins. An undo brings the old weights back for the next sample.
"""

import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

import swap_peers
from pairs import Pair
from slackwater.checkpoint.changes import find_changes
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.tensor import TensorSpec, Tile, TileWrite, tiles
from slackwater.engine.base import Engine, Proof
from slackwater.ids import Version
from slackwater.replica.prepare import Check, first_difference
from slackwater.replica.race import Stop
from swap_load import PROMPT, WINDOW, Eviction, StillClock, open_engine, streaming
from swap_peers import Live, Peer

_FIRST: Final = Version(1)
_STRICT: Final = 12
"""Most samples of a strict commit."""
_THREADS: Final = 2
"""As a replica has for reading back."""
_DENSE_SHARE: Final = 8
"""A decoded tile is handed over whole where more than one element in so many changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Still:
    """Seconds of still moments, by sample."""

    name: str
    share: float
    """Changed elements over all."""
    num_bytes: int
    """Of all tensors."""
    staged_bytes: int
    """Held ready for the commit, undo log included."""
    pauses: tuple[float, ...]
    undos: tuple[float, ...]
    stricts: tuple[float, ...]
    """Pauses in which all written tiles are read back and compared as well."""
    peers: Mapping[str, tuple[float, ...]]
    """The same bits written otherwise, in the first of the pauses."""
    nan_made: float
    """Seconds for the NaN patches' tensors."""
    mixed: int
    """Commits and undos after which some bit wasn't the state's."""
    aborted: int
    false_labels: int

    def median(self, names: Iterable[str]) -> float:
        """Seconds of the fastest of some peers."""
        return min(statistics.median(self.peers[name]) for name in names if name in self.peers)

    @property
    def pause(self) -> float:
        """The median pause, in seconds."""
        return statistics.median(self.pauses)

    @property
    def pause_beside(self) -> float:
        """The median of the pauses that peers ran beside, in seconds."""
        beside = max(map(len, self.peers.values()), default=0)
        return statistics.median(self.pauses[:beside] or self.pauses)


async def measure(name: str, folder: Path, new_file: Path, pair: Pair, *, beside: int, samples: int) -> Still:
    """Measure one set.

    Args:
        name: The set's.
        folder: A model folder that holds ``pair.old``.
        new_file: ``pair.new`` as safetensors, mapped by the dense copies.
        pair: The states.
        beside: Samples that peers run in as well.
        samples: Samples in all.
    """
    clock, evict, versions = StillClock(), Eviction(), map(Version, count(_FIRST + 1))
    engine, live = await open_engine(folder, _FIRST, clock)
    try:
        nan_made, patches = swap_peers.nan_patches(live, pair)
        peers = [swap_peers.limit(live, pair), *swap_peers.dense(live, new_file), *patches]
        for peer in peers:
            swap_peers.check(peer, live, pair)
        seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
        staged = await engine.stage(writes(pair))
        pauses: list[float] = []
        undos: list[float] = []
        stricts: list[float] = []
        proof = _proof(engine, pair)
        mixed = 0

        def compare() -> None:
            for peer in random.sample(peers, len(peers)):
                seconds[peer.name].append(_timed(peer, live, pair, evict))
            evict()

        async with streaming(engine.generate, lambda: engine.stats().version, WINDOW - PROMPT) as streams:
            for number in range(samples):
                clock.before_pause(compare if number < beside else evict)
                pauses.append((await engine.commit(staged, next(versions))).pause_s)
                mixed += not live.holds(pair.new)
                clock.before_pause(evict)
                undos.append((await engine.undo(staged, next(versions))).pause_s)
                mixed += not live.holds(pair.old)
            for _ in range(min(beside, _STRICT)):
                clock.before_pause(evict)
                stricts.append((await engine.commit(staged, next(versions), proof=proof)).pause_s)
                await engine.undo(staged, next(versions))
    finally:
        await engine.close()
    return Still(
        name=name,
        share=_changed(pair) / pair.outline.num_elements,
        num_bytes=pair.num_bytes,
        staged_bytes=staged.num_bytes,
        pauses=tuple(pauses),
        undos=tuple(undos),
        stricts=tuple(stricts),
        peers={peer: tuple(found) for peer, found in seconds.items() if found},
        nan_made=nan_made,
        mixed=mixed,
        aborted=streams.aborted,
        false_labels=streams.false_labels,
    )


def _proof(engine: Engine, pair: Pair) -> Proof:
    """What a strict replica has the engine call in its pause."""
    checks = [
        Check(name=write.name, tile=write.tile, digest=tile_digest(write.tile.take(pair.new[write.name])))
        for write in writes(pair)
    ]
    return lambda: None if first_difference(engine, checks, _THREADS, Stop()) is None else "a tile"


def _timed(peer: Peer, live: Live, pair: Pair, evict: Eviction) -> float:
    evict()
    begun = time.perf_counter()
    peer.write()
    seconds = time.perf_counter() - begun
    live.put(pair.old)
    return seconds


def writes(pair: Pair) -> list[TileWrite]:
    """What decoding a delta of a pair hands to the engine."""
    found = [_write(spec, tile, pair) for spec in pair.outline.specs for tile in tiles(spec)]
    return [write for write in found if write is not None]


def _write(spec: TensorSpec, tile: Tile, pair: Pair) -> TileWrite | None:
    old, new = tile.take(pair.old[spec.name]), tile.take(pair.new[spec.name])
    changes = find_changes(old, new, tile.count // _DENSE_SHARE)
    if changes is None:
        return TileWrite(name=spec.name, tile=tile, positions=None, values=new.copy())
    if not changes.count:
        return None
    values = changes.new.astype(new.dtype)
    return TileWrite(name=spec.name, tile=tile, positions=changes.positions, values=values)


def _changed(pair: Pair) -> int:
    return sum(int(np.count_nonzero(pair.old[name] != pair.new[name])) for name in pair.old)
