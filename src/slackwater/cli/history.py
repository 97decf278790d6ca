"""``slackwater log``: a run's versions as a table, the newest last."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from slackwater.cli.absent import telling_absent
from slackwater.cli.text import console, size_text, write_json
from slackwater.cli.trust import open_trusted
from slackwater.clock import Clock, SystemClock
from slackwater.ids import RunId
from slackwater.publish.history import Entry, read_history

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_COLUMNS = ("version", "kind", "parent", "bytes", "changed", "density", "bodies", "step", "age", "state")


def show_history(
    url: str,
    run: RunId,
    *,
    limit: int | None,
    as_json: bool,
    trust: Sequence[Path] = (),
    clock: Clock | None = None,
) -> None:
    """Print what is committed of a run.

    Args:
        url: As `open_bucket` takes it.
        run: The run.
        limit: Versions to show, counted from the newest; None shows all.
        as_json: Print one JSON object on one line instead of a table.
        trust: Files of the public keys whose versions are taken, others are ``damaged``; none takes all.
        clock: Tells how old versions are.

    Raises:
        NotFoundError: The run has no versions.
    """
    bucket = open_trusted(url, trust)
    with telling_absent(bucket, run):
        entries = read_history(bucket, run, limit=limit)
    now_s = (clock or SystemClock()).wall()
    if as_json:
        versions = [{**asdict(entry), "age_s": age_of(entry, now_s)} for entry in entries]
        value = {"run": run, "head": entries[-1].version, "versions": versions}
        write_json(value)
        return
    out = console()
    out.print(_table(entries, now_s))
    for entry in entries:
        if entry.damage is not None:
            out.print(f"version {entry.version} can't be read: {entry.damage}", soft_wrap=True)


def age_of(entry: Entry, now_s: float) -> float | None:
    """Seconds since a version was written: by the store's clock, else by its publisher's; None if neither tells."""
    if entry.written_s is not None:
        return max(0.0, now_s - entry.written_s)
    try:
        return max(0.0, now_s - datetime.fromisoformat(entry.created_at or "").timestamp())
    except (ValueError, OverflowError):
        return None


def spell_age(seconds: float | None) -> str:
    """An age in its largest unit, and the rest in the next: ``3 d 4 h``."""
    if seconds is None:
        return "–"
    for (unit, length), (smaller, part) in pairwise(_UNITS):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} {seconds % length // part:.0f} {smaller}"
    return f"{seconds:.0f} s"


def _table(entries: Sequence[Entry], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in {"kind", "bodies", "state"} else "right")
    has_canaries = any(entry.has_canary for entry in entries)
    if has_canaries:
        table.add_column("canary")
    before: Entry | None = None
    for entry in entries:
        if before is not None and entry.version > before.version + 1:
            table.add_row("…", "collected")
        table.add_row(*_row(entry, now_s), *(["yes" if entry.has_canary else "–"] if has_canaries else []))
        before = entry
    return table


def _row(entry: Entry, now_s: float) -> list[str]:
    age = spell_age(age_of(entry, now_s))
    if entry.kind == "damaged":
        return [str(entry.version), entry.kind, *["–"] * 6, age, "–"]
    return [
        str(entry.version),
        entry.kind,
        "–" if entry.parent is None else str(entry.parent),
        size_text(entry.num_bytes),
        f"{entry.num_changed:,}",
        "–" if entry.density is None else f"{entry.density:.3%}",
        ", ".join(f"{number:,} {name}" for name, number in entry.encodings.items()) or "–",
        str(entry.step),
        age,
        (entry.state or "")[:12],
    ]
