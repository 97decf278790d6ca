"""Importing the root is free of heavy libraries and quick."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "obstore", "starlette", "aiohttp", "numpy", "matplotlib", "uvicorn")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_root_imports_nothing_heavy() -> None:
    loaded = run(f"import sys, slackwater; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_the_command_line_answers_without_torch() -> None:
    loaded = run("import sys, slackwater.cli.main; print([n for n in ('torch', 'transformers') if n in sys.modules])")
    assert loaded == "[]"


def test_the_root_imports_in_under_a_tenth_of_a_second() -> None:
    took = min(
        float(run("import time; t = time.perf_counter(); import slackwater; print(time.perf_counter() - t)"))
        for _ in range(5)
    )
    assert took < 0.1
