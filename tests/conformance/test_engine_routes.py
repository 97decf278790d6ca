"""Engines with routers keep one contract; a fake one whose experts were moved tells the checkpoint's numbers too."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.base import Engine
from slackwater.rollout.routes import Routing
from slackwater.testing.conformance_engine import FIRST, OpenEngine
from slackwater.testing.conformance_routes import Chosen, RouteTests
from slackwater.testing.engine import TableEngine
from slackwater.testing.routes import ScriptedRouter
from slackwater.testing.stamp import StampEngine

SPECS: Final = {"w": TensorSpec(name="w", dtype="BF16", shape=(8, 4))}
FOUR: Final = Routing(layers=(0, 2), experts=4, per_token=2)
MOVED: Final = ScriptedRouter(routing=FOUR, placement=(2, 0, 3, 1))
WIDE: Final = ScriptedRouter(routing=Routing(layers=(3,), experts=300, per_token=4))


class _TableRoutes(RouteTests):
    router: ScriptedRouter
    kind: type[TableEngine] = TableEngine

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        async def opened() -> Engine:
            weights = {name: np.arange(spec.num_elements, dtype=spec.bits_dtype) for name, spec in SPECS.items()}
            return self.kind(weights, SPECS, FIRST, window=512, router=self.router)

        return opened

    @pytest.fixture
    def chosen(self) -> Chosen:
        return replace(self.router, placement=(), leaks=False).rows


class TestTable(_TableRoutes):
    router = ScriptedRouter()


class TestStampOfManyExperts(_TableRoutes):
    router = WIDE
    kind = StampEngine


class TestMovedExperts(_TableRoutes):
    """A4-06: the experts of each layer stand in another order than in the checkpoint."""

    router = MOVED


class TestLeakingExperts(_TableRoutes):
    """A4-06: an engine that tells where its experts stand doesn't pass."""

    router = replace(MOVED, leaks=True)

    async def test_a4_06_rows_name_logical_experts(self, engine: Engine, chosen: Chosen) -> None:
        with pytest.raises(AssertionError):
            await super().test_a4_06_rows_name_logical_experts(engine, chosen)

    async def test_forced_routes_are_taken_and_later_positions_choose(self, engine: Engine, chosen: Chosen) -> None:
        with pytest.raises(AssertionError):
            await super().test_forced_routes_are_taken_and_later_positions_choose(engine, chosen)
