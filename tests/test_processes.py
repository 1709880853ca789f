"""One reconstruction on several processes: the same result, the same files, and an end if a process ends."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from palimpsest.cli.main import main
from palimpsest.execution.processes import Processes
from several_processes import CASES

HERE = Path(__file__).parent
TRAIN = ["train", "--data", "faces", "--per-class", "2", "--hidden", "8", "--loss", "squared", "--steps", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of tests/several_processes.py, which runs once, whatever the number of pytest's workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "processes" / "killed.json").exists():
            make(shared / "processes")
    return shared / "processes"


def make(folder: Path) -> None:
    """Train into a run folder, and reconstruct on several processes."""
    folder.mkdir()
    assert main([*TRAIN, "--out", str(folder / "trained")]) == 0
    shutil.copytree(folder / "trained", folder / "run")
    script = [sys.executable, str(HERE / "several_processes.py"), str(folder)]
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | own


def same(a: object, b: object) -> bool:
    """Equal, and numbers to 1e-10."""
    if isinstance(a, torch.Tensor) and a.is_floating_point():
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == pytest.approx(b, rel=1e-10, abs=1e-10) if isinstance(a, float) else a == b


def loaded(folder: Path, name: str) -> dict:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_several_processes_find_what_one_finds(folder, case, world, rank):
    one, several = loaded(folder, f"{case}-1-0"), loaded(folder, f"{case}-{world}-{rank}")
    assert [name for name in one if not same(one[name], several[name])] == []


@pytest.mark.parametrize("case", [case for case in CASES if case != "path"])
def test_the_cases_split_and_merge(folder, case):
    rounds = [entry for entry in loaded(folder, f"{case}-1-0")["history"] if "split" in entry]
    assert sum(entry["split"] for entry in rounds) > 0
    assert sum(entry["merged"] for entry in rounds) > 0


@pytest.mark.parametrize(("kept_by", "world"), [(3, 1), (1, 2)])
def test_another_number_of_processes_resumes(folder, kept_by, world):
    uninterrupted = loaded(folder, "ntk-1-0")
    for rank in range(world):
        resumed = loaded(folder, f"resumed-{kept_by}-{world}-{rank}")
        assert [name for name in resumed if not same(uninterrupted[name], resumed[name])] == []


def test_only_the_first_process_writes(folder):
    assert {path.name for path in folder.glob("kept-by-*")} == {"kept-by-1-0", "kept-by-2-0", "kept-by-3-0"}
    assert not (folder / "nowhere").exists()


def test_a_killed_process_ends_the_others_and_the_run_can_be_resumed(folder):
    ended = json.loads((folder / "killed.json").read_text())
    assert ended["statuses"] == [1, -signal.SIGKILL, 1]
    assert ended["seconds"] < 10
    for rank in (0, 2):
        assert "Traceback" not in ended["said"][rank]
        assert sum("palimpsest:" in line for line in ended["said"][rank].splitlines()) == 1
    run = folder / "run"  # two processes went on in it
    assert "resumes at step" in (run / "log.txt").read_text()
    assert (run / "reconstruction.safetensors").exists()
    assert not (run / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(("ended", "by", "left"), [("process", signal.SIGKILL, 1), ("torchrun", signal.SIGTERM, 2)])
def test_torchrun_ends_what_is_left_and_its_state_is_kept(folder, tmp_path, ended, by, left):
    run = tmp_path / "run"
    shutil.copytree(folder / "trained", run)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "palimpsest"]
    arguments = ["reconstruct", str(run), "--steps", "100000", "--splitting", "without"]
    with (tmp_path / "said.txt").open("a") as said:  # appending, for three processes write to it
        torchrun = subprocess.Popen([*launcher, *arguments], env=environment(), stderr=said, stdout=said)
    try:
        while not list((run / "snapshots").glob("*.safetensors")):
            assert torchrun.poll() is None, (tmp_path / "said.txt").read_text()
            time.sleep(0.05)
        os.kill(torchrun.pid if ended == "torchrun" else process_with(rank=1, launcher=torchrun.pid), by)
        assert torchrun.wait(timeout=100) == 1  # torchrun takes its time to explain
    finally:
        torchrun.kill()
    said = (tmp_path / "said.txt").read_text()
    assert said.count("palimpsest: process") == left, said
    assert "SIGABRT" not in said
    assert (run / "checkpoint.safetensors").exists()


def process_with(rank: int, launcher: int) -> int:
    children = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return next(pid for pid in children if f"RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes())


def test_more_processes_than_candidates_are_refused():
    many = Processes()
    many.count = 4
    with pytest.raises(pal.errors.InvalidInputError, match="at most 3"):
        many.mine(torch.zeros(3))


def test_other_commands_are_refused_on_several_processes(monkeypatch, tmp_path, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([*TRAIN, "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()
    assert len(capsys.readouterr().err.splitlines()) == 1
