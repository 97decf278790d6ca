"""The tables of the swap's benchmark, for people."""

import statistics
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from swap_served import Served
from swap_still import Still

_MILLI: Final = 1e3
_MEGA: Final = 1e6


def still(found: Sequence[Still], reloads: Sequence[float] = ()) -> Table:
    """Milliseconds of still moments; the limit first. vLLM's reloads take the same whatever changes."""
    heads = [f"{item.name}: {100 * item.share:.2f} %" for item in found]
    table = _table("Still moments, ms: median (least to most), samples", ("", *heads))
    rows = {
        **{name: [item.peers.get(name, ()) for item in found] for name in found[0].peers},
        "ours: commit": [item.pauses for item in found],
        "ours: undo": [item.undos for item in found],
        "ours: commit, strict": [item.stricts for item in found],
    }
    for name, seconds in rows.items():
        table.add_row(name, *map(_spread, seconds))
    if reloads:
        table.add_row("vLLM's reload, files warm", *(_spread(reloads) for _ in found))
    table.add_row("nan patch, making its tensors", *(f"{_MILLI * item.nan_made:.0f}" for item in found))
    table.add_row("staged, MB", *(f"{item.staged_bytes / _MEGA:.2f}" for item in found))
    return table


def served(found: Sequence[Served]) -> Table:
    """What readers of a replica see."""
    table = _table("Served, ms: median (least to most), swaps", ("", *(item.name for item in found)))
    rows = {
        "commit in the bucket to first token": "to_first_token",
        "pause": "pause",
        "longest wait across the swap": "gap",
        "longest wait until it is verified": "longest",
        "a normal step": "step",
        "wait across the swap less a step": "over_step",
        "the same without a swap": "quiet_over_step",
    }
    for title, name in rows.items():
        table.add_row(title, *(_spread([getattr(swap, name) for swap in item.swaps]) for item in found))
    table.add_row("delta, MB", *(f"{item.encoded / _MEGA:.3f}" for item in found))
    table.add_row("host memory of an exchange, MB", *(f"{item.extra / _MEGA:.3f}" for item in found))
    return table


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    middle, least, most = (_MILLI * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.2f} ({least:.2f} to {most:.2f}), {len(seconds)}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
