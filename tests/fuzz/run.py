"""Feed spoilt files to every reader: each must load, or be refused by one of Palimpsest's own errors.

A worker process reads the files and says after each how it went; this process watches it. Counted as failures: any
other exception, the death of the worker, more than 5 seconds of processor time or 1 GB of memory for one file, a
quarter of an hour of silence, and code in a file that was run. Every input follows from the seed and its number, so
that `--only NUMBER` repeats one.

    python tests/fuzz/run.py --count 200000 --out docs/results/fuzzing.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from fuzz_seeds import CANARY
from fuzz_targets import Target, targets

from palimpsest.errors import PalimpsestError

SECONDS, BYTES = 5.0, 1 << 30
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
             "os.putenv", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip
PATIENCE = 900  # seconds of silence that mean a hang beyond the worker's own alarm, however busy the machine is


class Hang(BaseException):
    """The alarm went off."""


class Fuzzer:
    """Makes input after input and reads each."""

    def __init__(self, folder: Path, seed: int, targets: dict[str, Target]) -> None:
        self.folder, self.seed, self.targets = folder, seed, targets
        self.nasty = [(name, content) for name, target in self.targets.items() for content in target.nasty]
        self.prepared: dict[str, Path] = {}
        self.executed: list[str] = []
        self.watching = False
        sys.addaudithook(self._hear)
        signal.signal(signal.SIGPROF, self._alarm)

    def input(self, number: int) -> tuple[str, bytes]:
        """The hand-made files first, then spoilt ones without end."""
        if number < len(self.nasty):
            return self.nasty[number]
        rng = Random(f"{self.seed}/{number}")
        name = rng.choices(list(self.targets), [target.share for target in self.targets.values()])[0]
        return name, self.targets[name].spoilt(rng)

    def try_one(self, number: int) -> dict:
        """How one input went."""
        name, content = self.input(number)
        target, folder = self.targets[name], self._place(name)
        (folder / target.file).write_bytes(content)
        before, began = _forget_peak(), time.process_time()
        outcome = self._read(target, folder)
        seconds, taken = time.process_time() - began, _status("VmHWM") - before
        outcome = "failed: memory" if taken > BYTES else outcome
        return {"number": number, "target": name, "seconds": seconds, "bytes": taken, "outcome": outcome}

    def _read(self, target: Target, folder: Path) -> str:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        self.watching = True
        try:
            target.read(folder)
            outcome = "accepted"
        except PalimpsestError as error:
            outcome = "failed: memory" if _ran_out(error) else "refused"
        except Hang:
            outcome = "failed: hang"
        except BaseException:
            outcome = f"failed: {traceback.format_exc(limit=-3)}"
        finally:
            self.watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        executed, self.executed = [*self.executed, *filter(None, [os.environ.pop(CANARY, None)])], []
        return f"failed: code was run ({', '.join(executed)})" if executed else outcome

    def _place(self, name: str) -> Path:
        if name not in self.prepared:
            place = self.folder / f"of {name}"
            place.mkdir(exist_ok=True)
            if not any(place.iterdir()):
                self.targets[name].prepare(place)
            self.prepared[name] = place
        return self.prepared[name]

    def _hear(self, event: str, arguments: object) -> None:
        if self.watching and event in FORBIDDEN:
            self.executed.append(event)

    def _alarm(self, *_: object) -> None:
        raise Hang


def _forget_peak() -> int:
    """Bytes of memory in use; their peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def _ran_out(error: BaseException | None) -> bool:
    """Whether a refusal was in truth a failure to allocate: a limit that was hit, not seen."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def work(folder: Path, seed: int, numbers: range) -> None:
    """Be the worker: one line for each input."""
    fuzzer = Fuzzer(folder, seed, targets(folder))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2 * BYTES, resource.RLIM_INFINITY))
    for number in numbers:
        print(json.dumps({"begins": number}), flush=True)
        print(json.dumps(fuzzer.try_one(number)), flush=True)


@contextmanager
def _worker(folder: Path, seed: int, numbers: range) -> Iterator[subprocess.Popen]:
    options = {"--seed": seed, "--from": numbers.start, "--count": numbers.stop, "--work-in": folder}
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        __file__,
        *(str(word) for pair in options.items() for word in pair),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Tally:
    """What became of the inputs so far."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0
        self.failures: list[dict] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.slowest, self.most = 0.0, 0

    def add(self, result: dict) -> None:
        self.done = result["number"] + 1
        outcome = result["outcome"].partition(":")[0]
        self.outcomes[result["target"], outcome] += 1
        self.slowest, self.most = max(self.slowest, result["seconds"]), max(self.most, result["bytes"])
        if outcome == "failed":
            self.failures.append(result)
            print(f"{result['number']} {result['target']}: {result['outcome']}", file=sys.stderr, flush=True)
        if self.done % 5000 == 0:
            print(f"{self.done} of {self.count}, {len(self.failures)} failures", file=sys.stderr, flush=True)

    def add_death(self, number: int, status: int | None) -> None:
        how = "the worker hung" if status is None else f"the worker died with status {status}"
        self.add({"number": number, "target": "?", "seconds": 0.0, "bytes": 0, "outcome": f"failed: {how}"})

    def result(self) -> dict:
        names = sorted({name for name, _ in self.outcomes})
        return {
            "inputs": self.count,
            "failures": self.failures,
            "longest seconds": round(self.slowest, 2),
            "most memory taken by one input, MB": round(self.most / 1e6),
            "outcomes": {n: {o: self.outcomes[n, o] for o in ("accepted", "refused", "failed")} for n in names},
        }


def _status_of(process: subprocess.Popen) -> int | None:
    """How a worker ended; None if it did not."""
    try:
        return process.wait(2.0)
    except subprocess.TimeoutExpired:
        return None


def supervise(seed: int, count: int) -> dict:
    """Run workers until all inputs were tried; one that dies or hangs is a failure, and the next goes on behind it."""
    tally = Tally(count)
    with tempfile.TemporaryDirectory() as folder:
        while tally.done < count:
            begun = None
            with _worker(Path(folder), seed, range(tally.done, count)) as process:
                for line in _lines(process):
                    result = json.loads(line)
                    begun = result.get("begins", begun)
                    if "outcome" in result:
                        tally.add(result)
                status = _status_of(process)
            if begun is None:
                raise SystemExit("the worker does not start; see above")
            if tally.done < count:
                tally.add_death(begun, status)
    return tally.result()


def _lines(process: subprocess.Popen) -> Iterator[bytes]:
    """What a worker says, until it falls silent; before its first word it has to import and prepare everything."""
    assert process.stdout is not None
    handle, rest = process.stdout.fileno(), b""
    while _heard(handle) and (piece := os.read(handle, 1 << 16)):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _heard(handle: int) -> bool:
    """Whether there is something to read in good time, counted in seconds during which this process was awake."""
    return any(select.select([handle], [], [], 1.0)[0] for _ in range(PATIENCE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one input, and show what happens")
    parser.add_argument("--out", type=Path, help="where to write the result")
    parser.add_argument("--from", type=int, default=0, dest="start", help=argparse.SUPPRESS)
    parser.add_argument("--work-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work_in:
        work(options.work_in, options.seed, range(options.start, options.count))
        return 0
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(Fuzzer(Path(folder), options.seed, targets(Path(folder))).try_one(options.only))
        return 0
    began = time.monotonic()
    result = supervise(options.seed, options.count)
    command = f"python tests/fuzz/run.py --count {options.count} --seed {options.seed}"
    result = {"command": command, "python": platform.python_version()} | result
    result["seconds"] = round(time.monotonic() - began)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return bool(result["failures"])


if __name__ == "__main__":
    sys.exit(main())
