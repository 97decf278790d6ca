"""vLLM's own reload of a model's weights on a CPU, as something to hold pauses beside: printed, not claimed.

`measured` finds an interpreter that has vLLM and runs this file with it. There it stands alone: it loads the folder,
has every weight reloaded from its files, which the page cache holds by then, and prints seconds as one JSON line.
vLLM runs in that one process, eager, since that is the only mode that its CPU build reloads in.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "SLACKWATER_VLLM_PYTHON"
"""Names an interpreter that has vLLM."""
_USUAL: Final = Path(__file__).parent.parent / ".vllm" / "bin" / "python"
_REPEATS: Final = 7
_PATIENCE_S: Final = 300
_WINDOW: Final = 512
_TOKENS: Final = 8
_PROMPT: Final = {"prompt_token_ids": list(range(100, 116))}
_SETTINGS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def interpreter(environment: Mapping[str, str], usual: Path = _USUAL) -> str | None:
    """The interpreter that is said to have vLLM; None where nobody says so."""
    return environment.get(VARIABLE) or (str(usual) if usual.is_file() else None)


def measured(folder: Path, python: str | None, show: Callable[[object], None]) -> tuple[float, ...]:
    """Seconds of vLLM's reloads of a model's folder; none, and a line that says why, where it doesn't run.

    Args:
        folder: config.json, tokenizer, safetensors.
        python: An interpreter that has vLLM.
        show: Takes the line.
    """
    if python is None:
        show(f"vLLM is not installed: {VARIABLE} may name an interpreter that has it")
        return ()
    command = [python, "-P", __file__, str(folder)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **_SETTINGS}, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        show(f"vLLM's reload wasn't measured: {error}")
        return ()
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]
    if done.returncode:
        show(f"vLLM's reload wasn't measured: {last}")
        return ()
    show(f"vLLM's reload: {last}")
    return tuple(json.loads(last)["seconds"])


def main() -> None:
    """Load a folder, reload it some times, and print the seconds as the last line."""
    vllm: Any = importlib.import_module("vllm")
    model = vllm.LLM(model=sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=_WINDOW)
    answer = _answer(vllm, model)
    seconds = [_reload(model) for _ in range(1 + _REPEATS)][1:]  # the first also makes what later ones find made
    if _answer(vllm, model) != answer:
        sys.exit("another answer after reloading the same weights")
    told = {
        "vllm": vllm.__version__,
        "median_s": round(statistics.median(seconds), 4),
        "least_s": round(min(seconds), 4),
        "most_s": round(max(seconds), 4),
        "seconds": [round(value, 4) for value in seconds],
    }
    print(json.dumps(told), flush=True)


def _reload(model: Any) -> float:
    begun = time.perf_counter()
    model.collective_rpc("reload_weights")
    return time.perf_counter() - begun


def _answer(vllm: Any, model: Any) -> list[int]:
    sampling = vllm.SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    model.reset_prefix_cache()
    return list(model.generate([_PROMPT], sampling, use_tqdm=False)[0].outputs[0].token_ids)


if __name__ == "__main__":
    main()
