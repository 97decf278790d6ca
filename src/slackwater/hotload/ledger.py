"""The ledger: what was asked of a fleet and what became of it, kept over restarts.

The bucket stays the source of truth: a ledger that is lost costs history and idempotency keys, and no weights.
"""

import logging
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.hotload.operation import Operation
from slackwater.hotload.witness import FleetEvent
from slackwater.ids import RunId

T = TypeVar("T")

KEPT: Final = 10_000
"""Operations, and events, that a ledger keeps; the oldest ended ones go first."""
_LAYOUT: Final = 1
_WAIT_S: Final = 1.0
_TABLES: Final = (
    """CREATE TABLE operations (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL UNIQUE,
       ended INTEGER NOT NULL, body BLOB NOT NULL) STRICT""",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT",
    "CREATE TABLE groups (name TEXT PRIMARY KEY, mode TEXT NOT NULL) STRICT",
    "CREATE TABLE lineage (run TEXT NOT NULL) STRICT",
)
_SAVE: Final = (
    "INSERT INTO operations (id, key, ended, body) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET ended = excluded.ended, body = excluded.body"
)
_PRUNE: Final = "DELETE FROM operations WHERE ended AND number <= (SELECT max(number) FROM operations) - ?"
_PRUNE_EVENTS: Final = "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?"

_log = logging.getLogger(__name__)


class Ledger(Protocol):
    """Keeps operations and events. Each call is one transaction; calls block, and come from one thread at a time.

    Errors of every call: UnavailableError (the disk is full or fails), CorruptError (what is there can't be read).
    """

    def save(self, *operations: Operation) -> None:
        """Keep the operations as they are now, new ones as the newest: all of them or none."""
        ...

    def newest(self, limit: int) -> tuple[Operation, ...]:
        """The newest operations, newest first, and behind them every older one that hasn't ended."""
        ...

    def by_key(self, key: str) -> Operation | None:
        """The operation with that idempotency key, ended or not; None where there is none, or it was forgotten."""
        ...

    def note(self, *events: FleetEvent) -> None:
        """Append events, in this order: all of them or none."""
        ...

    def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """The newest events, newest first."""
        ...

    def configure(self, modes: Mapping[str, str]) -> None:
        """Keep the modes that the configuration gives to groups, in place of those kept before."""
        ...

    def configured(self) -> Mapping[str, str]:
        """What `configure` was given last; empty where it never was."""
        ...

    def close(self) -> None:
        """Give the file back. Idempotent."""
        ...


class SqliteLedger:
    """A `Ledger` in one SQLite file, in WAL mode, which this process alone may open. See `open_ledger`.

    Args:
        path: The file; made where it is missing. None: in memory.
        run: The lineage that it is about.
        kept: Operations, and events, that are kept.

    Raises:
        ConflictError: Another process has it open.
        AuthError: It can't be opened or written.
        InvalidInputError: It is the ledger of another run.
        CorruptError: It is damaged, or of a layout that this version doesn't know.
    """

    def __init__(self, path: Path | None, run: RunId, *, kept: int = KEPT) -> None:
        self._path = path
        self._kept = kept
        with self._errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            name = ":memory:" if path is None else str(path)
            self._connection = sqlite3.connect(name, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._open(run)
        except SlackwaterError:
            self.close()
            raise

    def save(self, *operations: Operation) -> None:
        """See `Ledger.save`."""
        rows = [(each.id, each.idempotency_key, each.ended, msgspec.json.encode(each)) for each in operations]
        with self._transaction() as cursor:
            cursor.executemany(_SAVE, rows)
            cursor.execute(_PRUNE, (self._kept,))

    def newest(self, limit: int) -> tuple[Operation, ...]:
        """See `Ledger.newest`."""
        oldest = "(SELECT max(number) FROM operations) - ?"
        with self._errors():
            rows = self._connection.execute(
                f"SELECT body FROM operations WHERE number > {oldest} OR NOT ended ORDER BY number DESC",  # noqa: S608
                (limit,),
            ).fetchall()
        return tuple(self._read(row[0], Operation) for row in rows)

    def by_key(self, key: str) -> Operation | None:
        """See `Ledger.by_key`."""
        with self._errors():
            row = self._connection.execute("SELECT body FROM operations WHERE key = ?", (key,)).fetchone()
        return None if row is None else self._read(row[0], Operation)

    def note(self, *events: FleetEvent) -> None:
        """See `Ledger.note`."""
        with self._transaction() as cursor:
            cursor.executemany("INSERT INTO events (body) VALUES (?)", [(msgspec.json.encode(e),) for e in events])
            cursor.execute(_PRUNE_EVENTS, (self._kept,))

    def events(self, limit: int) -> tuple[FleetEvent, ...]:
        """See `Ledger.events`."""
        with self._errors():
            rows = self._connection.execute("SELECT body FROM events ORDER BY number DESC LIMIT ?", (limit,)).fetchall()
        return tuple(self._read(row[0], FleetEvent) for row in rows)

    def configure(self, modes: Mapping[str, str]) -> None:
        """See `Ledger.configure`."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM groups")
            cursor.executemany("INSERT INTO groups (name, mode) VALUES (?, ?)", list(modes.items()))

    def configured(self) -> Mapping[str, str]:
        """See `Ledger.configured`."""
        with self._errors():
            return dict(self._connection.execute("SELECT name, mode FROM groups").fetchall())

    def close(self) -> None:
        """See `Ledger.close`."""
        self._connection.close()

    def _open(self, run: RunId) -> None:
        """Take the file's lock for as long as it is open, then look whether everything can be read."""
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            self._connection.execute(f"PRAGMA {pragma}")
        with self._transaction() as cursor:
            layout = cursor.execute("PRAGMA user_version").fetchone()[0]
            if layout == 0:
                for table in _TABLES:
                    cursor.execute(table)
                cursor.execute("INSERT INTO lineage (run) VALUES (?)", (run,))
                cursor.execute(f"PRAGMA user_version = {_LAYOUT}")
            elif layout != _LAYOUT:
                raise CorruptError(f"{self._path} has layout {layout}, this version knows {_LAYOUT}")
        self._check(run)

    def _check(self, run: RunId) -> None:
        found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CorruptError(f"{self._path} is damaged: {found}")
        (other,) = self._connection.execute("SELECT run FROM lineage").fetchone() or (None,)
        self.newest(self._kept)
        self.events(self._kept)
        if other is None:
            raise CorruptError(f"{self._path} names no run")
        if other != run:
            raise InvalidInputError(f"{self._path} is the ledger of run {other!r}", hint="give each run its own")

    def _read(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise CorruptError(f"{self._path} has an entry that can't be read: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Cursor]:
        with self._errors(), ExitStack() as undo:
            cursor = self._connection.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            undo.callback(cursor.execute, "ROLLBACK")
            yield cursor
            undo.pop_all()
            cursor.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _named(error, self._path) from error


def open_ledger(path: Path | None, run: RunId) -> SqliteLedger:
    """Open the ledger of ``run``. A damaged one is set aside beside its place, with a warning, and begun anew.

    Raises:
        ConflictError: Another process has it open.
        AuthError: It can't be opened or written.
        InvalidInputError: It is the ledger of another run.
    """
    try:
        return SqliteLedger(path, run)
    except CorruptError as error:
        if path is None:
            raise
        _log.warning("the ledger is set aside as %s and begun anew: %s", _set_aside(path), error)
    return SqliteLedger(path, run)


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + suffix))
    return path.rename(aside)


_KINDS: Final[Mapping[int, type[SlackwaterError]]] = {
    sqlite3.SQLITE_BUSY: ConflictError,
    sqlite3.SQLITE_LOCKED: ConflictError,
    sqlite3.SQLITE_CANTOPEN: AuthError,
    sqlite3.SQLITE_PERM: AuthError,
    sqlite3.SQLITE_READONLY: AuthError,
    sqlite3.SQLITE_FULL: UnavailableError,
    sqlite3.SQLITE_IOERR: UnavailableError,
    sqlite3.SQLITE_NOMEM: UnavailableError,
}
_HINTS: Final[Mapping[type[SlackwaterError], str]] = {
    ConflictError: "another process has it open: give each gateway its own",
    AuthError: "name a file in a folder that may be written",
}


def _named(error: sqlite3.Error | OSError, path: Path | None) -> SlackwaterError:
    """The error of ours: what isn't about locks, rights or the disk is damage."""
    if isinstance(error, OSError):
        kind: type[SlackwaterError] = AuthError
    else:
        code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        kind = _KINDS.get(code & 0xFF, CorruptError)
    return kind(f"the ledger {path} can't be used: {error}", hint=_HINTS.get(kind, ""))
