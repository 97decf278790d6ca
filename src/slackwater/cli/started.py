"""How long this process has lived, its interpreter's start included."""

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()


def seconds_since_start() -> float:
    """Seconds since the process began; where the system doesn't tell, since this module was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
    return up - ticks / os.sysconf("SC_CLK_TCK")
