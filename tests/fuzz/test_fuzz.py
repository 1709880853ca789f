"""A short round of fuzzing, and proof that the long one would notice what it looks for."""

import os

import pytest
import run
from fuzz_seeds import CANARY
from fuzz_targets import Target

from palimpsest.errors import DataError


def test_no_spoilt_file_does_harm():
    """All hand-made files, and some hundred spoilt ones."""
    result = run.supervise(seed=7, count=350)
    assert result["failures"] == []
    total = {outcome: sum(t[outcome] for t in result["outcomes"].values()) for outcome in ("accepted", "refused")}
    assert sum(total.values()) == 350
    assert min(total.values()) > 20  # neither is everything refused, nor nothing


def out_of_memory(folder):
    try:
        raise MemoryError
    except MemoryError as error:
        raise DataError("the file is damaged") from error


def for_ever(folder):
    while True:
        pass


HARM = {
    "failed: Traceback": lambda folder: 1 / 0,
    "failed: hang": for_ever,
    "failed: code was run (os.system)": lambda folder: os.system("true"),
    "failed: code was run (os.putenv": lambda folder: os.environ.update({CANARY: "1"}),
    "failed: memory": out_of_memory,
    "accepted": lambda folder: (folder / "file").read_bytes(),
}


@pytest.mark.parametrize("outcome", HARM)
def test_harm_would_be_noticed(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 0.2)
    target = Target(file="file", read=HARM[outcome], sound=[b"sound"], nasty=[b"nasty"])
    result = run.Fuzzer(tmp_path, 0, {"a reader": target}).try_one(0)
    assert result["outcome"].startswith(outcome)


def test_memory_is_measured_for_each_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BYTES", 50_000_000)
    target = Target(file="file", read=lambda folder: bytearray(100_000_000).count(1), sound=[b""], nasty=[b"", b""])
    fuzzer = run.Fuzzer(tmp_path, 0, {"a reader": target})
    assert [fuzzer.try_one(i)["outcome"] for i in range(2)] == ["failed: memory"] * 2
