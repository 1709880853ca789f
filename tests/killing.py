"""Kills an audit with SIGKILL between its writes until it is done, and compares its report with one never killed.

python tests/killing.py 50        prints one line for each audit; exit status 0 if the reports are equal

The audit kills itself when it is about to open, replace or delete a file, so that the moments of death depend on what
it has done and not on the speed of the machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TESTS = Path(__file__).parent
QUICK = "--samples 4 --candidates 6 --steps 30 --restarts 2 --tangents 1 --control-steps 20 --minutes 60".split()


class Moment(NamedTuple):
    """When to die: at the given file operation, counted from the first one at which a file of the audit exists."""

    file: str
    operation: int = 1


MORTAL = """
import os, signal, sys
folder, last, left = *sys.argv[1:3], int(sys.argv[3])

def watch(event, arguments):
    global left
    operation = event in ("os.rename", "os.remove") or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    if operation and str(arguments[0]).startswith(folder) and os.path.exists(os.path.join(folder, last)):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from palimpsest.cli import main
sys.exit(main(["audit", "--out", folder, *sys.argv[4:]]))
"""


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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kills, moment in enumerate([*moments, Moment("", 0)]):
        command = [sys.executable, "-c", MORTAL, str(out), *map(str, moment), *arguments]
        run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, check=False)
        if run.returncode == 0:
            return kills
        if run.returncode != -signal.SIGKILL:
            break
    raise RuntimeError(f"after {kills} kills: {run.stderr.decode()}")


def main(kills: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, choose, total, run = Path(name), random.Random(0), 0, 0
        arguments, whole = prepared(folder), folder / "whole"
        killed(arguments, whole, [])
        files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
        while total < kills:
            out = folder / f"torn-{run}"
            moments = [Moment(choose.choice(files), choose.randint(1, 8)) for _ in range(min(10, kills - total))]
            total += killed(arguments, out, moments)
            equal = (out / "report.html").read_bytes() == (whole / "report.html").read_bytes()
            run += 1
            print(f"{total} kills so far; the report of run {run} is {'the same' if equal else 'ANOTHER'}", flush=True)
            if not equal:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
