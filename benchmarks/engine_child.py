"""One engine in a process of its own: carries loads, writes what its readers saw. Standard library alone.

`engine_child.py DRIVER JOB OUT`: JOB is a JSON file with ``folder``, ``settings`` and ``loads``; OUT becomes a JSON
list of `engine_load.Figures`, one for each load.
"""

import asyncio
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Last, so that no module of a peer is hidden by one of the benchmarks'.
sys.path.append(str(Path(__file__).parent))

from engine_load import Driver, Figures, Load, run


async def _carry(driver: Driver, loads: list[Load]) -> list[Figures]:
    try:
        return [await run(driver, load) for load in loads]
    finally:
        await driver.end()


def main() -> None:
    """Do the job."""
    name, job_file, out = sys.argv[1:]
    job: dict[str, Any] = json.loads(Path(job_file).read_text("utf-8"))
    module = importlib.import_module(f"engine_{name}")
    driver: Driver = module.driver(Path(job["folder"]), job["settings"])
    found = asyncio.run(_carry(driver, [Load(**load) for load in job["loads"]]))
    Path(out).write_text(json.dumps([asdict(figures) for figures in found]), "utf-8")


if __name__ == "__main__":
    main()
