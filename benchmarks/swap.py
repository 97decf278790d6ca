"""The benchmark of swapping: `make bench-swap`. How long an engine stands still for new weights, and who waits for it.

SmolLM2-135M in the embedded engine, sixteen requests streaming, and real AdamW steps of `deltas`; at 100 % the lowest
bit of every weight. `swap_still` times pauses beside what else could write the same bits, `swap_served` what readers of
a replica see. Caches are emptied before each sample of the first; the second is as it comes. Ratios compare medians of
the same still moments. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

import deltas
import measure
import pairs
import swap_served
import swap_still
import swap_tables
import vllm_reload
from claims import SWAP_AT_LEAST, SWAP_AT_MOST, Claim, claim, line
from pairs import Pair, States
from slackwater.trainer.recipes.smollm2 import ensure_model
from swap_load import cache_bytes
from swap_peers import DENSE, LIMIT, NAN
from swap_served import Served
from swap_still import Still
from tables import claims as claims_table
from tables import printer

SETS: Final = ("p019", "p142")
"""The sets that have targets."""
ALL: Final = "p100"
"""Every element changes."""
_MILLI: Final = 1e3
_SLACK_MS: Final = 20
"""What a reader may wait beyond a step and a pause."""
_TAIL: Final = 100
_EXACT: Final = frozenset({"aborted", "mixed_weights", "stale_kv", "false_labels", "extra_host_bytes_vs_delta"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    samples: int = 120
    """Pauses of a set."""
    beside: int = 24
    """Of them, those that peers are run beside."""
    dense_samples: int = 12
    """Pauses where every element changes."""
    swaps: int = 24
    """Versions taken under load, of each set."""


QUICK: Final = Scale(samples=4, beside=2, dense_samples=2, swaps=2)
"""Enough to see that everything works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured."""

    still: Mapping[str, Still]
    served: tuple[Served, ...]


def run(
    side_files: Path,
    load: Callable[[str], Pair],
    work: Path,
    scale: Scale,
    show: Callable[[object], None],
    reloads: Sequence[float] = (),
) -> Measured:
    """Measure everything.

    Args:
        side_files: A folder with the model's config.json and generation_config.json.
        load: Gives a bf16 pair of it by the name of its set.
        work: A folder on a disk.
        scale: How much.
        show: Takes each table when it is done.
        reloads: Seconds of vLLM's reloads, told in the table.
    """
    work.mkdir(parents=True, exist_ok=True)
    still: dict[str, Still] = {}
    served: list[Served] = []
    for name in (*SETS, ALL):
        pair = load(name) if name in SETS else every_bit(load(SETS[0]))
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            root = Path(scratch)
            model, new_file = _write(root, side_files, pair)
            samples, beside = (scale.samples, scale.beside) if name in SETS else (scale.dense_samples,) * 2
            still[name] = asyncio.run(swap_still.measure(name, model, new_file, pair, beside=beside, samples=samples))
            if name in SETS:
                served.append(asyncio.run(swap_served.measured(name, root, model, pair, scale.swaps)))
    show(swap_tables.still(tuple(still.values()), reloads))
    show(swap_tables.served(served))
    return Measured(still=still, served=tuple(served))


def every_bit(pair: Pair) -> Pair:
    """A step that changes the lowest bit of every weight."""
    return replace(pair, new={name: bits ^ bits.dtype.type(1) for name, bits in pair.old.items()})


def _write(root: Path, side_files: Path, pair: Pair) -> tuple[Path, Path]:
    """A model folder of the old state, whose answers don't end by themselves, and a file of the new one."""
    model = root / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json"):
        told = json.loads((side_files / name).read_text())
        (model / name).write_text(json.dumps({**told, "eos_token_id": []}))
    save(model / "model.safetensors", pair, pair.old)
    save(root / "new.safetensors", pair, pair.new)
    return model, root / "new.safetensors"


def save(file: Path, pair: Pair, states: States) -> None:
    """Write a state of a bf16 pair as safetensors."""
    tensors = {
        spec.name: torch.from_numpy(states[spec.name].view("int16")).view(torch.bfloat16).view(spec.shape)
        for spec in pair.outline.specs
    }
    save_file(tensors, file, metadata={"format": "pt"})


def claims(measured: Measured) -> list[Claim]:
    """What the measurements say, by name; of what is held to a target, the worst set."""
    still, served = measured.still, measured.served
    small, usual = (still[name] for name in SETS)
    worst = max(served, key=lambda item: item.median("over_step") - item.median("pause"))
    held = {
        "pause_vs_nan_patch_p019": small.median(NAN) / small.pause_beside,
        "pause_vs_nan_patch_p142": usual.median(NAN) / usual.pause_beside,
        "pause_vs_dense_copy_p019": small.median(DENSE) / small.pause_beside,
        "pause_vs_dense_copy_p142": usual.median(DENSE) / usual.pause_beside,
        "pause_vs_scatter_limit_p019": small.pause_beside / small.median([LIMIT]),
        "pause_vs_scatter_limit_p142": usual.pause_beside / usual.median([LIMIT]),
        "aborted": sum(item.aborted for item in (*still.values(), *served)),
        "mixed_weights": sum(item.mixed for item in (*still.values(), *served)),
        "stale_kv": sum(item.stale for item in served),
        "false_labels": sum(item.false_labels for item in (*still.values(), *served)),
        "extra_host_bytes_vs_delta": served[-1].extra / served[-1].encoded,
    }
    return [
        *(told for item in still.values() for told in _still_claims(item)),
        *(told for item in served for told in _served_claims(item)),
        *(claim(name, value, SWAP_AT_MOST, SWAP_AT_LEAST) for name, value in held.items()),
        Claim(
            name="token_gap_over_step_ms",
            value=_MILLI * worst.median("over_step"),
            target=_MILLI * worst.median("pause") + _SLACK_MS,
        ),
    ]


def _still_claims(item: Still) -> list[Claim]:
    values = {
        "pause_p50_ms": _MILLI * item.pause,
        "pause_p99_ms": _MILLI * tail(item.pauses),
        "undo_p50_ms": _MILLI * statistics.median(item.undos),
        "undo_p99_ms": _MILLI * tail(item.undos),
        "strict_pause_p50_ms": _MILLI * statistics.median(item.stricts),
        "dense_copy_ms": _MILLI * item.median(DENSE),
        "nan_patch_ms": _MILLI * item.median(NAN),
        "scatter_limit_ms": _MILLI * item.median([LIMIT]),
        "staged_mb": item.staged_bytes / 1e6,
    }
    return [Claim(name=f"{item.name}_{name}", value=value) for name, value in values.items()]


def _served_claims(item: Served) -> list[Claim]:
    values = {
        "to_first_token_ms": _MILLI * item.median("to_first_token"),
        "served_pause_ms": _MILLI * item.median("pause"),
        "step_ms": _MILLI * item.median("step"),
        "token_gap_ms": _MILLI * item.median("gap"),
        "longest_gap_ms": _MILLI * item.most("longest"),
        "quiet_over_step_ms": _MILLI * item.median("quiet_over_step"),
    }
    return [Claim(name=f"{item.name}_{name}", value=value) for name, value in values.items()]


def tail(seconds: Sequence[float]) -> float:
    """The 99th percentile: the least number that at most one in a hundred is above."""
    ordered = sorted(seconds)
    return ordered[len(ordered) - 1 - len(ordered) // _TAIL]


def main() -> None:
    """Measure, print tables, and print the claims as the last line."""
    parser = argparse.ArgumentParser(description="measure swaps of a served model's weights, beside other ways")
    parser.add_argument("--quick", action="store_true", help="a few samples of everything: to see that it works")
    quick = parser.parse_args().quick
    logging.getLogger("slackwater").setLevel(logging.ERROR)
    folder = deltas.ensure(lambda text: print(text, file=sys.stderr, flush=True))
    show = printer()
    before = measure.load()
    show(f"{measure.machine()}; last cache {cache_bytes() >> 20} MiB")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model = ensure_model(Path(scratch) / "model")
        reloads = vllm_reload.measured(model, vllm_reload.interpreter(os.environ), show)
        found = claims(run(model, pairs.load, Path(scratch), QUICK if quick else Scale(), show, reloads))
    if quick:  # speeds of a few samples are no speeds
        found = [item if item.name in _EXACT else replace(item, target=None) for item in found]
    show(f"load average over a minute: {before:.2f} before, {measure.load():.2f} after")
    show(claims_table(found))
    print(line("swap", found))


if __name__ == "__main__":
    main()
