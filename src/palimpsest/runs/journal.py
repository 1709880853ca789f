"""The events of a run, one line each: in the run folder's log.txt, and on standard error if no bar replaces them.

Events go through Python's logging under the name ``palimpsest``. Without a handler the library is silent.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from palimpsest.files.storage import regular
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.state import State

LOGGER = logging.getLogger("palimpsest")
EVERY = 30.0  # seconds between two lines of progress


class _File(logging.FileHandler):
    def _open(self) -> TextIO:  # type: ignore[override]
        handle = regular(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Append every event to a file, with the time."""
    form = logging.Formatter("{asctime} {message}", "%Y-%m-%dT%H:%M:%S%z", style="{")
    try:
        handler = _File(path)
    except OSError:
        yield
        return
    with _listening(handler, form):
        yield


@contextmanager
def on_stderr(*, terminal: bool = False) -> Iterator[None]:
    """Show events on standard error. Terminals show bars instead, unless ``terminal`` asks for the events too."""
    if sys.stderr.isatty() and not terminal:
        yield
        return
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not getattr(record, "private", False))
    with _listening(handler, logging.Formatter("{message}", style="{")):
        yield


@contextmanager
def _listening(handler: logging.Handler, form: logging.Formatter) -> Iterator[None]:
    handler.setFormatter(form)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk does not stop a run
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        with suppress(OSError):  # of a full disk
            handler.close()


def note(event: str, *, private: bool = False) -> None:
    """Log an event in one line. Private events go to the file only."""
    LOGGER.info(printable(event), extra={"private": private})


def printable(text: str) -> str:
    """One line without control characters, which a file or a name could send to the terminal.

    >>> printable("runs/\\x1b[31mred\\nnext")
    'runs/�[31mred next'
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))


class Pulse:
    """Lets a line of progress through twice a minute."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def beat(self, event: str) -> None:
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            note(event)


class Journal(Callback):
    """Notes how a reconstruction goes: its start or resumption, progress, splits, and how it ended."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self._pulse = name, steps, Pulse()

    def on_start(self, state: State) -> None:
        begins = f"resumes at step {state.step} of" if state.step else "begins, for"
        note(f"reconstruction {self.name} {begins} {self.steps} steps with {len(state.x)} candidates")

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            self._pulse.beat(f"step {state.step} of {self.steps}: loss {entry['loss']:.3g}, {len(state.x)} candidates")
        else:
            change = f"objective {entry['before']:.3g} to {entry['after']:.3g}"
            note(f"phase {state.round + 1} ends at step {state.step}: {entry['split']} of {len(state.x)} candidates"
                 f" split ({change})")  # fmt: skip

    def on_stop(self, state: State) -> None:
        note(f"reconstruction {self.name} stops at step {state.step} of {self.steps}")

    def on_end(self, state: State) -> None:
        note(f"reconstruction {self.name} ends at step {state.step} with {len(state.x)} candidates: {state.outcome}")
