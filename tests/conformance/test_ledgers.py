"""Every ledger keeps the same promises."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from slackwater.hotload.ledger import Ledger, open_ledger
from slackwater.testing.conformance_ledger import RUN, DurableLedgerTests, LedgerTests
from slackwater.testing.ledger import MemoryLedger


class TestMemoryLedger(LedgerTests):
    @pytest.fixture
    def ledger(self) -> Ledger:
        return MemoryLedger()


class TestSqliteLedgerInMemory(LedgerTests):
    @pytest.fixture
    def ledger(self) -> Iterator[Ledger]:
        made = open_ledger(None, RUN)
        yield made
        made.close()


class TestSqliteLedger(DurableLedgerTests):
    @pytest.fixture
    def ledger(self, tmp_path: Path) -> Iterator[Ledger]:
        made = open_ledger(tmp_path / "state" / "ledger.sqlite", RUN)
        yield made
        made.close()

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Ledger]:
        return partial(open_ledger, tmp_path / "state" / "ledger.sqlite", RUN)
