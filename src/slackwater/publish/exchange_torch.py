"""Ranks of a ``torch.distributed`` group. Bytes travel as tensors: nothing is pickled."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

from slackwater.errors import UnavailableError


class TorchExchange:
    """An exchange over a group that is set up already; its time-out says how long a rank is waited for.

    Args:
        group: None: all ranks.
        device: Where the group's backend wants its tensors: the rank's GPU for NCCL, the CPU for Gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self._group: Final = group
        self._device: Final = torch.device(device)
        self._rank: Final = dist.get_rank(group)
        self._world: Final = dist.get_world_size(group)
        self._first: Final = 0 if group is None else dist.get_global_rank(group, 0)

    def gather(self, body: bytes) -> list[bytes] | None:
        """See `slackwater.publish.exchange.Exchange.gather`."""
        with _mapped():
            size = torch.tensor([len(body)], device=self._device)
            sizes = [torch.empty_like(size) for _ in range(self._world)]
            dist.all_gather(sizes, size, group=self._group)
            lengths = [int(length.item()) for length in sizes]
            mine = self._padded(body, max(lengths))
            parts = [torch.empty_like(mine) for _ in lengths] if self._rank == 0 else None
            dist.gather(mine, parts, dst=self._first, group=self._group)
        if parts is None:
            return None
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, body: bytes | None) -> bytes:
        """See `slackwater.publish.exchange.Exchange.broadcast`."""
        with _mapped():
            size = torch.tensor([len(body or b"")], device=self._device)
            dist.broadcast(size, src=self._first, group=self._group)
            sent = self._padded(body or b"", int(size.item()))
            dist.broadcast(sent, src=self._first, group=self._group)
        return sent.cpu().numpy().tobytes()

    def _padded(self, body: bytes, length: int) -> torch.Tensor:
        padded = torch.zeros(length, dtype=torch.uint8)
        if body:
            padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        return padded.to(self._device)


@contextmanager
def _mapped() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UnavailableError(
            f"the ranks can't talk: {error}", hint="see which rank is gone, and start the trainer again"
        ) from error
