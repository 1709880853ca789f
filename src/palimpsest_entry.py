"""The console script. It lies outside the package, because importing that takes seconds in which Ctrl-C may come."""

import os
import signal
import sys
import time


def main() -> int:
    """Import and run the command line. Ctrl-C before that ends in one sentence, without a traceback."""
    began, before = time.monotonic(), signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it may be ignored, as it is under nohup
        signal.signal(signal.SIGINT, _leave)
    from palimpsest.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    return run(began=began)


def _leave(*_: object) -> None:
    """Leave at once: an exception raised inside a half-imported extension may turn into any other."""
    os.write(2, b"palimpsest: interrupted before anything was begun\n")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
