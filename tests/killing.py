"""Kills an audit with SIGKILL at random moments until it is done, and compares its report with one never killed.

python tests/killing.py 50        prints one line for each kill; exit status 0 if the reports are equal
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
QUICK = "--samples 4 --candidates 6 --steps 30 --restarts 2 --tangents 1 --control-steps 20 --minutes 60".split()


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


def start(arguments: list[str], out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "palimpsest.cli", "audit", "--out", str(out), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def killed(arguments: list[str], out: Path, kills: int, *, longest: float, seed: int = 0) -> int:
    """Run an audit to its end through so many kills, each within so many seconds; how many there were."""
    moments, done = random.Random(seed), 0
    while True:
        process = start(arguments, out)
        if done < kills:
            try:
                process.wait(timeout=moments.uniform(0.0, longest))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        _, complaint = process.communicate()
        if process.returncode == -signal.SIGKILL:
            done += 1
        elif process.returncode == 0:
            return done
        else:
            raise RuntimeError(f"after {done} kills: {complaint.decode()}")


def main(kills: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = prepared(folder)
        began = time.monotonic()
        if killed(arguments, folder / "whole" / "audit", 0, longest=0.0):
            raise AssertionError("no kill was asked for")
        whole, total, run = time.monotonic() - began, 0, 0
        expected = (folder / "whole" / "audit" / "report.html").read_bytes()
        while total < kills:
            out = folder / f"torn-{run}" / "audit"
            total += killed(arguments, out, kills - total, longest=whole, seed=run)
            equal = (out / "report.html").read_bytes() == expected
            print(
                f"{total} kills so far; the report of run {run + 1} is {'the same' if equal else 'ANOTHER'}", flush=True
            )
            if not equal:
                return 1
            run += 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
