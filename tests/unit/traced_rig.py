"""A core whose passes are looked at: what every slot holds then, and that it is within the bound."""

from typing import TYPE_CHECKING, Final

from torch import Tensor

from slackwater.engine.torch.batch import Batch, Pass, Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.routing import RouteStore
from slackwater.engine.torch.runner import Runner
from slackwater.ids import Version
from slackwater.rollout.routes import Routing

if TYPE_CHECKING:
    from slackwater.engine.torch.sequence import Event

WINDOW: Final = 128
MOST_STEPS: Final = 5000


class Tracing:
    """A runner that remembers the ids of each slot. Its routes send each token to the expert of its own number."""

    def __init__(self, runner: Runner, core: Core, *, slots: int) -> None:
        self._runner, self._core = runner, core
        self._ids: dict[int, list[int]] = {}
        self.routes = RouteStore(Routing(layers=(0,), experts=512, per_token=1), slots=slots, window=WINDOW)
        self.shapes: list[int] = []

    def run(self, work: Pass) -> Tensor:
        for piece in work.pieces:
            held = self._ids.get(piece.slot, [])
            assert piece.start <= len(held), "a row is left out"
            self._ids[piece.slot] = [*held[: piece.start], *piece.tokens]
        self.shapes.append(work.padded_to)
        batch = Batch.of(work.pieces)
        self.routes.put(batch.slots, batch.places, batch.ids[0].numpy().reshape(-1, 1, 1))
        self._look({piece.slot for piece in work.pieces})
        return self._runner.run(work)

    def copy(self, slot: int, *, source: int, count: int) -> None:
        assert count <= len(self._ids[source])
        self._ids[slot] = self._ids[source][:count]
        self.routes.copy(slot, source=source, count=count)
        self._runner.copy(slot, source=source, count=count)

    def mark(self, slot: int) -> None:
        self._runner.mark(slot)

    def close(self) -> None:
        self._runner.close()

    def _look(self, running: set[int]) -> None:
        held = 0
        for row in self._core._seated:
            if row.filled or row.slot in running:
                ids = self._ids[row.slot]
                assert ids == [*row.request.prompt_ids, *row.tokens][: len(ids)], "a slot holds other tokens' rows"
                held += len(ids)
        assert held + self._core._table.kept <= self._core.kv_tokens


class Traced:
    """The core, and what came of it."""

    def __init__(self, model: LoadedModel, *, invariant: bool, slots: int, kv_tokens: int | None = None) -> None:
        shaping = Shaping(slots=slots, invariant=invariant)
        self.core: Final = Core(model, shaping, window=WINDOW, version=Version(7), kv_tokens=kv_tokens)
        self.runner: Final = Tracing(self.core._runner, self.core, slots=slots)
        self.core._runner = self.runner  # type: ignore[misc]  # final for all others
        self.events: list[Event] = []

    def step(self, count: int = 1) -> None:
        """So many steps, each of which has to move the oldest answer that a step does anything for."""
        for _ in range(count):
            works = [row for row in self.core._seated if self.core._works(row)]
            before = [(row.made, row.filled) for row in works[:1]]
            self.events += self.core.step()
            assert self.core.kv_used <= self.core.kv_tokens
            for row in works[:1]:
                assert row.key not in self.core._rows or (row.made, row.filled) > before[0]

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(MOST_STEPS):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("it never ends")
