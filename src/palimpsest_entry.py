"""The console script. It is no part of the package, for importing that takes seconds in which Ctrl-C may be pressed."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Import and run the command line; a Ctrl-C on the way there ends in one sentence, not in a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is somebody's wish to ignore it
        signal.signal(signal.SIGINT, _leave)
        from palimpsest.cli.commands import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from palimpsest.cli.commands import main as run
    return run()


def _leave(*_: object) -> None:
    """At once: an exception raised inside a half-imported extension may come out as anything."""
    os.write(2, b"palimpsest: interrupted before anything was begun\n")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
