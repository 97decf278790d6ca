"""Pieces of tensors brought together at rank 0, tensor by tensor: an anchor's files hold whole ones."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np

from slackwater.checkpoint.pieces import Piece, Stripe, cut_axis, held_elements, num_lines, stripes
from slackwater.checkpoint.shards import Shard, build_shard, cut_shards
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.publish.exchange import Exchange
from slackwater.publish.turn import Gather, Offer
from slackwater.weights.source import TensorSource

GATHER_BYTES: Final = 64 * 1024 * 1024
"""Most bytes that rank 0 receives in a round, where a row of columns isn't longer."""


def plan_gathers(offers: Sequence[Offer]) -> tuple[Gather, ...]:
    """The gathers that bring together what some ranks have in pieces, by rising name."""
    rounds: dict[str, int] = {}
    most = GATHER_BYTES // max(1, len(offers))
    for spec, piece in (held for offer in offers for held in offer.pieces):
        rounds[spec.name] = max(len(_sent(spec, piece, most)), rounds.get(spec.name, 0))
    return tuple(Gather(name=name, rounds=count, most=most) for name, count in sorted(rounds.items()))


def _sent(spec: TensorSpec, piece: Piece, most: int) -> list[Stripe]:
    """What is sent of a piece in each round: so many bytes of its own at most, or a row."""
    share = num_lines(spec) // (piece.end - piece.begin) if cut_axis(spec) else 1
    return list(stripes(spec, piece, most * share))


def files_of(prefix: str, specs: Sequence[TensorSpec]) -> list[Shard]:
    """Files for some tensors; none where there are none."""
    cut = cut_shards(specs) if specs else ()
    return [Shard(file=f"{prefix}-{index:05d}.safetensors", specs=shard.specs) for index, shard in enumerate(cut)]


class Gathering:
    """One rank's part in planned gathers. As a context it takes part in all of them, whatever fails in its block.

    Args:
        exchange: How the ranks talk.
        plan: The gathers, the same on all ranks.
        source: What this rank reads its pieces from.
        offer: What it has.
        offers: What all ranks have; on rank 0 alone.

    Attributes:
        kept: Copies of this rank's pieces.
        is_short: Whether a rank sent less than it has, for it failed; what rank 0 made is worth nothing then.
    """

    def __init__(
        self, exchange: Exchange, plan: Sequence[Gather], source: TensorSource, offer: Offer, offers: Sequence[Offer]
    ) -> None:
        self._exchange: Final = exchange
        self._plan: Final = {gather.name: gather for gather in plan}
        self._left = sum(gather.rounds for gather in plan)
        self._source: Final = source
        self._pieces: Final = offer.held
        self._theirs: Final = [{spec.name: (spec, piece) for spec, piece in offer.pieces} for offer in offers]
        self.kept: Final[dict[str, Bits]] = {}
        self.is_short = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._left:
            self._gather(b"")

    def files(self, prefix: str) -> Mapping[str, bytearray]:
        """Bring everything together: safetensors files of the whole tensors on rank 0, and none elsewhere.

        Raises:
            InvalidInputError: The source's bits aren't those of its piece.
            UnavailableError: A rank is gone.
        """
        if not self._theirs:
            for name in self._plan:
                deque(self._send(name), maxlen=0)
            return {}
        specs = {spec.name: spec for held in self._theirs for spec, _ in held.values()}
        shards = files_of(prefix, [specs[name] for name in self._plan])
        return {shard.file: build_shard(shard, self) for shard in shards}

    def bits(self, name: str) -> Bits:
        """The plan's next tensor, on rank 0: whole, flat."""
        holders = {rank: held[name] for rank, held in enumerate(self._theirs) if name in held}
        spec, _ = next(iter(holders.values()))
        parts = {rank: _sent(spec, piece, self._plan[name].most) for rank, (_, piece) in holders.items()}
        whole = np.empty(spec.num_elements, dtype=spec.bits_dtype)
        for index, bodies in enumerate(self._send(name)):
            for rank, sent in parts.items():
                if index < len(sent):
                    self._put(sent[index], whole, bodies[rank])
        return whole

    def _send(self, name: str) -> Iterator[list[bytes]]:
        """Send this rank's piece, if it has one, round by round; yields what all ranks sent, on rank 0."""
        gather, sent = self._plan[name], list[Stripe]()
        if name in self._pieces:
            self.kept[name] = self._read(name)
            sent = _sent(self._source.specs()[name], self._pieces[name], gather.most)
        for index in range(gather.rounds):
            yield self._gather(self.kept[name][sent[index].held].tobytes() if index < len(sent) else b"")

    def _read(self, name: str) -> Bits:
        spec, bits = self._source.specs()[name], self._source.bits(name)
        elements = held_elements(spec, self._pieces)
        if (bits.shape, bits.dtype) != ((elements,), spec.bits_dtype):
            raise InvalidInputError(
                f"the piece of {name} is {bits.dtype} {list(bits.shape)}, and should be {spec.bits_dtype} [{elements}]",
                hint="a source gives flat bits of its pieces' sizes",
            )
        return bits.copy()

    def _gather(self, body: bytes) -> list[bytes]:
        left, self._left = self._left, 0  # once a rank is gone no gather would end
        gathered = self._exchange.gather(body)
        self._left = left - 1
        return gathered or []

    def _put(self, stripe: Stripe, whole: Bits, body: bytes) -> None:
        if len(body) != stripe.tile.count * whole.itemsize:
            self.is_short = True
        else:
            stripe.tile.put(whole[stripe.span], np.frombuffer(body, dtype=whole.dtype))
