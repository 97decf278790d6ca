"""The benchmarks' tables for people."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from applying import Applied
from claims import Claim
from densities import Point
from first_use import FirstUse
from measure import Speed
from ours import Sizes, Speeds
from peers import Outcome
from publish_cost import Cost

_WIDTH: Final = 140
_MEGA: Final = 1e6
_GIGA: Final = 1e9


def printer() -> Callable[[object], None]:
    """Print on standard output, as wide whether it is a terminal or not."""
    console = Console(width=_WIDTH, highlight=False, soft_wrap=True)
    return console.print


def first_use(found: FirstUse) -> str:
    """A line on what kernels cost at first."""
    return (
        f"first use of all kernels in a process: {found.compiling:.2f} s where they are compiled (once per machine), "
        f"{found.reading:.2f} s where their code lies on the disk"
    )


def sizes(found: Mapping[str, Sizes]) -> Table:
    """Bits per change of each set, beside the bounds."""
    columns = ("set", "changed", "order 0", "fast", "by exponent", "wan", "tiles", "manifest", "allowed")
    table = _table("Bits per changed element, digests included", columns)
    for name, size in found.items():
        table.add_row(
            name,
            f"{100 * size.bounds.density:.3f} %",
            f"{size.bounds.order0:.3f}",
            f"{size.fast.bits:.3f}",
            f"{size.bounds.by_exponent:.3f}",
            f"{size.wan.bits:.3f}",
            str(size.fast.tiles),
            f"{size.fast.manifest:,} B",
            f"{size.fast.manifest_allowed:,} B",
        )
    return table


def speeds(copy: Speed, digests: Speed, fast: Speeds, wan: Speeds) -> Table:
    """Our speeds beside a copy's and those of the digests alone."""
    table = _table("Dense bf16 GB/s on one core: median (slowest to fastest)", ("", "encode", "apply"))
    table.add_row("copy", str(copy), str(copy))
    table.add_row("two digests, nothing else", str(digests), str(digests))
    for name, level in (("fast", fast), ("wan", wan)):
        table.add_row(name, str(level.encode), str(level.decode))
    table.add_row("fast / copy", *_ratios(fast, copy))
    return table


def _ratios(level: Speeds, copy: Speed) -> tuple[str, str]:
    return f"{level.encode.gbps / copy.gbps:6.2f}", f"{level.decode.gbps / copy.gbps:6.2f}"


def peers(size: Sizes, fast: Speeds, wan: Speeds, ran: Sequence[Outcome]) -> Table:
    """Everyone on the same data."""
    table = _table("The same tensors, one core, GB/s", ("codec", "hash", "MB", "bits/change", "encode", "apply"))
    changed = size.fast.changed
    rows = [("slackwater fast", size.fast.total, fast), ("slackwater wan", size.wan.total, wan)]
    for name, total, level in rows:
        table.add_row(name, "xxh3-64 twice", *_volume(total, changed), str(level.encode), str(level.decode))
    for outcome in ran:
        volume = _volume(outcome.num_bytes, changed)
        table.add_row(outcome.peer.name, outcome.peer.proof, *volume, str(outcome.encode), str(outcome.decode))
    return table


def _volume(num_bytes: int, changed: int) -> tuple[str, str]:
    return f"{num_bytes / _MEGA:.3f}", f"{8 * num_bytes / changed:.2f}"


def densities(points: Sequence[Point]) -> Table:
    """Size and speed at each share of changed elements."""
    table = _table("Any density", ("changes", "share", "level", "of full", "encode GB/s", "apply GB/s"))
    for point in points:
        table.add_row(
            point.kind,
            f"{100 * point.share:.2f} %",
            point.level,
            f"{100 * point.size:.3f} %",
            f"{point.speeds.encode.gbps:.2f}",
            f"{point.speeds.decode.gbps:.2f}",
        )
    return table


def applied(found: Sequence[Applied]) -> Table:
    """Memory of applying to a mapped checkpoint."""
    table = _table("Applied to a mapped checkpoint, two threads", ("delta", "GB", "extra memory", "GB/s"))
    for item in found:
        speed = item.num_bytes / item.seconds / _GIGA
        table.add_row(item.name, f"{item.num_bytes / _GIGA:.2f}", f"{item.extra / _MEGA:.1f} MB", f"{speed:.2f}")
    return table


def published(found: Sequence[Cost]) -> Table:
    """What publishing took, model by model."""
    columns = (
        "model",
        "MB",
        "changed",
        "anchor s",
        "full s",
        "delta MB",
        "delta s",
        "blocked s",
        "memcpy s",
        "extra MB",
    )
    table = _table("Published to an S3 server over loopback, two threads", columns)
    for cost in found:
        table.add_row(
            cost.name,
            f"{cost.num_bytes / _MEGA:.0f}",
            f"{100 * cost.share:.2f} %",
            f"{cost.anchor_s:.2f}",
            f"{cost.full_s:.2f}",
            f"{cost.uploaded / _MEGA:.2f}",
            f"{cost.delta_s:.3f}",
            f"{cost.blocked_s:.3f}",
            f"{cost.copy_s:.3f}",
            f"{cost.extra / _MEGA:.0f}",
        )
    return table


def claims(found: Sequence[Claim]) -> Table:
    """Claims, targets, and what is missed."""
    table = _table("Claims", ("claim", "value", "target", ""))
    for item in found:
        entry = item.entry()
        target = f"{item.side} {entry['target']:g}" if item.target is not None else ""
        table.add_row(item.name, f"{entry['value']:g}", target, "" if item.ok else "missed")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
