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
log.txt                      what was done here and when, a line for each event
"""

from __future__ import annotations

import fcntl
import json
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from palimpsest import __version__, journal
from palimpsest.callbacks import Callback
from palimpsest.checks import check_candidates, check_history, check_lineage, is_count, is_number, require
from palimpsest.errors import CheckpointError, PalimpsestError, RunFolderError
from palimpsest.reconstruction import Reconstruction
from palimpsest.state import State
from palimpsest.storage import FORMAT, load_tensors, packed, parse_json, save_tensors, write_atomically, write_together

LARGEST_JSON = 1 << 26  # bytes; scores of a hundred thousand images
OURS = {".lock", "log.txt"}  # what is in a folder before anything was done there


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
        if create and not is_run and self.path.is_dir() and self._holds_more():
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
                with journal.into(self.path / "log.txt"), _told():
                    yield self
            except BaseException:
                if made and not self._holds_more():
                    shutil.rmtree(self.path)
                raise

    def _holds_more(self) -> bool:
        """Anything but our own, and what a write leaves behind that was killed half-way, which is nobody's work."""
        names = [path.name for path in self.path.iterdir()]
        return any(name not in OURS and not (name.startswith(".") and name.endswith(".part")) for name in names)

    # --- configuration and results --------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        return self._read_json("config.json", remedy="train into a new folder")

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.write("config.json", _configuration(config))

    @property
    def scores(self) -> dict[str, Any]:
        return self._read_json("scores.json", remedy="make it again with `palimpsest report`")

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        self.write("scores.json", _json(scores))

    def write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        write_atomically(path, content)
        return path

    # --- weights ------------------------------------------------------------------------------------------

    def write_training(
        self, config: Mapping[str, Any], model: Mapping[str, Tensor], initial: Mapping[str, Tensor]
    ) -> None:
        """Configuration and weights, which must never be those of two trainings."""
        files = {
            "initial.safetensors": packed(initial, {"what": "weights before training"}),
            "model.safetensors": packed(model, {"what": "weights after training"}),
            "config.json": _configuration(config),
        }
        write_together({self.path / name: content for name, content in files.items()})

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
        tensors, description = load_tensors(path)
        try:
            found = {name: dict(fields) for name, fields in description["variants"].items()}
            for key, t in tensors.items():
                name, _, field = key.partition("/")
                found[name][field] = t
            for fields in found.values():
                _check_variant(fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it and reconstruct again") from error
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
        lines = [json.dumps({"variant": n} | entry) for n, fields in rest.items() for entry in fields["history"]]
        files = {
            "history.jsonl": ("\n".join(lines) + "\n").encode(),
            "reconstruction.safetensors": packed(tensors, {"variants": rest}),
        }
        write_together({self.path / name: content for name, content in files.items()})
        self.checkpoint.unlink(missing_ok=True)

    def snapshots(self, variant: str) -> list[dict[str, Any]]:
        """Candidates on their way, in order: step, ids, images."""
        found = []
        for path in sorted((self.path / "snapshots").glob(f"{variant}-*.safetensors")):
            tensors, description = load_tensors(path)
            try:
                check_candidates(tensors["images"], tensors["ids"])
                require(is_count(description["step"]), "no step")
            except (KeyError, ValueError) as error:
                raise CheckpointError(f"{path} is damaged ({error}); delete it") from error
            found.append(description | tensors)
        return found

    def holds_weights(self) -> bool:
        return (self.path / "model.safetensors").exists()

    def holds_reading(self) -> bool:
        """Whether images were read, or are being read, out of the weights."""
        return self.checkpoint.exists() or (self.path / "reconstruction.safetensors").exists()

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

    def _read_json(self, name: str, *, remedy: str) -> dict[str, Any]:
        path = self.path / name
        try:
            with path.open("rb") as file:
                content = parse_json(file.read(LARGEST_JSON))
        except FileNotFoundError as error:
            raise RunFolderError(f"{self.path} has no {name}; {remedy}") from error
        except (ValueError, OSError) as error:
            raise RunFolderError(f"{path} is not readable; {remedy}") from error
        if content.get("format") != FORMAT:
            raise RunFolderError(f"{path} was written by another version of Palimpsest; {remedy}")
        return content


def _configuration(config: Mapping[str, Any]) -> bytes:
    return _json({"versions": versions(), **config})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps({"format": FORMAT, **content}, indent=1, default=str) + "\n").encode()


@contextmanager
def _told() -> Iterator[None]:
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


def _check_variant(fields: dict[str, Any]) -> None:
    """What a report needs of a finished reconstruction."""
    check_candidates(fields["images"], fields["ids"])
    check_lineage(fields["lineage"], fields["ids"])
    check_history(fields["history"])
    require(isinstance(fields["settings"], dict) and "seed" in fields["settings"], "no settings")
    require(is_number(fields["seconds"]) and fields["seconds"] >= 0, "no time")


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
    names = ("torch", "numpy", "scipy", "scikit-image")
    ours = {"python": platform.python_version(), "palimpsest": __version__}  # which need not be installed
    return ours | {name: metadata.version(name) for name in names}
