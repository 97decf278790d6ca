"""The tables of the engine's benchmark, for people."""

from collections.abc import Mapping, Sequence
from typing import Final

from rich import box
from rich.table import Table

from engine_exact import Differences, Parting
from engine_limit import Limit
from engine_load import Figures
from engine_peers import Tried

_MILLI: Final = 1e3


def sweep(name: str, tried: Sequence[Tried]) -> Table:
    """What a sweep tried."""
    table = _table(f"{name}: settings tried", ("settings", "tokens/s"))
    for one in tried:
        told = ", ".join(f"{key} {value}" for key, value in one.settings.items())
        table.add_row(told, one.why or f"{one.tokens_per_s:.1f}")
    return table


def loads(found: Mapping[str, Sequence[Figures]], missing: Mapping[str, str], limits: Mapping[str, Limit]) -> Table:
    """Every load: who carried it how fast, and why others didn't.

    Args:
        found: By contender, the figures of all runs.
        missing: By contender, why there are none.
        limits: By load, the best limit.
    """
    columns = ("", "tokens/s: median (least to most)", "first token ms: p50", "p99", "next token ms: p50", "p99")
    table = _table("Loads", columns)
    for load in dict.fromkeys(figures.load for all_runs in found.values() for figures in all_runs):
        table.add_section()
        table.add_row(load)
        for name, all_runs in found.items():
            runs = [figures for figures in all_runs if figures.load == load]
            if runs:
                table.add_row(f"  {name}", _spread(runs), *_waits(median(runs)))
        if load in limits:
            table.add_row(f"  matrix products alone: {limits[load].way}", f"{limits[load].tokens_per_s:.1f}")
    for name, why in missing.items():
        table.add_row(f"{name}: not measured: {why}")
    return table


def median(runs: Sequence[Figures]) -> Figures:
    """The run of the median speed; of two, the slower."""
    return sorted(runs, key=lambda run: run.tokens_per_s)[(len(runs) - 1) // 2]


def exact(found: Mapping[str, Differences], floor: Mapping[str, Differences], parting: Parting) -> Table:
    """Log-probabilities beside those of a plain forward pass, by the dtypes of both; and two plain passes' own."""
    table = _table("Log-probabilities beside a plain forward pass, nats", ("engine / pass", "mean", "p99", "most"))
    for dtype, item in found.items():
        table.add_row(dtype, f"{item.mean:.2g}", f"{item.p99:.2g}", f"{item.most:.2g}")
    table.add_section()
    for pair, item in floor.items():
        table.add_row(f"transformers: {pair}", f"{item.mean:.2g}", f"{item.p99:.2g}", f"{item.most:.2g}")
    table.caption = (
        f"Greedy answers alone and in a batch: {parting.parted} of {parting.answers} part, at token {parting.first:g}"
    )
    return table


def _spread(runs: Sequence[Figures]) -> str:
    speeds = sorted(run.tokens_per_s for run in runs)
    return f"{median(runs).tokens_per_s:.1f} ({speeds[0]:.1f} to {speeds[-1]:.1f}), {len(runs)}"


def _waits(run: Figures) -> tuple[str, ...]:
    waits = (run.first_p50_s, run.first_p99_s, run.gap_p50_s, run.gap_p99_s)
    return tuple(f"{_MILLI * seconds:.1f}" for seconds in waits)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
