"""Contexts by exponent, held against a slow reader of single elements."""

from typing import Final

import numpy as np
import pytest
from codec_rig import moved, random_bits, sent, step, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.changes import Positions
from slackwater.checkpoint.contexts import (
    _WORTH_A_ROW,
    CLASSES,
    Classes,
    classes_of,
    countdown,
    cut,
    field,
    merge_changes,
    rank_changes,
    table,
)
from slackwater.checkpoint.rice import Numbers
from slackwater.checkpoint.sparse import contexts_of
from slackwater.checkpoint.tensor import WIDTHS, Bits

FLOATS: Final = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")
SEEDS = st.integers(0, 2**32 - 1)
LASTS = st.sets(st.integers(0, CLASSES - 2), max_size=12).map(lambda lasts: (*sorted(lasts), CLASSES - 1))


def slow_class(pattern: int, dtype: str) -> int:
    """The exponent; of F64 its upper 8 bits."""
    width = 8 * WIDTHS[dtype]
    exponent_bits = {"F8_E4M3": 4, "F8_E5M2": 5, "F16": 5, "BF16": 8, "F32": 8, "F64": 8}.get(dtype, 0)
    return (pattern % (1 << (width - 1))) >> (width - 1 - exponent_bits)


def slow_context(pattern: int, dtype: str, lasts: tuple[int, ...]) -> int:
    return next(index for index, last in enumerate(lasts) if slow_class(pattern, dtype) <= last)


def slow_ranks(tiles: list[Bits], changed: list[set[int]], dtype: str, lasts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Context and rank of each changed element, element by element through all tiles."""
    seen, result = [0] * len(lasts), list[tuple[int, int]]()
    for tile, positions in zip(tiles, changed, strict=True):
        for position, pattern in enumerate(tile.tolist()):
            context = slow_context(pattern, dtype, lasts)
            if position in positions:
                result.append((context, seen[context]))
            seen[context] += 1
    return result


def ranked(
    tiles: list[Bits], positions: list[Positions], dtype: str, lasts: tuple[int, ...]
) -> tuple[Classes, Numbers]:
    seen = np.zeros(len(lasts), dtype=np.int64)
    contexts, ranks = list[Classes](), list[Numbers]()
    for tile, part in zip(tiles, positions, strict=True):
        contexts.append(np.empty(part.size, dtype=np.uint8))
        ranks.append(np.empty(part.size, dtype=np.int64))
        rank_changes(tile, *field(dtype), table(lasts), seen, part, ranks[-1], contexts[-1])
    return np.concatenate(contexts), np.concatenate(ranks)


@settings(max_examples=examples(80))
@given(st.sampled_from([*FLOATS, "I8", "U64"]), LASTS, st.lists(st.integers(1, 120), min_size=1, max_size=3), SEEDS)
def test_ranks_count_the_elements_of_a_context_through_all_tiles_and_lead_back(
    dtype: str, lasts: tuple[int, ...], sizes: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tiles = [random_bits(rng, dtype, size) for size in sizes]
    positions = [np.flatnonzero(rng.random(size) < 0.3).astype(np.uint32) for size in sizes]
    contexts, ranks = ranked(tiles, positions, dtype, lasts)
    changed = [set(part.tolist()) for part in positions]
    assert list(zip(contexts.tolist(), ranks.tolist(), strict=True)) == slow_ranks(tiles, changed, dtype, lasts)

    order = np.argsort(contexts, kind="stable")
    ends = np.cumsum(np.bincount(contexts, minlength=len(lasts)))
    following, by_context = np.concatenate(([0], ends[:-1])), ranks[order]
    left, found = countdown(by_context, following, ends), list[int]()
    for tile, part in zip(tiles, positions, strict=True):
        back, places = np.empty(ranks.size, dtype=np.uint32), np.empty(ranks.size, dtype=np.int64)
        count = merge_changes(tile, *field(dtype), table(lasts), left, following, ends, by_context, back, places)
        assert back[:count].tolist() == part.tolist()
        found += places[:count].tolist()
    assert order[found].tolist() == list(range(ranks.size))


@given(LASTS)
def test_each_class_is_in_the_context_whose_last_class_is_the_next(lasts: tuple[int, ...]) -> None:
    assert table(lasts).tolist() == [next(i for i, last in enumerate(lasts) if c <= last) for c in range(CLASSES)]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_an_elements_class_is_its_exponent(dtype: str) -> None:
    bits = random_bits(np.random.default_rng(1), dtype, 400)
    wanted = np.bincount([slow_class(pattern, dtype) for pattern in bits.tolist()], minlength=CLASSES)
    assert classes_of(bits.astype(np.uint64), dtype).tolist() == wanted.tolist()


@given(st.dictionaries(st.integers(0, CLASSES - 1), st.integers(1, 300), max_size=40))
def test_cuts_rise_to_the_last_class_and_leave_each_context_enough(counts: dict[int, int]) -> None:
    changes = np.zeros(CLASSES, dtype=np.int64)
    changes[list(counts)] = list(counts.values())
    lasts = cut(changes)
    assert list(lasts) == sorted(set(lasts))
    assert lasts[-1] == CLASSES - 1
    gathered = np.add.reduceat(changes, [0, *(last + 1 for last in lasts[:-1])]) if len(lasts) > 1 else changes.sum()
    assert len(lasts) == 1 or int(np.min(gathered)) >= _WORTH_A_ROW


def test_a_few_changes_or_no_exponent_make_one_context() -> None:
    rng = np.random.default_rng(2)
    for dtype, size, wanted in (("BF16", 400, 1), ("I32", 40_000, 1), ("BF16", 40_000, 4)):
        old = weights(rng, dtype, size)
        made = sent(step(dtype, old, moved(rng, dtype, old, "neighbours", 0.05)), "wan")
        assert made.encoded.encoding == "sparse"
        contexts = contexts_of(memoryview(made.body))
        assert contexts >= wanted if wanted > 1 else contexts == 1
    assert contexts_of(memoryview(b"")) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_gains_by_its_exponents(dtype: str) -> None:
    """Where larger numbers change less often, as under Adam."""
    rng = np.random.default_rng(3)
    old = weights(rng, dtype, 100_000) if WIDTHS[dtype] > 1 else random_bits(rng, dtype, 100_000)
    shift, mask = field(dtype)
    exponents = (old.astype(np.uint64) >> np.uint64(shift)) & np.uint64(mask)
    above = exponents.astype(np.float64) - float(np.median(exponents))
    new = np.where(rng.random(old.size) < 0.02 * 0.5 ** above.clip(-2, None), old ^ old.dtype.type(1), old)
    sizes = [len(sent(step(dtype, old, new), level).body) for level in ("wan", "fast")]
    assert sizes[0] < sizes[1]
