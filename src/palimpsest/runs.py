"""The run folder: one directory that holds everything about a run, readable at any moment, used by one at a time.

config.json                  what was asked for, by whom it was made, and what came of the training
model.safetensors            the trained weights
initial.safetensors          the weights before training
checkpoint.safetensors       the reconstruction under way, if any
reconstruction.safetensors   finished reconstructions, each under its variant's name
snapshots/                   candidates on their way, for the trajectories of the report
history.jsonl                the reconstructions' records, one a line
scores.json, report.html     the verdict
pictures.png                 the best reconstructions above the images they resemble
"""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from palimpsest.callbacks import Callback
from palimpsest.errors import RunFolderError
from palimpsest.reconstruction import Reconstruction
from palimpsest.state import State
from palimpsest.storage import load_tensors, save_tensors, write_atomically

FORMAT = 1


class RunFolder:
    """Atomic reads and writes in one directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    # --- opening ------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, *, create: bool = False) -> Iterator[RunFolder]:
        """Hold the folder for this process alone; whoever comes second is refused.

        A folder that was made for a job which then failed, with nothing to keep, is removed again.
        """
        made = create and not self.path.exists()
        is_run = (self.path / "config.json").is_file()
        if create and not is_run and self.path.is_dir() and any(not _is_ours(p.name) for p in self.path.iterdir()):
            raise RunFolderError(f"{self.path} holds other files; choose a new folder")
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not is_run:
            raise RunFolderError(f"{self.path} is not a run folder; make one with `palimpsest train --out {self.path}`")
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(
                    f"{self.path} is in use by another run; wait for it or choose another folder"
                ) from error
            try:
                yield self
            except BaseException:
                if made and all(_is_ours(path.name) for path in self.path.iterdir()):
                    shutil.rmtree(self.path)
                raise

    # --- configuration and results --------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        config = self._read_json("config.json")
        if config.get("format") != FORMAT:
            raise RunFolderError(f"{self.path} was written by another version of Palimpsest; train into a new folder")
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write_json("config.json", {"format": FORMAT, "versions": versions(), **config})

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        self._write_json("scores.json", scores)

    def write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        write_atomically(path, content)
        return path

    # --- weights ------------------------------------------------------------------------------------------

    def write_weights(self, model: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> None:
        save_tensors(self.path / "initial.safetensors", initial, {"what": "weights before training"})
        save_tensors(self.path / "model.safetensors", model, {"what": "weights after training"})

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(trained, initial)."""
        trained, initial = (load_tensors(self.path / f"{name}.safetensors")[0] for name in ("model", "initial"))
        return trained, initial

    # --- reconstructions ----------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def variants(self) -> dict[str, dict[str, Any]]:
        """The finished reconstructions by name: tensors, with their history, settings, loss and seconds."""
        path = self.path / "reconstruction.safetensors"
        if not path.exists():
            return {}
        tensors, descriptions = load_tensors(path)
        found = {name: dict(description) for name, description in descriptions.items()}
        for key, t in tensors.items():
            name, _, field = key.partition("/")
            found[name][field] = t
        return found

    def add_variant(self, name: str, rec: Reconstruction, settings: Mapping[str, Any], seconds: float) -> None:
        variants = self.variants()
        variants[name] = {
            "images": rec.images,
            "multipliers": rec.multipliers,
            "ids": rec.ids,
            "lineage": rec.lineage,
            "history": rec.history,
            "settings": dict(settings),
            "loss": rec.loss,
            "outcome": str(rec.outcome),
            "certificate": str(rec.certificate),
            "seconds": seconds,
        } | ({} if rec.labels is None else {"labels": rec.labels})
        tensors = {f"{n}/{k}": v for n, fields in variants.items() for k, v in fields.items() if isinstance(v, Tensor)}
        rest = {n: {k: v for k, v in fields.items() if not isinstance(v, Tensor)} for n, fields in variants.items()}
        save_tensors(self.path / "reconstruction.safetensors", tensors, rest)
        lines = [json.dumps({"variant": n} | entry) for n, fields in rest.items() for entry in fields["history"]]
        write_atomically(self.path / "history.jsonl", ("\n".join(lines) + "\n").encode())
        self.checkpoint.unlink(missing_ok=True)

    def snapshots(self, variant: str) -> list[dict[str, Any]]:
        """Candidates on their way, in order: step, ids, images."""
        found = []
        for path in sorted((self.path / "snapshots").glob(f"{variant}-*.safetensors")):
            tensors, description = load_tensors(path)
            found.append(description | tensors)
        return found

    def forget_reconstructions(self) -> None:
        """Remove what belongs to a former training."""
        made = "checkpoint.safetensors reconstruction.safetensors history.jsonl scores.json pictures.png report.html"
        for name in made.split():
            (self.path / name).unlink(missing_ok=True)
        for variant in ("with", "without"):
            self.forget_snapshots(variant)

    def forget_snapshots(self, variant: str) -> None:
        for path in (self.path / "snapshots").glob(f"{variant}-*.safetensors"):
            path.unlink()

    # --- JSON -----------------------------------------------------------------------------------------------

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text())
        except FileNotFoundError as error:
            raise RunFolderError(f"{self.path} has no {name}; make it with `palimpsest train`") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{self.path / name} is not readable; train into a new folder") from error
        if not isinstance(content, dict):
            raise RunFolderError(f"{self.path / name} is not readable; train into a new folder")
        return content

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=1, default=str) + "\n").encode())


def _is_ours(name: str) -> bool:
    """The lock, or what a write leaves behind that was killed half-way: neither is anybody's work."""
    return name == ".lock" or (name.startswith(".") and name.endswith(".part"))


class Snapshots(Callback):
    """Keeps the candidates every so many steps, each time in a file of its own, so that no interruption loses them."""

    def __init__(self, folder: RunFolder, variant: str, *, every: int, images: Callable[[Tensor], Tensor]) -> None:
        self.directory, self.variant, self.every, self.images = folder.path / "snapshots", variant, every, images
        self.directory.mkdir(exist_ok=True)

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if "loss" in entry and state.step % self.every == 0:
            self._keep(state)

    def on_end(self, state: State) -> None:
        self._keep(state)

    def _keep(self, state: State) -> None:
        path = self.directory / f"{self.variant}-{state.step:08d}.safetensors"
        save_tensors(path, {"ids": state.ids, "images": self.images(state.x)}, {"step": state.step})


def versions() -> dict[str, str]:
    """What a run was made with."""
    names = ("palimpsest", "torch", "numpy", "scipy", "scikit-image")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
