"""Palimpsest's readers of files, each with sound files, nasty ones and the ways to spoil them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import fuzz_mutations as by
import fuzz_seeds as seeds
import torch

import palimpsest as pal
from palimpsest import datasets
from palimpsest.methods import optimiser_states
from palimpsest.objectives.spaces import Everywhere
from palimpsest.runs import folder as runs
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions, reconstruct
from palimpsest.runs.report import report
from palimpsest.runs.train import TrainedRun, TrainOptions, train
from palimpsest.solver.callbacks import Checkpoint
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings
from palimpsest.solver.state import State

CPU = torch.device("cpu")
SEALED = [by.sealed(by.safetensors_header), by.sealed(by.blindly)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file in a folder, and how it is read.

    Args:
        file: its path in the folder.
        read: reads the folder, as a user's command would.
        prepare: fills the folder with all else that is needed.
        sound: contents of the file to begin with.
        nasty: contents that are tried as they are.
        ways: mutations that know the format, beside the blind ones.
        share: how often it is tried, relative to the others; less where reading takes long.
    """

    file: str
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None
    sound: Sequence[bytes]
    nasty: Sequence[bytes] = ()
    ways: Sequence[by.Mutation] = ()
    share: float = 1.0

    def spoilt(self, rng: Random) -> bytes:
        mutation = rng.choice((by.blindly, *self.ways, *self.ways))
        data = mutation(rng.choice(self.sound), rng)
        return by.blindly(data, rng) if rng.random() < 0.1 else data


def targets(folder: Path) -> dict[str, Target]:
    """All of them; the folder is for the sound files they begin with."""
    return of_data() | of_weights() | of_states(folder) | of_runs(folder / "run")


# --- data sets -------------------------------------------------------------------------------------------

IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def of_data() -> dict[str, Target]:
    few = {"per_class": 1, "held_out_per_class": 1}

    def known(name: str) -> Callable[[Path], object]:
        return lambda folder: datasets.load(name, data_root=folder, **few)

    def own(name: str) -> Callable[[Path], object]:
        return lambda folder: datasets.load(folder / name, **few)

    def beside(name: str, content: bytes) -> Callable[[Path], object]:
        return lambda folder: (folder / name).write_bytes(content)

    idx = {"read": known("mnist"), "nasty": seeds.IDX_NASTY, "ways": [by.idx_dimensions]}
    packed = [by.inside_gzip(by.blindly), by.inside_gzip(by.idx_dimensions)]
    with_labels, with_images = beside(LABELS, seeds.IDX_LABELS), beside(IMAGES, seeds.IDX_IMAGES)
    pngs = [seeds.picture("PNG", mode) for mode in ("RGB", "L", "RGBA")]
    jpegs = [seeds.picture("JPEG", mode) for mode in ("RGB", "L")]
    return {
        "idx images": Target(file=IMAGES, prepare=with_labels, sound=[seeds.IDX_IMAGES], **idx),
        "idx labels": Target(file=LABELS, prepare=with_images, sound=[seeds.IDX_LABELS], **idx),
        "idx gzipped": Target(
            file=f"{IMAGES}.gz", prepare=with_labels, sound=[gzip.compress(seeds.IDX_IMAGES)], read=known("mnist"),
            nasty=seeds.GZIP_NASTY, ways=packed,
        ),
        "cifar batch": Target(file="data_batch_1.bin", read=known("cifar10"), sound=[seeds.BATCH], nasty=[b""]),
        "cifar archive": Target(
            file="cifar-10-binary.tar.gz", read=known("cifar10"), sound=[seeds.ARCHIVE], nasty=seeds.ARCHIVE_NASTY,
            ways=packed[:1], share=0.1,
        ),
        "npz": Target(
            file="own.npz", read=own("own.npz"), sound=[seeds.NPZ], nasty=seeds.NPZ_NASTY,
            ways=[by.zip_directory, by.zip_member(by.blindly), by.zip_member(by.npy_header)],
        ),
        "png": Target(
            file="own/a/1.png", prepare=two_classes, read=own("own"), sound=pngs, nasty=seeds.PNG_NASTY,
            ways=[by.png_chunk],
        ),
        "jpeg": Target(
            file="own/a/1.jpg", prepare=two_classes, read=own("own"), sound=jpegs, nasty=seeds.PNG_NASTY[:2]
        ),
    }  # fmt: skip


def two_classes(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "own" / name).mkdir(parents=True)
        for i in range(2):
            (folder / "own" / name / f"{i}.png").write_bytes(seeds.picture("PNG"))


# --- weights and states ----------------------------------------------------------------------------------


def of_weights() -> dict[str, Target]:
    def fitted(name: str) -> Callable[[Path], object]:
        return lambda folder: pal.weights.fit_into(network(), pal.weights.load(folder / name))

    def resumed(folder: Path) -> object:
        found = pal.weights.find(folder / "last.ckpt")
        return None if found.optimiser is None else optimiser_states.match(network(), found.optimiser)

    def shards(folder: Path) -> None:
        (folder / "model-00001-of-00001.safetensors").write_bytes(seeds.WEIGHTS)

    inside = [by.zip_member(way) for way in (by.blindly, by.pickle_number, by.pickle_name)]
    archives = [seeds.TORCH, seeds.torch_archive(seeds.tensors())]
    return {
        "weights, safetensors": Target(
            file="net.safetensors", read=fitted("net.safetensors"), sound=[seeds.WEIGHTS],
            nasty=seeds.SAFETENSORS_NASTY, ways=[by.safetensors_header],
        ),
        "weights, pt": Target(
            file="net.pt", read=fitted("net.pt"), sound=archives, nasty=seeds.TORCH_NASTY,
            ways=[by.zip_directory, *inside],
        ),
        "weights, index": Target(
            file="model.safetensors.index.json", prepare=shards, read=fitted("model.safetensors.index.json"),
            sound=[seeds.INDEX], nasty=seeds.INDEX_NASTY, ways=[by.json_text],
        ),
        "training checkpoint": Target(file="last.ckpt", read=resumed, sound=[seeds.CHECKPOINT], ways=inside),
    }  # fmt: skip


def network() -> torch.nn.Module:
    """Has the names of the seeds' tensors."""
    counter = torch.nn.Module()
    counter.register_buffer("num_batches_tracked", torch.tensor(0))
    return torch.nn.ModuleList([torch.nn.Linear(4, 3), counter])


def of_states(folder: Path) -> dict[str, Target]:
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP((1, 2, 2), (3,)))
    settings = Settings(candidates=2, steps=8, splitting=pal.Splitting(rounds=1))
    solver = Solver(objective, Everywhere((1, 2, 2)), settings)
    fingerprint, states = solver.fingerprint(), [solver.init()]
    while not solver.done(states[-1]):
        states.append(solver.step(states[-1]))

    def saved(state: State) -> bytes:
        state.save(folder / "state", fingerprint)
        return (folder / "state").read_bytes()

    def resumed(folder: Path) -> object:
        state = Checkpoint(folder / "checkpoint.safetensors", fingerprint).saved(states[0]) or states[0]
        return state if solver.done(state) else solver.step(state)

    return {
        "state": Target(
            file="checkpoint.safetensors", read=resumed, sound=[saved(states[i]) for i in (0, 3, -1)],
            nasty=seeds.SAFETENSORS_NASTY, ways=SEALED,
        )
    }  # fmt: skip


# --- the run folder ----------------------------------------------------------------------------------------


def of_runs(made: Path) -> dict[str, Target]:
    if not made.exists():
        make_run(made)

    def target(file: str, read: Callable[[Path], object], *, share: float = 1.0, harmless: bool = False) -> Target:
        in_json = file.endswith(".json")
        return Target(
            file=file,
            read=read,
            prepare=lambda folder: shutil.copytree(made, folder, dirs_exist_ok=True),
            sound=[(made / file).read_bytes()],
            nasty=() if harmless else seeds.JSON_NASTY if in_json else seeds.SAFETENSORS_NASTY,
            ways=[by.sealed(by.json_text)] if in_json else SEALED,
            share=share,
        )

    def of_network(folder: Path) -> object:
        run = RunFolder(folder)
        return TrainedRun.read(run).model_and_start(run)

    def reported(folder: Path) -> object:
        return report(RunFolder(folder))

    reconstruction, snapshot = "reconstruction.safetensors", "snapshots/with-00000008.safetensors"
    return {
        "config": target("config.json", of_network),
        "run weights": target("model.safetensors", of_network),
        "reconstruction": target(reconstruction, lambda folder: RunFolder(folder).variants()),
        "snapshot": target(snapshot, lambda folder: runs._snapshot(folder / snapshot, None)),
        "report of config": target("config.json", reported, share=0.02, harmless=True),
        "report of reconstruction": target(reconstruction, reported, share=0.02, harmless=True),
        "report of snapshot": target(snapshot, reported, share=0.01, harmless=True),
    }


def make_run(path: Path) -> None:
    """A run folder as the commands make it, on the least that they take."""
    with RunFolder(path).locked(create=True) as run:
        train(run, TrainOptions(data="digits", per_class=2, hidden=(3,), steps=2), device=CPU)
        reconstruct(run, ReconstructOptions(candidates=2, steps=16, rounds=1), device=CPU, progress=False)
        report(run)
