"""A package and a home that nobody may write to: kernels are compiled in memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import slackwater


def test_without_a_place_for_machine_code_it_is_compiled_in_memory(tmp_path: Path) -> None:
    package = Path(slackwater.__file__).parent
    shutil.copytree(package, tmp_path / "lib" / "slackwater", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"  # what numba finds where nothing can be written
        "from slackwater.checkpoint.warm import warm_kernels\n"
        "warm_kernels(['U8'])\n"
        "print('warm')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "warm\n"), ran.stderr
