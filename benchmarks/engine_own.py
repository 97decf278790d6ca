"""What our engine's own settings cost, and what its answers are beside a plain forward pass and beside each other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine_exact import Differences, Parting, differences, parting, passes
from engine_load import Figures, Load
from engine_peers import Contender, Settings, carried

_PLAIN = "plain"
_EVIDENCE = "evidence"
_KEPT = "kept"
_ALONE = "alone"
_TOGETHER = "together"


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """Everything that is measured of our engine alone."""

    plain: tuple[Figures, ...]
    """Runs of the load that targets are of."""
    evidence: tuple[Figures, ...]
    """The same, where raw log-probabilities and the likeliest token are asked for as well."""
    invariant: tuple[Figures, ...]
    """The same as ``plain``, where company changes no bit."""
    exact: Mapping[str, Differences]
    """By dtype of the engine, and of the pass after a slash."""
    floor: Mapping[str, Differences]
    """Of two plain passes over the same answers, by what differs between them."""
    parting: Parting
    """Of greedy answers."""
    invariant_parting: Parting
    """Of greedy answers where company changes no bit."""
    wrong: int
    """Answers that weren't sound, of all runs."""


def measured(
    us: Contender, folders: Mapping[str, Path], settings: Settings, load: Load, *, repeats: int, work: Path
) -> Own:
    """Run a load in all the ways of `Own`.

    Args:
        us: Our engine.
        folders: By dtype, a folder of the model in it.
        settings: The fastest.
        load: One request for each reader.
        repeats: Runs of what is timed.
        work: A folder for jobs.
    """
    seeds = [replace(load, seed=number) for number in range(repeats)]
    timed = [replace(one, name=name, all_evidence=name == _EVIDENCE) for one in seeds for name in (_PLAIN, _EVIDENCE)]
    kept = replace(load, name=_KEPT, keep=True)
    together = replace(load, name=_TOGETHER, greedy=True, keep=True)
    # One reader, as many slots: the shapes of passes may depend on these, and only company is to differ.
    greedy = [replace(together, name=_ALONE, streams=1, slots=load.streams), together]
    runs = {
        "bfloat16": carried(us, {**settings, "dtype": "bfloat16"}, [kept, *timed, *greedy], work),
        "float32": carried(us, {**settings, "dtype": "float32"}, [kept], work),
        "bound": carried(us, {**settings, "dtype": "bfloat16", "batch_invariant": True}, [*seeds, *greedy], work),
    }
    free, bound = runs["bfloat16"], runs["bound"]
    bf16, fp32, answers = folders["bfloat16"], folders["float32"], _of(free, _KEPT)[0].kept
    return Own(
        plain=_of(free, _PLAIN),
        evidence=_of(free, _EVIDENCE),
        invariant=_of(bound, load.name),
        exact={
            f"{dtype} / {other}": differences(folders[other], other, _of(runs[dtype], _KEPT)[0].kept)
            for dtype, other in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))
        },
        floor={
            "bfloat16, sdpa / eager": passes((bf16, "bfloat16", "sdpa"), (bf16, "bfloat16", "eager"), answers),
            "sdpa, bfloat16 / float32": passes((bf16, "bfloat16", "sdpa"), (fp32, "float32", "sdpa"), answers),
        },
        parting=parting(_of(free, _ALONE)[0].kept, _of(free, _TOGETHER)[0].kept),
        invariant_parting=parting(_of(bound, _ALONE)[0].kept, _of(bound, _TOGETHER)[0].kept),
        wrong=sum(figures.wrong for found in runs.values() for figures in found),
    )


def _of(runs: list[Figures], name: str) -> tuple[Figures, ...]:
    return tuple(figures for figures in runs if figures.load == name)
