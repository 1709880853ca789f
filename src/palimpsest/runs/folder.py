"""The run folder: one directory that holds everything about a run, readable at any moment, used by one at a time.

config.json                  options, versions, and the result of the training
model.safetensors            the trained weights
initial.safetensors          the weights before training
checkpoints/                 the weights at some steps of the training, if asked for
checkpoint.safetensors       the unfinished reconstruction, if any
checkpoint.new.safetensors   the same of a run that is to replace it, until that stops
reconstruction.safetensors   finished reconstructions, each under its variant's name
snapshots/                   the candidates at some steps, for the trajectories of the report
history.jsonl                the records of the reconstructions, one a line
scores.json, report.html     the verdict
pictures.png                 the best reconstructions above the images they resemble
log.txt                      the events, one a line

config.json holds the checksums of both weight files, and every other file that is read again carries the checksum of
config.json as its owner. So files of two trainings cannot be mistaken for those of one.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from torch import Tensor

from palimpsest.errors import CheckpointError, PalimpsestError, RunFolderError
from palimpsest.files import storage
from palimpsest.files.schema import Range, built
from palimpsest.files.versions import versions
from palimpsest.runs import journal
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.checks import check_candidates, check_lineage
from palimpsest.solver.reconstruction import Reconstruction, SavedReconstruction
from palimpsest.solver.state import State

VARIANTS = {"without": "without splitting", "with": "with splitting"}
LOCK_AND_LOG = {".lock", "log.txt"}  # they are in every folder
CHEAP_FILES = LOCK_AND_LOG | {"config.json", "preflight.json", "plan.json"}  # a failed job need not leave them behind
TRAIN_AGAIN = "train again with --again, or into a new folder"


@dataclass(frozen=True)
class VariantRecord(SavedReconstruction):
    """The description of a finished reconstruction in a run folder, beside its tensors."""

    settings: dict[str, Any]
    seconds: Annotated[float, Range(least=0)]


@dataclass(frozen=True)
class SnapshotRecord:
    """The description of a snapshot, beside its tensors."""

    step: int


class RunFolder:
    """Atomic reads and writes in one directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    # --- opening ------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, *, create: bool = False) -> Iterator[Self]:
        """Hold the folder for this process alone; a second process is refused.

        A folder that was made for a job is removed if the job fails and leaves nothing to keep.
        """
        is_new = create and not self.path.exists()
        is_run = (self.path / "config.json").is_file()
        if create and not is_run and self.path.is_dir() and self._holds_more():
            raise RunFolderError(f"{self.path} holds other files; choose a new folder")
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not is_run:
            raise RunFolderError(f"{self.path} is not a run folder; make one with `palimpsest train --out {self.path}`")
        lock = self._lock()
        try:
            self._put_in_order()
            with journal.in_file(self.path / "log.txt"), _events_noted():
                yield self
        except BaseException:
            if is_new and not self._holds_work():
                shutil.rmtree(self.path)
            raise
        finally:
            os.close(lock)

    def _lock(self) -> int:
        path = self.path / ".lock"
        try:
            lock = storage.regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunFolderError(f"cannot lock {path}: {error.strerror}; delete it or choose another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise RunFolderError(f"another run uses {self.path}; wait for it or choose another folder") from error
        return lock

    def _put_in_order(self) -> None:
        """Clear up after killed writes. Refuse links, FIFOs and devices: all files must be in the folder itself."""
        for folder, folders, files in os.walk(self.path):
            for path in (Path(folder, name) for name in (*folders, *files)):
                mode = path.lstat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise RunFolderError(f"{path} is a link or a device, not a file; delete it and run this again")
                if _is_leftover(path) and stat.S_ISREG(mode):
                    path.unlink()
        self.adopt_new_checkpoint()

    def _holds_more(self) -> bool:
        """Anything but our own files and the leftovers of killed writes."""
        return any(path.name not in LOCK_AND_LOG and not _is_leftover(path) for path in self.path.iterdir())

    def _holds_work(self) -> bool:
        """Anything that took long to compute."""
        return any(path.name not in CHEAP_FILES and path.is_file() for path in self.path.rglob("*"))

    # --- configuration and results --------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        return storage.load_json(self.path / "config.json", remedy="train into a new folder")

    @property
    def owner(self) -> str:
        """The identity of this run, which its files carry."""
        return storage.digest(self.config)

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.write("config.json", _configuration(config))

    def write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        storage.write_atomically(path, content)
        return path

    # --- weights ------------------------------------------------------------------------------------------

    def write_training(
        self, config: Mapping[str, Any], model: Mapping[str, Tensor], initial: Mapping[str, Tensor]
    ) -> None:
        """Configuration and weights, which must never be those of two trainings."""
        files = {
            "initial.safetensors": storage.packed(initial, {"what": "weights before training"}),
            "model.safetensors": storage.packed(model, {"what": "weights after training"}),
        }
        checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        files["config.json"] = _configuration({**config, "weights": checksums})
        storage.write_together({self.path / name: content for name, content in files.items()})

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(trained, initial), if they are those that config.json was written with."""
        paths = [self.path / f"{name}.safetensors" for name in ("model", "initial")]
        trained, initial = (storage.load_tensors(path, remedy=TRAIN_AGAIN)[0] for path in paths)
        if self.config.get("weights") != {path.name: storage.file_digest(path) for path in paths}:
            raise RunFolderError(f"the weights in {self.path} are not those of its config.json; {TRAIN_AGAIN}")
        return trained, initial

    def write_checkpoints(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace the weights at some steps of the training."""
        folder = self.path / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        for step, weights in states.items():
            folder.mkdir(exist_ok=True)
            storage.save_tensors(folder / f"step-{step:08d}.safetensors", weights, {"step": step}, owner=self.owner)

    # --- reconstructions ----------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def new_checkpoint(self) -> Path:
        """The checkpoint of a run that is to replace an unfinished one, which must stay until then."""
        return self.path / "checkpoint.new.safetensors"

    def adopt_new_checkpoint(self) -> None:
        if self.new_checkpoint.exists():
            self.new_checkpoint.replace(self.checkpoint)

    def variants(self) -> dict[str, dict[str, Any]]:
        """The finished reconstructions by name: tensors, with their history, settings, loss and seconds."""
        path = self.path / "reconstruction.safetensors"
        if not path.exists():
            return {}
        tensors, description = storage.load_tensors(path, owner=self.owner, remedy="delete it and reconstruct again")
        try:
            found = {name: dict(vars(built(VariantRecord, fields))) for name, fields in description["variants"].items()}
            for key, t in tensors.items():
                name, _, field = key.partition("/")
                found[name][field] = t
            for fields in found.values():
                check_candidates(fields["images"], fields["ids"])
                check_lineage(fields["lineage"], fields["ids"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it and reconstruct again") from error
        return found

    def write_variants(self, variants: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the finished reconstructions. Then remove the files about the previous ones."""
        tensors = {f"{n}/{k}": v for n, fields in variants.items() for k, v in fields.items() if isinstance(v, Tensor)}
        rest = {n: {k: v for k, v in fields.items() if not isinstance(v, Tensor)} for n, fields in variants.items()}
        lines = [json.dumps({"variant": n} | entry) for n, fields in rest.items() for entry in fields["history"]]
        files = {
            "history.jsonl": ("\n".join(lines) + "\n").encode(),
            "reconstruction.safetensors": storage.packed(tensors, {"variants": rest}, owner=self.owner),
        }
        storage.write_together({self.path / name: content for name, content in files.items()})
        self._forget_snapshots({name: self.owner_of(name, fields["settings"]) for name, fields in variants.items()})
        self._forget("checkpoint.safetensors", "scores.json", "pictures.png", "report.html")

    def owner_of(self, variant: str, settings: Mapping[str, Any]) -> str:
        """The identity of a variant with these settings, which its snapshots carry."""
        return storage.digest(self.owner, variant, settings)

    def snapshots(self, variant: str, owner: str | None = None) -> list[dict[str, Any]]:
        """The candidates at some steps, in order: step, ids, images.

        Only a figure shows them, so a damaged snapshot is left out, and the log says so.
        """
        found = []
        for path in self._snapshot_files(variant):
            try:
                found.append(_snapshot(path, owner))
            except CheckpointError as error:
                journal.note(f"a snapshot is left out: {error}", private=True)
        return found

    def _snapshot_files(self, variant: str) -> list[Path]:
        return sorted((self.path / "snapshots").glob(f"{variant}-*.safetensors"))

    def holds_weights(self) -> bool:
        return (self.path / "model.safetensors").exists()

    def holds_reconstruction(self) -> bool:
        """A finished or an unfinished one."""
        return self.checkpoint.exists() or (self.path / "reconstruction.safetensors").exists()

    def forget_reconstructions(self) -> None:
        """Remove the files that belong to a previous training."""
        names = "checkpoint.safetensors reconstruction.safetensors history.jsonl scores.json pictures.png report.html"
        self._forget(*names.split())
        self._forget_snapshots({})

    def _forget(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def _forget_snapshots(self, owners: Mapping[str, str]) -> None:
        """Remove all snapshots but the sound ones of each variant's owner."""
        for name in VARIANTS:
            for path in self._snapshot_files(name):
                try:
                    _snapshot(path, owners.get(name, ""))
                except CheckpointError:
                    path.unlink()


def _configuration(config: Mapping[str, Any]) -> bytes:
    return storage.packed_json({"versions": versions(), **config})


def _is_leftover(path: Path) -> bool:
    """Whether a killed write left this."""
    return path.name.startswith(".") and path.suffix == ".part"


def variant(rec: Reconstruction, settings: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The parts of a finished reconstruction that a folder keeps."""
    tensors = ("images", "multipliers", "ids", "lineage") + (() if rec.labels is None else ("labels",))
    record = VariantRecord(rec.history, rec.outcome, rec.loss, dict(settings), seconds)  # type: ignore[arg-type]
    return vars(record) | {name: getattr(rec, name) for name in tensors}


def _snapshot(path: Path, owner: str | None) -> dict[str, Any]:
    tensors, description = storage.load_tensors(path, owner=owner)
    try:
        record = built(SnapshotRecord, description)
        check_candidates(tensors["images"], tensors["ids"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it") from error
    return vars(record) | tensors


@contextmanager
def _events_noted() -> Iterator[None]:
    """Note the command and the versions at the start, and at the end how it went and how long it took."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    made_with = ", ".join(f"{name} {version}" for name, version in versions().items())
    journal.note(f"started: {command} ({made_with})", private=True)
    began, end = time.monotonic(), "finished"
    try:
        yield
    except BaseException as error:
        why = str(error) if isinstance(error, PalimpsestError) else type(error).__name__
        end = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({why})"
        raise
    finally:
        journal.note(f"{end} after {time.monotonic() - began:.1f} seconds", private=True)


class Snapshots(Callback):
    """Saves the candidates now and then, each time in another file, so that no interruption loses them."""

    def __init__(
        self, folder: RunFolder, variant: str, *, owner: str, every: int, images: Callable[[Tensor], Tensor]
    ) -> None:
        self.directory, self.variant, self.every, self.images = folder.path / "snapshots", variant, every, images
        self.owner = owner
        self.directory.mkdir(exist_ok=True)

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if "loss" in entry and state.step % self.every == 0:
            self._keep(state)

    def on_end(self, state: State) -> None:
        self._keep(state)

    def _keep(self, state: State) -> None:
        path = self.directory / f"{self.variant}-{state.step:08d}.safetensors"
        content = {"ids": state.ids, "images": self.images(state.x)}
        storage.save_tensors(path, content, {"step": state.step}, owner=self.owner)
