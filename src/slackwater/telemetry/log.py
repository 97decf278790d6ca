"""One line per event on standard error, with process and module, in UTC."""

import logging
import sys
import time


def configure(process: str, *, verbose: bool = False) -> None:
    """Send this process's logs to standard error. Called once, by the command line.

    Args:
        process: Name that each line carries, such as ``replica-0``.
        verbose: Also show debug lines of Slackwater's own modules.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stamina").setLevel(logging.ERROR)  # what is tried again, and why, we say ourselves
    logging.getLogger("slackwater").setLevel(logging.DEBUG if verbose else logging.INFO)
