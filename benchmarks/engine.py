"""The benchmark of the embedded engine: `make bench-engine`. Tokens a second, waits, and exactness.

SmolLM2-135M answers prompts of 64 tokens with 128 more, for 1, 4, 16 and 64 readers at once, and episodes of four
turns. Others carry the same loads, each in a process of its own, in the fastest settings that a sweep finds. The limit
is the model's matrix products alone. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

import engine_own
import engine_peers
import engine_tables
import measure
import vllm_reload
from claims import ENGINE_AT_LEAST, ENGINE_AT_MOST, Claim, claim, line
from engine_limit import Limit
from engine_load import Figures, Load
from engine_own import Own
from engine_peers import CONTINUOUS, GENERATE, OURS, VLLM, Contender, Settings
from slackwater.errors import UnavailableError
from slackwater.trainer.recipes.smollm2 import ensure_model
from tables import claims as claims_table
from tables import printer

_TURNS: Final = "turns"
_MILLI: Final = 1e3
_RATIOS: Final = {"vs_vllm_cpu": VLLM, "vs_transformers_generate": GENERATE, "vs_transformers_cb": CONTINUOUS}
_UNMEASURED: Final = {"llama.cpp": "its wheel on PyPI has no prebuilt binary"}
_EXACT: Final = frozenset(
    {"wrong_answers", "logprob_fp32_most", "logprob_bf16_mean", "logprob_bf16_p99", "invariant_parted"}
)
_FLOORS: Final = {"bf16_sdpa_vs_eager": "bfloat16, sdpa / eager", "bf16_vs_fp32": "sdpa, bfloat16 / float32"}

Show = Callable[[object], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    streams: tuple[int, ...] = (1, 4, 16, 64)
    held: int = 16
    """Of ``streams``, the one that targets are of, and that settings are tried on."""
    new_tokens: int = 128
    swept_tokens: int = 32
    """New tokens of each answer while settings are tried; 0 takes each contender's first ones."""
    episodes: int = 8
    """Of several turns, at once."""
    turns: int = 4
    turn_tokens: int = 64
    """New tokens of a turn's answer."""
    repeats: int = 3
    """Runs of each load."""

    @property
    def standard(self) -> str:
        """Name of the load that targets are of."""
        return f"s{self.held}"

    def single(self, streams: int, *, seed: int = 0) -> Load:
        """A load of one request for each reader."""
        return Load(name=f"s{streams}", streams=streams, episodes=streams, new_tokens=self.new_tokens, seed=seed)

    def several(self, *, seed: int) -> Load:
        """The load of several turns."""
        return Load(
            name=_TURNS,
            streams=self.episodes,
            episodes=self.episodes,
            turns=self.turns,
            new_tokens=self.turn_tokens,
            seed=seed,
        )

    def loads(self) -> list[Load]:
        """All loads, as often as they are run; no two have a prompt in common."""
        found: list[Load] = []
        for number in range(self.repeats):
            found.extend(self.single(streams, seed=100 * number + streams) for streams in self.streams)
            found.append(self.several(seed=100 * number))
        return found


QUICK: Final = Scale(
    streams=(1, 4), held=4, new_tokens=16, swept_tokens=0, episodes=2, turns=2, turn_tokens=8, repeats=1
)
"""Enough to see that everything works."""


HELD: Final = Scale(streams=(16,))
"""The load that targets are of, and the one of several turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured."""

    scale: Scale
    figures: Mapping[str, tuple[Figures, ...]]
    """By contender: all runs of all loads."""
    limits: Mapping[str, Limit]
    """By load: the fastest way."""
    own: Own

    def speed(self, name: str, load: str) -> float:
        """The median tokens a second of a contender's runs of a load."""
        return engine_tables.median([run for run in self.figures[name] if run.load == load]).tokens_per_s


def run(model: Path, work: Path, scale: Scale, python: str | None, show: Show) -> Measured:
    """Measure everything.

    Args:
        model: A model's folder, in bf16.
        work: A folder on a disk.
        scale: How much.
        python: An interpreter that has vLLM.
        show: Takes each table when it is done.
    """
    folders = {"bfloat16": model, "float32": widened(model, work / "float32")}
    threads = len(os.sched_getaffinity(0))
    us = engine_peers.ours(folders, threads)
    others = [engine_peers.generate(model, threads), engine_peers.continuous(model, threads)]
    missing = dict(_UNMEASURED)
    if python is None:
        missing[VLLM] = f"{vllm_reload.VARIABLE} may name an interpreter that has it"
    else:
        others.append(engine_peers.vllm(model, python))
    settings = _settings(us, scale, work, show)
    figures = {OURS: tuple(engine_peers.carried(us, settings, scale.loads(), work))}
    for contender in others:
        try:
            fastest = _settings(contender, scale, work, show)
            figures[contender.name] = tuple(engine_peers.carried(contender, fastest, scale.loads(), work))
        except UnavailableError as error:
            missing[contender.name] = str(error)
    limits = _limits(model, scale, work)
    show(engine_tables.loads(figures, missing, limits))
    own = engine_own.measured(us, folders, settings, scale.single(scale.held), repeats=scale.repeats, work=work)
    show(engine_tables.exact(own.exact, own.floor, own.parting))
    return Measured(scale=scale, figures=figures, limits=limits, own=own)


def widened(model: Path, folder: Path) -> Path:
    """A folder of the same model in float32."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        else:
            shutil.copyfile(file, folder / file.name)
    told = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**told, "dtype": "float32"}), "utf-8")
    return folder


def _settings(contender: Contender, scale: Scale, work: Path, show: Show) -> Settings:
    """The fastest settings of a contender."""
    if not scale.swept_tokens:
        return contender.sweep[0]
    load = replace(scale.single(scale.held), new_tokens=scale.swept_tokens)
    tried = engine_peers.swept(contender, load, work)
    show(engine_tables.sweep(contender.name, tried))
    return engine_peers.best(tried)


def _limits(model: Path, scale: Scale, work: Path) -> dict[str, Limit]:
    out = work / "limits.json"
    program = str(Path(__file__).with_name("engine_limit.py"))
    command = [engine_peers.PYTHON, "-P", program, str(model), str(out), *map(str, scale.streams)]
    waits = engine_peers.WAITS
    found = [Limit(**item) for wait in waits for item in engine_peers.finished(command, out, {"OMP_WAIT_POLICY": wait})]
    every = {f"s{batch}": [item for item in found if item.batch == batch] for batch in scale.streams}
    return {load: max(items, key=lambda item: item.tokens_per_s) for load, items in every.items()}


def claims(measured: Measured) -> list[Claim]:
    """What the measurements say, by name."""
    scale, load = measured.scale, measured.scale.standard
    ours = measured.speed(OURS, load)
    ratios = {name: ours / measured.speed(other, load) for name, other in _RATIOS.items() if other in measured.figures}
    own = measured.own
    plain = engine_tables.median(own.plain).tokens_per_s
    values = {
        **ratios,
        "vs_matmul_limit": ours / measured.limits[load].tokens_per_s,
        "logprob_cost": 1 - engine_tables.median(own.evidence).tokens_per_s / plain,
        "batch_invariant_cost": 1 - engine_tables.median(own.invariant).tokens_per_s / plain,
        "wrong_answers": own.wrong + sum(run.wrong for runs in measured.figures.values() for run in runs),
        "logprob_fp32_most": own.exact["float32 / float32"].most,
        "logprob_bf16_mean": own.exact["bfloat16 / bfloat16"].mean,
        "logprob_bf16_p99": own.exact["bfloat16 / bfloat16"].p99,
        "logprob_bf16_vs_fp32_mean": own.exact["bfloat16 / float32"].mean,
        **{f"transformers_{name}_mean": own.floor[pair].mean for name, pair in _FLOORS.items()},
        "greedy_parted": own.parting.parted,
        "invariant_parted": own.invariant_parting.parted,
    }
    names = [*(f"s{streams}" for streams in scale.streams), _TURNS]
    return [
        *(told for name in names for told in _told(measured, name)),
        *(claim(name, value, ENGINE_AT_MOST, ENGINE_AT_LEAST) for name, value in values.items()),
    ]


def _told(measured: Measured, load: str) -> list[Claim]:
    """Figures of one load without a target: ours, and the speeds of others."""
    mine = engine_tables.median([run for run in measured.figures[OURS] if run.load == load])
    values = {
        "tokens_per_s": mine.tokens_per_s,
        "first_p50_ms": _MILLI * mine.first_p50_s,
        "first_p99_ms": _MILLI * mine.first_p99_s,
        "next_p50_ms": _MILLI * mine.gap_p50_s,
        "next_p99_ms": _MILLI * mine.gap_p99_s,
    }
    others = {
        f"{name.removeprefix('vs_')}_tokens_per_s": measured.speed(other, load)
        for name, other in _RATIOS.items()
        if other in measured.figures
    }
    return [Claim(name=f"{load}_{name}", value=value) for name, value in {**values, **others}.items()]


def main() -> None:
    """Measure, print tables, and print the claims as the last line."""
    parser = argparse.ArgumentParser(description="measure the embedded engine under load, beside other engines")
    parser.add_argument("--quick", action="store_true", help="a little of everything: to see that results are right")
    parser.add_argument("--held", action="store_true", help="only the loads of sixteen readers and of several turns")
    asked = parser.parse_args()
    quick, scale = asked.quick, QUICK if asked.quick else HELD if asked.held else Scale()
    show, before = printer(), measure.load()
    show(measure.machine())
    with tempfile.TemporaryDirectory() as scratch:
        model = ensure_model(Path(scratch) / "model")
        python = None if quick else vllm_reload.interpreter(os.environ)
        found = claims(run(model, Path(scratch), scale, python, show))
    if quick:  # speeds of a few tokens are no speeds
        found = [item if item.name in _EXACT else replace(item, target=None) for item in found]
    show(f"load average over a minute: {before:.2f} before, {measure.load():.2f} after")
    show(claims_table(found))
    print(line("engine", found))


if __name__ == "__main__":
    main()
