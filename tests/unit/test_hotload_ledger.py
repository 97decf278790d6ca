import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ledger_child
import pytest
from processes import SOURCE

from slackwater.errors import AuthError, ConflictError, CorruptError, InvalidInputError
from slackwater.hotload.ledger import SqliteLedger, open_ledger
from slackwater.hotload.operation import OperationState
from slackwater.ids import RunId
from slackwater.testing.conformance_ledger import RUN, ended, event, operation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def written(path: Path) -> bytes:
    ledger = open_ledger(path, RUN)
    ledger.save(*(operation(number) for number in range(40)))
    ledger.close()
    return path.read_bytes()


def test_a_kill_at_any_statement_loses_at_most_the_last_event_and_doubles_nothing(tmp_path: Path) -> None:
    child = [sys.executable, ledger_child.__file__, str(tmp_path)]
    subprocess.run(child, env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True, timeout=100)
    ledgers = sorted(tmp_path.glob("*.sqlite"))
    assert len(ledgers) > 10 * ledger_child.ROUNDS
    for path in ledgers:
        check_killed(path, path.with_suffix(".said").read_text().splitlines())


def check_killed(path: Path, said: list[str]) -> None:
    """What a killed process's ledger must have, by what it had said."""
    ledger = SqliteLedger(path, RUN)
    known, events = ledger.newest(1000), ledger.events(1000)
    ledger.save(operation(999))
    ledger.close()
    states = {each.id: each.state for each in known}
    assert len(states) == len(known)
    for number in range(ledger_child.ROUNDS):
        state = states.get(f"op{number}")
        assert (state is not None) or f"begun {number}" not in said
        assert (state is OperationState.CANCELLED) or f"ended {number}" not in said
        # Both of one transaction, or neither.
        assert (state is OperationState.CANCELLED) == (f"op{number + 100}" in states)
    assert 0 <= len(events) - sum(line.startswith("ended") for line in said) <= 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"no database at all, but long enough to have a header of one hundred bytes" * 3,
        lambda body: body[: len(body) // 2],
        lambda body: body[:100] + bytes(len(body) - 100),
        lambda body: body[:5000] + os.urandom(4096) + body[9096:],
        lambda body: body.replace(b'"idempotency_key":"key 7"', b'"idempotency_kez":"key 7"'),
        lambda body: body.replace(b'"state":"queued"', b'"state":"quoued"'),
    ],
    ids=["empty", "foreign", "cut", "zeroed", "overwritten", "lacking", "unknown-word"],
)
def test_a_damaged_ledger_is_set_aside_with_a_warning_and_begun_anew(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    body = damage(written(path))
    path.write_bytes(body)
    with caplog.at_level(logging.WARNING):
        ledger = open_ledger(path, RUN)
    assert ledger.newest(10) == ()
    ledger.save(operation(1))
    ledger.close()
    if body:
        assert "set aside" in caplog.text
        assert path.with_name("ledger.sqlite.damaged-1").read_bytes() == body
    assert open_ledger(path, RUN).newest(10) == (operation(1),)


def test_each_damaged_ledger_is_kept(path: Path) -> None:
    for number in (1, 2):
        path.write_bytes(b"broken %d" % number * 100)
        open_ledger(path, RUN).close()
    assert [path.with_name(f"ledger.sqlite.damaged-{number}").exists() for number in (1, 2, 3)] == [True, True, False]


def test_a_ledger_of_a_later_layout_is_set_aside_and_not_overwritten(path: Path) -> None:
    written(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(CorruptError, match="layout 2"):
        SqliteLedger(path, RUN)
    open_ledger(path, RUN).close()
    assert path.with_name("ledger.sqlite.damaged-1").exists()


def test_one_process_at_a_time_has_it(path: Path) -> None:
    first = open_ledger(path, RUN)
    with pytest.raises(ConflictError, match="another process"):
        open_ledger(path, RUN)
    first.save(operation(1))
    first.close()
    second = open_ledger(path, RUN)
    assert second.newest(1) == (operation(1),)
    second.close()


def test_the_ledger_of_another_run_is_refused_and_left_alone(path: Path) -> None:
    before = written(path)
    with pytest.raises(InvalidInputError, match="of run 'demo'"):
        open_ledger(path, RunId("other"))
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "ledger.sqlite"):
        with pytest.raises(AuthError, match="ledger"):
            open_ledger(place, RUN)


def test_old_ended_operations_and_events_are_forgotten_and_open_ones_kept(path: Path) -> None:
    ledger = SqliteLedger(path, RUN, kept=3)
    ledger.save(operation(0))
    for number in range(1, 9):
        ledger.save(ended(number))
        ledger.note(event(number))
    assert [each.id for each in ledger.newest(100)] == ["op8", "op7", "op6", "op0"]
    assert ledger.by_key("key 1") is None
    assert ledger.events(100) == (event(8), event(7), event(6))
    ledger.close()
