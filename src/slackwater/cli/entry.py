"""Where the ``slackwater`` command begins: Ctrl-C ends it without a word while it still imports."""

import signal


def run() -> None:
    """Run `slackwater.cli.main.main`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slackwater.cli.main import main  # noqa: PLC0415 - the handler must be in place before this takes its time

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
