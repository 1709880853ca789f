"""Reconstructions on 1, 2 and 3 gloo processes, for tests/test_processes.py, which compares them.

    python tests/several_processes.py FOLDER

It imports torch once and forks every process. Each writes the results of its cases into the folder.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import palimpsest as pal
from cases import SmallCNN
from palimpsest.cli.main import main
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings

SHAPE = (1, 6, 6)
SEVERAL = {"steps": 60, "record_every": 5, "splitting": pal.Splitting(rounds=2), "merging": pal.Merging(alike=0.4)}
KEPT_AT = 20  # the step at which a case keeps its state


def perceptron() -> torch.nn.Module:
    return pal.networks.MLP(SHAPE, (20, 10))


def trained(make: Callable[[], torch.nn.Module], loss: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    images, labels = torch.rand(4, *SHAPE, dtype=torch.float64) - 0.5, torch.tensor([1, -1, 1, -1])
    fit = pal.train(make().double(), images, labels, loss=loss, steps=50)
    return fit.model, fit.initial


def within() -> pal.Subspace:
    basis = torch.linalg.qr(torch.randn(36, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0].T
    return pal.Subspace(torch.zeros(SHAPE, dtype=torch.float64), basis.reshape(6, *SHAPE))


def problem(case: str) -> tuple[pal.NTK | pal.KKT | pal.Path, dict]:
    """The objective and the settings of a case."""
    if case == "kkt":
        return pal.KKT(trained(perceptron, "logistic")[0]), {"candidates": 8, **SEVERAL}
    model, initial = trained((lambda: SmallCNN(1)) if case == "convolutional" else perceptron, "squared")
    if case == "path":
        middle = {name: (t + initial[name]) / 2 for name, t in model.state_dict().items()}
        return pal.Path(model, [initial, middle, model.state_dict()]), {"candidates": 7, "steps": 20}
    objective = pal.NTK(model, initial, at=(0.2, 0.8) if case == "ntk" else 0.5)
    if case == "subspace, in chunks":
        return objective, {"candidates": 7, "within": within(), **SEVERAL}
    return objective, {"candidates": 7, **SEVERAL}


CASES = ("ntk", "kkt", "convolutional", "subspace, in chunks", "path")


class Keep(pal.Callback):
    """Saves the state at a step as a checkpoint does."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint

    def on_record(self, state, entry):
        if state.step == KEPT_AT and "loss" in entry:
            state.save(self.path, self.fingerprint)


def reconstruct(case: str, group: dist.ProcessGroup | None, **options) -> pal.Reconstruction:
    objective, settings = problem(case)
    execution = pal.Execution(memory=1e-9 if "chunks" in case else None, processes=group)
    return pal.reconstruct(objective, image_shape=SHAPE, progress=False, execution=execution, **settings, **options)


def fingerprint(case: str) -> str:
    objective, settings = problem(case)
    return Solver(objective, Everywhere(SHAPE), Settings(**settings)).fingerprint()


def found(rec: pal.Reconstruction) -> dict:
    names = ("images", "multipliers", "labels", "ids", "parents", "lineage", "history", "loss")
    return {name: getattr(rec, name) for name in names}


def work(folder: Path, rank: int, world: int) -> None:
    """Every case; that of the kept state goes on from it on another number of processes."""
    group = dist.group.WORLD if world > 1 else None
    for case in CASES:
        keep = Keep(folder / f"kept-by-{world}-{rank}", fingerprint(case)) if case == "ntk" else pal.Callback()
        rec = reconstruct(case, group, callbacks=[keep])
        certificate = {} if "chunks" in case else vars(rec.certify(iterations=8))
        torch.save(found(rec) | {"certificate": certificate}, folder / f"{case}-{world}-{rank}.pt")


def resume(folder: Path, rank: int, world: int, kept_by: int) -> None:
    group, path = dist.group.WORLD if world > 1 else None, folder / f"resumed-{kept_by}-{world}"
    if rank == 0:  # the others need not see the file
        path.write_bytes((folder / f"kept-by-{kept_by}-0").read_bytes())
    rec = reconstruct("ntk", group, checkpoint=path if rank == 0 else folder / "nowhere")
    torch.save(found(rec), folder / f"resumed-{kept_by}-{world}-{rank}.pt")


def fork(task: Callable[..., object], *arguments: object, rank: int, world: int, port: int) -> int:
    """Run a task in a new process. Its status is 0 unless it fails or says otherwise."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        torch.set_num_threads(1)
        if task is not command and world > 1:
            dist.init_process_group("gloo")
        status = task(*arguments) or 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def group_of(world: int, task: Callable[..., object], *arguments: object) -> list[int]:
    """Run a task in a new group of processes. Its arguments are the folder, the rank, the world and these."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"world": world, "port": port}
    return [fork(task, arguments[0], rank, world, *arguments[1:], rank=rank, **place) for rank in range(world)]


def command(folder: Path, rank: int, world: int, *arguments: str) -> int:
    """A command, as torchrun would start it."""
    with (folder / f"stderr-{rank}.txt").open("w") as errors:
        os.dup2(errors.fileno(), 2)
        return main([*arguments])


def killed(folder: Path) -> None:
    """Three processes reconstruct from the run folder in this one; the second is killed on the way, and two go on."""
    reconstruct = ("reconstruct", str(folder / "run"), "--candidates", "6", "--steps", "2000", "--splitting", "without")
    started = group_of(3, command, folder, *reconstruct)
    while len(list((folder / "run" / "snapshots").glob("*.safetensors"))) < 2:
        time.sleep(0.05)
    os.kill(started[1], signal.SIGKILL)
    at = time.monotonic()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    result = {"statuses": statuses, "seconds": time.monotonic() - at}
    result["said"] = [(folder / f"stderr-{rank}.txt").read_text() for rank in range(3)]
    (folder / "killed.json").write_text(json.dumps(result))
    finished(group_of(2, command, folder, *reconstruct))


def finished(pids: list[int]) -> None:
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"{len(failed)} of {len(pids)} processes failed")


if __name__ == "__main__":
    here = Path(sys.argv[1])
    torch.set_num_threads(1)
    work(here, 0, 1)  # before the others are forked: they find all libraries loaded
    finished(group_of(3, work, here) + group_of(2, work, here))
    resume(here, 0, 1, kept_by=3)
    finished(group_of(2, resume, here, 1))
    killed(here)
