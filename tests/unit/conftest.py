"""Fixtures of the API's tests: a tokenizer, and what is asked over HTTP."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from abort_rig import Site, site

from slackwater.api.tokens import ChatTokenizer
from slackwater.testing.tiny_model import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The tiny model's."""
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def replica(tokenizer: ChatTokenizer) -> AsyncIterator[Site]:
    """A replica's API; in the end nothing is under way."""
    async with site(tokenizer, gateway=False) as opened:
        yield opened
        await asyncio.wait_for(opened.table.until_active(0), 5)


@pytest.fixture(params=[False, True], ids=["replica", "gateway"])
async def at(request: pytest.FixtureRequest, tokenizer: ChatTokenizer) -> AsyncIterator[Site]:
    """As ``replica``, and a gateway's before one."""
    async with site(tokenizer, gateway=request.param) as opened:
        yield opened
        await asyncio.wait_for(opened.table.until_active(0), 5)
