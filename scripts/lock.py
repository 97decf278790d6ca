"""Write requirements.lock from requirements.in: every package pinned, nothing from this machine in it.

Run with an interpreter that has pip-tools. torch's local version label is cut off: which build of it is installed, for
CPU or CUDA, is the installing machine's matter, and so are the CUDA build's own dependencies.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# Written by `make lock` from requirements.in: every package that is tested together, pinned.\n"
EXTRA = ["setuptools==80.9.0         # via torch"]


def main() -> None:
    """Resolve, strip local version labels and comments of the tool, write."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "lock.txt"
        command = [sys.executable, "-m", "piptools", "compile", "--quiet", "--no-header", "--no-emit-index-url"]
        command += ["--no-emit-find-links", "--no-emit-trusted-host", "--strip-extras", "--annotation-style=line"]
        subprocess.run([*command, "-o", str(made), "requirements.in"], check=True)
        lines = [line for line in made.read_text().splitlines() if re.match(r"[a-z0-9]", line, re.IGNORECASE)]
    lines = [re.sub(r"^(torch==[\d.]+)\+cpu", r"\1    ", line) for line in lines]
    Path("requirements.lock").write_text(HEADER + "\n".join(sorted(lines + EXTRA, key=str.lower)) + "\n")


if __name__ == "__main__":
    main()
