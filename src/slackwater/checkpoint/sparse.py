"""The ``sparse`` body: changed elements alone, by context. Normative page: docs/format.md.

::

    head · one row per context · gap quotients · gap lows · signs · run quotients · run lows · sizes

A *gap* is the number of unchanged elements between a changed one and the one before it in its context. Most steps are
one place on the line; a *run* is the number of such steps between two larger ones, whose *size* is their length less 2.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint import contexts as ctx
from slackwater.checkpoint import rice
from slackwater.checkpoint.changes import Changes, Positions, gather, read_only, steps_between, steps_onto
from slackwater.checkpoint.refusal import refuse_body
from slackwater.checkpoint.rice import Numbers
from slackwater.checkpoint.tensor import WIDTHS, Bits
from slackwater.checkpoint.varint import read_varint, varint

_HEAD: Final = struct.Struct("<IHHIII")
"""Changes, contexts, zero, and the bytes of the gap quotients, of the run quotients and of the sizes."""
_ROW: Final = struct.Struct("<BH")
"""Last class, and the widths of gaps, runs and sizes in 5 bits each; changes and larger steps follow as varints."""
_WIDTH_BITS: Final = 5
_WIDTH_MASK: Final = (1 << _WIDTH_BITS) - 1


class _Row(NamedTuple):
    """One context."""

    last: int
    gap_width: int
    run_width: int
    size_width: int
    changes: int
    larger: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranked:
    """All changes of a body by context: rank in the context, and step."""

    lasts: tuple[int, ...]
    ends: tuple[int, ...]
    """Index after each context's last change."""
    ranks: Numbers
    steps: Numbers


def encode_sparse(dtype: str, olds: Sequence[Bits], changes: Sequence[Changes], *, by_exponent: bool) -> bytes:
    """The body of some tiles, of which at least one element changed.

    Args:
        dtype: Of all the tiles.
        olds: The tiles before, in order.
        changes: What changed in each.
        by_exponent: Several contexts: smaller, and readers walk the old bits.
    """
    steps = np.empty(sum(part.count for part in changes), dtype=np.int64)
    steps_between(_join(part.old for part in changes), _join(part.new for part in changes), 8 * WIDTHS[dtype], steps)
    ranked = _by_exponent(dtype, olds, changes, steps) if by_exponent else _by_position(olds, changes, steps)
    return _write(ranked)


def _by_position(olds: Sequence[Bits], changes: Sequence[Changes], steps: Numbers) -> _Ranked:
    begins = accumulate((old.size for old in olds), initial=0)
    ranks = [part.positions.astype(np.int64) + begin for part, begin in zip(changes, begins, strict=False)]
    return _Ranked(lasts=(ctx.CLASSES - 1,), ends=(steps.size,), ranks=_join(ranks), steps=steps)


def _by_exponent(dtype: str, olds: Sequence[Bits], changes: Sequence[Changes], steps: Numbers) -> _Ranked:
    lasts = ctx.cut(ctx.classes_of(_join(part.old for part in changes), dtype))
    if len(lasts) == 1:
        return _by_position(olds, changes, steps)
    context_of, seen = ctx.table(lasts), np.zeros(len(lasts), dtype=np.int64)
    ranks, found = np.empty(steps.size, dtype=np.int64), np.empty(steps.size, dtype=np.uint8)
    begin = 0
    for old, part in zip(olds, changes, strict=True):
        span = slice(begin, begin + part.count)
        ctx.rank_changes(read_only(old), *ctx.field(dtype), context_of, seen, part.positions, ranks[span], found[span])
        begin += part.count
    order = np.argsort(found, kind="stable")
    counts = np.bincount(found, minlength=len(lasts))
    return _Ranked(lasts=lasts, ends=tuple(np.cumsum(counts).tolist()), ranks=ranks[order], steps=steps[order])


def _write(ranked: _Ranked) -> bytes:
    distances = np.abs(ranked.steps).view(np.uint64)  # 64-bit elements have a step of -2**63
    larger = np.flatnonzero(distances > 1)
    sizes = (distances[larger] - 2).view(np.int64)
    cuts = np.searchsorted(larger, ranked.ends).tolist()
    gaps = _parts(ranked.ranks, ranked.ends)
    # A run counts the changes of its own context: positions in it begin at 0.
    runs = [part - begin for part, begin in zip(_parts(larger, cuts), (0, *ranked.ends), strict=False)]
    lengths = _parts(sizes, cuts)
    widths = [
        (_width(gap), _width(run), rice.golomb_width(size)) for gap, run, size in zip(gaps, runs, lengths, strict=True)
    ]
    rows = [
        _row_bytes(_Row(last, *width, gap.size, run.size))
        for last, width, gap, run in zip(ranked.lasts, widths, gaps, runs, strict=True)
    ]
    gap_quotients, gap_lows = rice.rice_bytes([(gap, width) for gap, (width, _, _) in zip(gaps, widths, strict=True)])
    run_quotients, run_lows = rice.rice_bytes([(run, width) for run, (_, width, _) in zip(runs, widths, strict=True)])
    size_codes = rice.golomb_bytes([(size, width) for size, (_, _, width) in zip(lengths, widths, strict=True)])
    head = _HEAD.pack(ranked.steps.size, len(rows), 0, len(gap_quotients), len(run_quotients), len(size_codes))
    return b"".join(
        (head, *rows, gap_quotients, gap_lows, rice.signs_bytes(ranked.steps), run_quotients, run_lows, size_codes)
    )


def _parts(values: Numbers, ends: Sequence[int]) -> list[Numbers]:
    return [values[begin:end] for begin, end in pairwise((0, *ends))]


def _width(rising: Numbers) -> int:
    return rice.rice_width(rising.size, int(rising[-1]) + 1 - rising.size) if rising.size else 0


def decode_sparse(where: str, dtype: str, olds: Sequence[Bits], body: memoryview) -> list[Changes]:
    """What a body changes in the tiles that it was made for.

    Args:
        where: The body's place, for messages.
        dtype: Of all the tiles.
        olds: The tiles now held, in order; of several contexts the whole tiles matter, of one the changed elements.
        body: Hostile until it has been read: memory stays O(body) and O(changes), and nothing is written.

    Raises:
        CorruptError: The body breaks the format.
    """
    total = sum(old.size for old in olds)
    rows, sections = _read_head(where, body, total)
    counts = [row.changes for row in rows]
    ranks, steps = np.empty(sum(counts), dtype=np.int64), np.empty(sum(counts), dtype=np.int64)
    ends = list(accumulate(counts))
    gaps = list(zip(_parts(ranks, ends), (row.gap_width for row in rows), strict=True))
    if not rice.rice_numbers(gaps, sections.gap_quotients, sections.gap_lows, [total] * len(rows)):
        refuse_body(where, "gaps", "they don't end inside the tiles and with their section")
    _read_steps(where, rows, sections, steps, 8 * WIDTHS[dtype])
    if len(rows) == 1:
        return _at_positions(olds, ranks, steps, dtype)
    return _at_ranks(where, dtype, olds, rows, ranks, steps)


def contexts_of(body: memoryview) -> int:
    """How many contexts a body has; 0 where it is too short to tell."""
    return _HEAD.unpack_from(body)[1] if len(body) >= _HEAD.size else 0


class _Sections(NamedTuple):
    gap_quotients: memoryview
    gap_lows: memoryview
    signs: memoryview
    run_quotients: memoryview
    run_lows: memoryview
    sizes: memoryview


def _read_head(where: str, body: memoryview, total: int) -> tuple[list[_Row], _Sections]:
    if len(body) < _HEAD.size:
        refuse_body(where, "head", f"it needs {_HEAD.size} bytes and the body has {len(body)}")
    count, contexts, zero, gap_quotients, run_quotients, sizes = _HEAD.unpack_from(body)
    if not 1 <= count <= total:
        refuse_body(where, "count", f"{count} changed elements in {total}")
    if not 1 <= contexts <= ctx.CLASSES:
        refuse_body(where, "contexts", f"{contexts} is none of 1 to {ctx.CLASSES}")
    if zero:
        refuse_body(where, "reserved", f"{zero} instead of 0")
    rows, begin = _read_rows(where, body, contexts)
    _check_rows(where, rows, count)
    lows = _bytes(sum(row.changes * row.gap_width for row in rows))
    run_lows = _bytes(sum(row.larger * row.run_width for row in rows))
    lengths = (gap_quotients, lows, _bytes(count), run_quotients, run_lows, sizes)
    ends = list(accumulate(lengths, initial=begin))
    if ends[-1] != len(body):
        refuse_body(where, "sections", f"they end at byte {ends[-1]} and the body has {len(body)}")
    return rows, _Sections(*(body[start:end] for start, end in pairwise(ends)))


def _row_bytes(row: _Row) -> bytes:
    widths = row.gap_width | row.run_width << _WIDTH_BITS | row.size_width << 2 * _WIDTH_BITS
    return _ROW.pack(row.last, widths) + varint(row.changes) + varint(row.larger)


def _read_rows(where: str, body: memoryview, contexts: int) -> tuple[list[_Row], int]:
    """The rows, and where they end."""
    rows, at = list[_Row](), _HEAD.size
    for index in range(contexts):
        if len(body) < at + _ROW.size:
            refuse_body(where, f"row {index}", f"it goes past the body's {len(body)} bytes")
        last, widths = _ROW.unpack_from(body, at)
        if widths >> 3 * _WIDTH_BITS:
            refuse_body(where, f"row {index}", "the highest bit of its widths is set")
        changes, at = read_varint(where, body, at + _ROW.size)
        larger, at = read_varint(where, body, at)
        gap, run, size = (widths >> shift & _WIDTH_MASK for shift in (0, _WIDTH_BITS, 2 * _WIDTH_BITS))
        rows.append(_Row(last, gap, run, size, changes, larger))
    return rows, at


def _check_rows(where: str, rows: Sequence[_Row], count: int) -> None:
    lasts = [row.last for row in rows]
    if any(before >= after for before, after in pairwise(lasts)) or lasts[-1] != ctx.CLASSES - 1:
        refuse_body(where, "rows", f"last classes rise and end with {ctx.CLASSES - 1}, not {lasts[:16]}")
    for index, row in enumerate(rows):
        if max(row.gap_width, row.run_width, row.size_width) > rice.MAX_WIDTH:
            refuse_body(where, f"row {index}", f"a width is above {rice.MAX_WIDTH}")
        if row.larger > row.changes:
            refuse_body(where, f"row {index}", f"{row.larger} larger steps among {row.changes}")
    found = sum(row.changes for row in rows)
    if found != count:
        refuse_body(where, "rows", f"their changes add up to {found}, not {count}")


def _read_steps(where: str, rows: Sequence[_Row], sections: _Sections, steps: Numbers, bits: int) -> None:
    """Signs, then the larger steps, into ``steps``."""
    if not rice.read_signs(steps, sections.signs):
        refuse_body(where, "signs", "the last byte isn't filled with zeros")
    larger = [np.empty(row.larger, dtype=np.int64) for row in rows]
    sizes = [np.empty(row.larger, dtype=np.int64) for row in rows]
    runs = list(zip(larger, (row.run_width for row in rows), strict=True))
    if not rice.rice_numbers(runs, sections.run_quotients, sections.run_lows, [row.changes for row in rows]):
        refuse_body(where, "runs", "they don't end inside their contexts and with their section")
    if not rice.golomb_numbers(list(zip(sizes, (row.size_width for row in rows), strict=True)), sections.sizes):
        refuse_body(where, "sizes", "they don't end with their section")
    begins = accumulate((row.changes for row in rows), initial=0)
    for run, size, begin in zip(larger, sizes, begins, strict=False):
        if size.size and int(size.max()) > (1 << (bits - 1)) - 2:
            refuse_body(where, "sizes", f"a step of {int(size.max()) + 2} in {bits} bits")
        steps[run + begin] *= size + 2


def _at_positions(olds: Sequence[Bits], ranks: Numbers, steps: Numbers, dtype: str) -> list[Changes]:
    edges = list(accumulate((old.size for old in olds), initial=0))
    cuts = np.searchsorted(ranks, edges).tolist()
    return [
        _changes(old, (ranks[first:last] - begin).astype(np.uint32), steps[first:last], dtype)
        for old, begin, (first, last) in zip(olds, edges, pairwise(cuts), strict=False)
    ]


def _at_ranks(
    where: str, dtype: str, olds: Sequence[Bits], rows: Sequence[_Row], ranks: Numbers, steps: Numbers
) -> list[Changes]:
    ends = np.array(list(accumulate(row.changes for row in rows)), dtype=np.int64)
    following = np.concatenate(([0], ends[:-1]))
    left = ctx.countdown(ranks, following, ends)
    context_of = ctx.table(tuple(row.last for row in rows))
    result: list[Changes] = []
    for old in olds:
        positions, order = np.empty(steps.size, dtype=np.uint32), np.empty(steps.size, dtype=np.int64)
        count = ctx.merge_changes(
            read_only(old), *ctx.field(dtype), context_of, left, following, ends, ranks, positions, order
        )
        result.append(_changes(old, positions[:count].copy(), steps[order[:count]], dtype))
    found = sum(part.count for part in result)
    if found != steps.size:
        refuse_body(where, "gaps", f"only {found} of {steps.size} changes lie inside the tiles")
    return result


def _changes(old: Bits, positions: Positions, steps: Numbers, dtype: str) -> Changes:
    before, after = gather(old, positions), np.empty(steps.size, dtype=np.uint64)
    steps_onto(before, steps, 8 * WIDTHS[dtype], after)
    return Changes(positions=positions, old=before, new=after)


def _join(parts: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    first, *others = parts
    return np.concatenate([first, *others]) if others else first


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
