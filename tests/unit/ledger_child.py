"""Processes that write to ledgers, each killed at another statement: ``python ledger_child.py FOLDER``.

The n-th has its ledger in ``n.sqlite`` and is killed at its n-th statement. In ``n.said`` it says what the ledger had
taken by then. The first that comes to its end is the last.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path

from slackwater.hotload.ledger import SqliteLedger
from slackwater.testing.conformance_ledger import RUN, ended, event, operation

ROUNDS = 3
WHOLE = "whole"


def write(folder: Path, statements: int) -> None:
    """Open a ledger and write to it; be killed at statement number ``statements``."""
    ledger = SqliteLedger(folder / f"{statements}.sqlite", RUN)
    left = count(1)

    def killed(statement: str) -> None:
        del statement
        if next(left) == statements:
            os.kill(os.getpid(), signal.SIGKILL)

    with (folder / f"{statements}.said").open("w", buffering=1) as said:
        ledger._connection.set_trace_callback(killed)
        for number in range(ROUNDS):
            ledger.save(operation(number))
            said.write(f"begun {number}\n")
            ledger.note(event(number))
            ledger.save(ended(number), operation(number + 100))
            said.write(f"ended {number}\n")
        said.write(f"{WHOLE}\n")


def main(folder: Path) -> None:
    """Fork one after the other."""
    for statements in count(1):
        child = os.fork()
        if child == 0:
            write(folder, statements)
            os._exit(0)
        os.waitpid(child, 0)
        if WHOLE in (folder / f"{statements}.said").read_text():
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
