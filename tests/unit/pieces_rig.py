"""A small model of which ranks hold pieces, with tiles so small that its weights are cut as huge ones are."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from publish_rig import RUN, Tensors

from slackwater.checkpoint import tensor as module
from slackwater.checkpoint.pieces import Piece, cut_axis, num_lines, tiles_in
from slackwater.checkpoint.tensor import TensorSpec, tile_count, tiles
from slackwater.errors import InvalidInputError, SlackwaterError
from slackwater.publish.exchange import Exchange, ThreadExchange, thread_exchanges
from slackwater.publish.merge import share_out
from slackwater.publish.published import Published
from slackwater.publish.ranks import RankPublisher
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights.parted import PartedSource
from slackwater.weights.source import TensorSource, pieces_of
from slackwater.weights.state_dict import StateDictSource

TILE: Final = 256
UP: Final = "model.layers.0.mlp.up_proj.weight"
DOWN: Final = "model.layers.0.mlp.down_proj.weight"
NORM: Final = "model.norm.weight"

_SHAPES: Final = {
    "model.embed_tokens.weight": (50, 16),  # 16 doesn't divide its rows
    "model.layers.0.self_attn.q_proj.weight": (64, 32),
    "model.layers.0.self_attn.k_proj.weight": (32, 32),
    "model.layers.0.self_attn.v_proj.weight": (4, 32),  # a single tile
    "model.layers.0.self_attn.o_proj.weight": (32, 64),
    UP: (96, 32),
    DOWN: (32, 96),
    "model.layers.1.mlp.experts.0.down_proj.weight": (32, 16),
    NORM: (32,),
}


@contextmanager
def small_tiles(num_bytes: int = TILE) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_BYTES", num_bytes)
        yield


def big_model(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in _SHAPES.items()}
    return {**tensors, "model.scale": torch.tensor(0.5), "model.empty": torch.empty(0, 3)}


def specs_of(tensors: Tensors) -> dict[str, TensorSpec]:
    return dict(StateDictSource(tensors).specs())


def edges_of(tensor: TensorSpec) -> list[int]:
    """Lines at which a piece may begin or end inside a tensor, found by trying all."""
    found: list[int] = []
    for edge in range(1, num_lines(tensor)):
        try:
            tiles_in(tensor, Piece(begin=0, end=edge))
        except InvalidInputError:
            continue
        found.append(edge)
    return found


def pieces_for(spec: TensorSpec, world: int) -> list[Piece]:
    """A tensor's pieces by rank, of about as many tiles each."""
    (first, *_) = cut = list(tiles(spec))
    line = spec.num_elements // num_lines(spec) // first.rows
    edges = [*(tile.start // line for tile in cut), num_lines(spec)]
    cuts = [edges[rank * (len(edges) - 1) // world] for rank in range(world + 1)]
    return [Piece(begin=begin, end=end) for begin, end in pairwise(cuts)]


def cut(tensor: torch.Tensor, spec: TensorSpec, piece: Piece) -> torch.Tensor:
    return tensor.narrow(cut_axis(spec), piece.begin, piece.end - piece.begin)


def parted(tensors: Tensors, world: int) -> list[PartedSource]:
    """What each rank has: pieces of what is cut, and the rest whole."""
    specs = specs_of(tensors)
    large = [name for name, spec in specs.items() if tile_count(spec) > 1]
    shares = share_out([spec for name, spec in specs.items() if name not in large], world)
    pieces = {name: pieces_for(specs[name], world) for name in large}
    return [with_pieces(tensors, shares[rank], {name: pieces[name][rank] for name in large}) for rank in range(world)]


def with_pieces(tensors: Tensors, whole: Sequence[str], pieces: dict[str, Piece]) -> PartedSource:
    """A source of some tensors and of pieces of others; empty pieces are left out."""
    specs = specs_of(tensors)
    held = {name: piece for name, piece in pieces.items() if piece.begin < piece.end}
    parts = {name: cut(tensors[name], specs[name], piece) for name, piece in held.items()}
    shapes = {name: tuple(tensors[name].shape) for name in held}
    return PartedSource({**{name: tensors[name] for name in whole}, **parts}, held, shapes)


class Watched:
    """An exchange that notes how many bytes each of its gathers takes from its rank."""

    def __init__(self, exchange: ThreadExchange) -> None:
        self.exchange = exchange
        self.sent: list[int] = []

    def gather(self, body: bytes) -> list[bytes] | None:
        self.sent.append(len(body))
        return self.exchange.gather(body)

    def broadcast(self, body: bytes | None) -> bytes:
        return self.exchange.broadcast(body)


class Trainer:
    """Several ranks and what they publish."""

    def __init__(
        self, buckets: Sequence[MemoryBucket | FaultyBucket], *, every: int = 50, folder: Path | None = None
    ) -> None:
        self.exchanges = [Watched(exchange) for exchange in thread_exchanges(len(buckets), 60)]
        exchanges: list[Exchange] = list(self.exchanges)
        self.ranks = [
            RankPublisher(
                bucket,
                RUN,
                rank,
                len(buckets),
                exchange,
                anchor_every=every,
                anchor_share=inf,
                threads=1,
                baseline_dir=folder,
            )
            for rank, (bucket, exchange) in enumerate(zip(buckets, exchanges, strict=True))
        ]

    def publish(
        self, parts: Sequence[TensorSource], model: Path, step: int = 0, *, anchor: bool = False
    ) -> list[object]:
        def call(rank: int) -> object:
            return self.ranks[rank].publish(parts[rank], step=step, folder_files=model, anchor=anchor)

        return self.together(call)

    def publish_async(
        self, parts: Sequence[TensorSource], model: Path, step: int = 0, *, anchor: bool = False
    ) -> list[object]:
        def call(rank: int) -> object:
            return self.ranks[rank].publish_async(parts[rank], step=step, folder_files=model, anchor=anchor)

        return self.together(call)

    def together(self, call: Callable[[int], object]) -> list[object]:
        """Each rank in a thread of its own: what it returns or raises."""

        def tried(rank: int) -> object:
            try:
                return call(rank)
            except (SlackwaterError, ZeroDivisionError) as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(tried, range(len(self.ranks))))


def versions(results: Sequence[object]) -> set[object]:
    return {result.version if isinstance(result, Published) else result for result in results}


def check_held(trainer: Trainer, parts: Sequence[TensorSource]) -> None:
    """Every rank holds its own tensors and pieces, and keeps no memory of others for them."""
    for rank, source in zip(trainer.ranks, parts, strict=True):
        pieces = pieces_of(source)
        for name in source.specs():
            held = rank.held_bits(name)
            np.testing.assert_array_equal(held, source.bits(name))
            if name in pieces:
                base = held if held.base is None else held.base
                assert getattr(base, "nbytes", 0) <= sum(source.bits(each).nbytes + 64 for each in source.specs())
