"""The embedded engine keeps the contract of routes, held against a plain forward pass with hooks on its routers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slackwater.engine.base import Engine
from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.ids import BootId, ReplicaId, RunId
from slackwater.testing.conformance_engine import FIRST, OpenEngine
from slackwater.testing.conformance_routes import Chosen, RouteTests
from slackwater.testing.toys import write_toy

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "KimiLinearForCausalLM")
"""Caches of rows, and of states behind a dense first layer."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), request.param, dtype="float32")


def _chosen(model: LoadedModel, tokens: Sequence[int]) -> bytes:
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda *parts: seen.append(_ids(parts[-1]))) for router in model.routers.values()
    ]
    try:
        with torch.inference_mode():
            model.module(input_ids=torch.tensor([tokens]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen, dim=1).to(torch.uint8).numpy().tobytes()


def _ids(output: tuple[Tensor, ...]) -> Tensor:
    return next(part for part in output if part.dtype is torch.int64)


class TestTorchRoutes(RouteTests):
    @pytest.fixture
    def open_engine(self, folder: Path) -> OpenEngine:
        async def open_one() -> Engine:
            return await TorchEngine.open(
                folder, version=FIRST, window=128, run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0")
            )

        return open_one

    @pytest.fixture
    def chosen(self, folder: Path) -> Chosen:
        model = load(folder)
        module: Any = model.module
        module.set_attn_implementation("sdpa")

        def rows(tokens: Sequence[int]) -> bytes:
            return _chosen(model, tokens)

        return rows
