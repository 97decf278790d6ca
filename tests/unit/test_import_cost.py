"""Importing the root is free of heavy libraries and quick."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numba", "obstore", "starlette", "aiohttp", "numpy", "matplotlib", "uvicorn")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_root_imports_nothing_heavy() -> None:
    loaded = run(f"import sys, slackwater; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("module", ["slackwater.cli.main", "slackwater.trainer.client", "slackwater.router.app"])
def test_what_holds_no_weights_needs_neither_torch_nor_a_compiler(module: str) -> None:
    heavy = ("torch", "transformers", "numba")
    assert run(f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_the_root_imports_in_under_a_tenth_of_a_second() -> None:
    took = min(
        float(run("import time; t = time.perf_counter(); import slackwater; print(time.perf_counter() - t)"))
        for _ in range(5)
    )
    assert took < 0.1
