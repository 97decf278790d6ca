"""Fixtures of the tests over stamp engines."""

import asyncio
from collections.abc import Callable

import pytest
from stamp_rig import Lineage


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Lineage:
    """Versions that a run of stamp engines goes through."""
    return Lineage(tmp_path_factory.mktemp("lineage"))


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that goes to a thread is done at once: a seed, or a number of turns, says when something happens."""

    async def inline(call: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        await asyncio.sleep(0)
        return call(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", inline)
