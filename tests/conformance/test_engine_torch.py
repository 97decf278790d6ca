"""The embedded engine keeps the engine contract."""

from pathlib import Path

import pytest

from slackwater.engine.base import Engine
from slackwater.engine.torch.engine import TorchEngine
from slackwater.ids import BootId, ReplicaId, RunId
from slackwater.testing.conformance_engine import FIRST, EngineTests, OpenEngine
from slackwater.testing.conformance_in_flight import InFlightTests
from slackwater.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


class TestTorchEngine(EngineTests, InFlightTests):
    @pytest.fixture
    def open_engine(self, folder: Path) -> OpenEngine:
        async def open_one() -> Engine:
            return await TorchEngine.open(
                folder,
                version=FIRST,
                run=RunId("demo"),
                replica=ReplicaId("r0"),
                boot=BootId("b0"),
                window=512,
            )

        return open_one
