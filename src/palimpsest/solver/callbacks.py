"""Callbacks: progress bars, checkpoints, TensorBoard, and those that users write."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from palimpsest.errors import CheckpointError, InvalidInputError
from palimpsest.solver.state import State


class Callback:
    """Watches a run. Subclass it, override the methods you need, and pass it as ``callbacks=[…]``.

    Every state that a callback receives is finite. On several processes the first one calls it, with all candidates.

    Examples:
        >>> import palimpsest as pal
        >>> class Losses(pal.Callback):
        ...     def __init__(self):
        ...         self.losses = []
        ...
        ...     def on_record(self, state, entry):
        ...         self.losses.append(entry["loss"])
        >>> watcher, objective = Losses(), pal.KKT(pal.networks.MLP(4, hidden=(3,)))
        >>> _ = pal.reconstruct(objective, image_shape=4, candidates=2, steps=4, record_every=2, callbacks=[watcher])
        >>> len(watcher.losses)
        2
    """

    def on_start(self, state: State) -> None:
        """Called before the first step of a run, or of a resumed run."""

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        """Called with a new entry of the history, and the state that it describes."""

    def on_stop(self, state: State) -> None:
        """Called with the last good state if the run was interrupted, failed or diverged."""

    def on_end(self, state: State) -> None:
        """Called when the run is complete."""


class Checkpoint(Callback):
    """Saves the state to a file every few seconds and whenever a run stops, so that nothing is lost."""

    def __init__(self, path: Path, fingerprint: str, *, every_seconds: float = 5.0) -> None:
        self.path, self.fingerprint, self.every_seconds = path, fingerprint, every_seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        self._saved_at = time.monotonic()

    def saved(self, fresh: State) -> State | None:
        """The saved state, if there is one; in main memory."""
        if not self.path.exists():
            return None
        saved = State.load(self.path, self.fingerprint, torch.device("cpu"))
        if not saved.continues(fresh):
            raise CheckpointError(f"{self.path} does not fit this problem; delete it and start again")
        return saved

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if time.monotonic() - self._saved_at >= self.every_seconds:
            self.on_stop(state)

    def on_stop(self, state: State) -> None:
        state.save(self.path, self.fingerprint)
        self._saved_at = time.monotonic()

    on_end = on_stop


class Progress(Callback):
    """A bar with loss, candidates, rate and remaining time, once a run has taken two seconds."""

    def __init__(self, steps: int, *, show: bool | None = None) -> None:
        self.steps = steps
        self.show = sys.stderr.isatty() if show is None else show

    def on_start(self, state: State) -> None:
        from tqdm import tqdm

        look = {"desc": "reconstructing", "unit": "step", "delay": 2, "disable": not self.show}
        self.bar = tqdm(total=self.steps, initial=state.step, **look)

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            self.bar.set_postfix(loss=f"{entry['loss']:.3g}", candidates=entry["candidates"], refresh=False)
        self.bar.update(state.step - self.bar.n)

    def on_stop(self, state: State) -> None:
        self.bar.close()

    def on_end(self, state: State) -> None:
        self.bar.update(state.step - self.bar.n)
        self.bar.close()


class TensorBoard(Callback):
    """Writes the curves for TensorBoard (an optional dependency)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidInputError("TensorBoard is not installed; run pip install tensorboard") from error
        self._open = partial(SummaryWriter, str(folder))

    def on_start(self, state: State) -> None:
        self.writer = self._open()  # not earlier: a finished run does not write curves again

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        for name in ("loss", "objective", "gradient", "rate", "sharpness", "candidates", "eta"):
            if name in entry:
                self.writer.add_scalar(name, entry[name], state.step)

    def on_stop(self, state: State) -> None:
        self.writer.close()

    on_end = on_stop
