"""Kills an audit with SIGKILL between its writes until it is done, and compares its report with one never killed.

python tests/killing.py 50        prints one line for each audit; exit status 0 if the reports are equal

The process strikes itself when it is about to open, replace or delete a file, so that the moment depends on what it has
done and not on the speed of the machine.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import palimpsest_entry

TESTS = Path(__file__).parent
QUICK = "--samples 4 --candidates 6 --steps 30 --restarts 2 --tangents 1 --control-steps 20 --minutes 60".split()


class Moment(NamedTuple):
    """When a process is struck: at this file operation in its folder, counted from when a file of that name exists."""

    file: str
    operation: int = 1


STRUCK = """
import os, runpy, signal, sys
folder, file, left, number = *sys.argv[1:3], *map(int, sys.argv[3:5])

def watch(event, arguments):
    global left
    operation = event in ("os.rename", "os.remove") or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    if operation and str(arguments[0]).startswith(folder) and os.path.exists(os.path.join(folder, file)):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)

sys.addaudithook(watch)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here, as it is under nohup
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COMMAND_LINE = palimpsest_entry.__file__
NEVER = Moment("", 0)


def struck(
    words: list[str | Path], folder: Path, moment: Moment, number: int = signal.SIGKILL
) -> subprocess.CompletedProcess:
    """Run a script, with its arguments, that works in a folder, and send it a signal at a moment."""
    command = [sys.executable, "-c", STRUCK, str(folder), *map(str, moment), str(int(number)), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # sums in one order
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)


def prepared(folder: Path) -> list[str]:
    """Train a network that is to be audited; the arguments of its audit, but for the folder."""
    import palimpsest as pal

    data = pal.datasets.load("digits", per_class=2, seed=0)
    np.savez(
        folder / "digits.npz", images=data.train.images.numpy(), labels=(data.train.labels > 0).numpy().astype(int)
    )
    command = [sys.executable, str(TESTS / "outsider.py"), "convolutional", str(folder / "digits.npz"), str(folder)]
    subprocess.run(command, check=True)
    network = ["--network", f"{TESTS / 'outsider.py'}:convolutional", "--shape", "1,8,8"]
    return [*network, "--weights", str(folder / "final.pt"), "--initial", str(folder / "start.pt"), *QUICK]


def killed(arguments: list[str], out: Path, moments: Iterable[Moment]) -> int:
    """Run an audit to its end, killed at one moment after the other; the number of kills."""
    for kills, moment in enumerate([*moments, NEVER]):
        run = struck([COMMAND_LINE, "audit", "--out", out, *arguments], out, moment)
        if run.returncode == 0:
            return kills
        if run.returncode != -signal.SIGKILL:
            break
    raise RuntimeError(f"after {kills} kills: {run.stderr}")


def report(out: Path) -> bytes:
    """The report without the times that the restarts took."""
    return re.sub(rb"<time>.*?</time>", b"", (out / "report.html").read_bytes())


def main(kills: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, choose, total, run = Path(name), random.Random(0), 0, 0
        arguments, whole = prepared(folder), folder / "whole" / "audit"
        killed(arguments, whole, [])
        files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
        while total < kills:
            out = folder / f"torn-{run}" / "audit"  # of the same name, which the report shows
            moments = [Moment(choose.choice(files), choose.randint(1, 8)) for _ in range(min(10, kills - total))]
            total += killed(arguments, out, moments)
            equal = report(out) == report(whole)
            run += 1
            print(f"{total} kills so far; the report of run {run} is {'the same' if equal else 'ANOTHER'}", flush=True)
            if not equal:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
