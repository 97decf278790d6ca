"""Where the ``slackwater`` command begins: Ctrl-C ends it without a word while it still imports."""

import signal
import sys
from io import TextIOWrapper


def run() -> None:
    """Run `slackwater.cli.main.main`. A terminal that lacks a character gets its number instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slackwater.cli.main import main  # noqa: PLC0415 - the handler must be in place before this takes its time

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
