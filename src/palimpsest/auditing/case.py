"""The inputs that all stages of an audit share: the network, the options, the folder and the clock."""

import time
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from palimpsest.auditing.options import Options
from palimpsest.auditing.subject import Subject
from palimpsest.auditing.truth import Truth
from palimpsest.execution.resources import chosen
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.state import State

GRACE = 20.0  # seconds for the last steps of a worker, and for the way back


class OutOfTimeError(Exception):
    """The time is spent. Its first argument is the state of a reconstruction that was stopped."""


class TooShortError(Exception):
    """The time left is too short for a useful plan. Its first argument is the number of seconds that one takes."""


class Clock(Callback):
    """Stops a reconstruction, at a record, if the next record would come after the deadline."""

    now = staticmethod(time.monotonic)

    def __init__(self, deadline: float) -> None:
        self.deadline, self._recorded = deadline, self.now()

    def __reduce__(self) -> tuple[Any, ...]:
        """To another machine, a clock goes as the seconds left. The time on the way counts, by the machines' clocks."""
        return _received, (self.seconds_left, time.time())

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.now()

    def check(self, *_: object) -> None:
        """Raise if the time is spent. Trainings call it with their records."""
        if self.seconds_left < 0:
            raise OutOfTimeError

    def on_start(self, state: State) -> None:
        self._recorded = self.now()

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        before, self._recorded = self._recorded, self.now()
        if self.seconds_left < self._recorded - before:
            raise OutOfTimeError(state)


def _received(seconds_left: float, sent: float) -> Clock:
    return Clock(Clock.now() + seconds_left - max(0.0, time.time() - sent))


@dataclass(frozen=True)
class Case:
    """One audit, or one rung of it: its network, its options and its files."""

    folder: Path
    owner: str  # the identity that the files of this audit carry
    subject: Subject
    options: Options
    truth: Truth | None
    where: torch.device | str  # to compute; "auto" is the best device of each machine
    clock: Clock
    share: float = 1.0  # of the remaining time that a plan may use
    executor: Executor | None = None  # whose workers do the reconstructions

    @property
    def device(self) -> torch.device:
        return chosen(self.where)

    @property
    def sent(self) -> Self:
        """The same for a worker, who does not need the training images."""
        return replace(self, truth=None, executor=None)

    @property
    def patience(self) -> float:
        """Seconds to wait for workers, whose clocks stop them at the deadline."""
        return max(0.0, self.clock.seconds_left) + GRACE
