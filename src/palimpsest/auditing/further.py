"""Further restarts: how an audit uses the time that the plans of its rungs leave.

Plans leave time, because they rely on a part of it alone, and because controls may train faster than expected. Once all
rungs are read, the network is read again by their plans, from other noise. Each of these restarts is written down in
restarts.json of its rung before it begins. A repeated audit therefore follows the same ones.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median

from palimpsest.auditing.attack import Attempt, judged
from palimpsest.auditing.case import Clock, OutOfTimeError
from palimpsest.auditing.on_workers import read_on_workers
from palimpsest.auditing.plan import NEEDED_RUNS, two_digits
from palimpsest.auditing.reading import CHECKPOINT, PosedByRole, file_of, read_once
from palimpsest.auditing.stages import cached_json
from palimpsest.files.schema import Positive
from palimpsest.files.storage import packed_json, write_atomically
from palimpsest.runs.journal import note

USUAL, MOST = 3, 12  # restarts of a rung: the first number for all rungs, then the second for the strongest first
SURE = 0.9  # share of the time left that a restart may take at the speed of the plan
SHORTEST = 0.5  # of the planned steps: a shorter restart reads too little


@dataclass(frozen=True)
class Further:
    """The stored result of this stage: the steps of each further restart of a rung."""

    steps: tuple[Positive, ...] = ()
    closed: bool = False  # whether the audit was finished: a repeated one adds nothing


def read_further(attempts: Sequence[Attempt], *, complete: bool) -> None:
    """Add further restarts to the rungs, the strongest first, until the time is used.

    ``complete`` says whether all rungs were read. If not, a continued audit may add more.
    """
    rungs = [_Rung(each) for each in attempts if each.case.options.restarts is None]  # with those that are on disk
    if not all(each.finished for each in attempts):
        return  # a continued audit finishes the plans first
    while choice := _next(rungs):
        rung, steps = choice
        for other in rungs:
            if other is not rung:
                other.problems.release()
        rung.add(steps)
    if not complete:
        return
    for rung in rungs:
        if not rung.further.closed and rung.restarts == MOST:
            note(f"rung {rung.name} was read {MOST} times, the most for one audit; a new one can take more steps each")
        rung.write(replace(rung.further, closed=True))


def _next(rungs: Sequence["_Rung"]) -> tuple["_Rung", list[int]] | None:
    """The rung to read once more, and the steps for that. Workers read it several times at once."""
    for goal in (USUAL, MOST):
        for rung in rungs:
            times = 1 if rung.tried.case.executor is None else goal - rung.restarts
            if rung.restarts >= goal or not rung.affordable():
                continue
            if steps := rung.affordable(_judging(rungs, rung, times)):
                return rung, [steps] * times
    return None


def _judging(rungs: Sequence["_Rung"], more: "_Rung", times: int) -> float:
    """Seconds, beyond those kept for it, that judging all rungs takes if one of them has more restarts."""
    seconds = [each.judging * (each.restarts + times * (each is more)) for each in rungs]
    return max(0.0, sum(seconds) - more.tried.case.options.reserve)


class _Rung:
    """A rung and its further restarts."""

    def __init__(self, tried: Attempt) -> None:
        self.tried, self.planned, self.further = tried, tried.plan, Further()
        self.problems = PosedByRole(tried.case, tried.plan)
        self.name, self.path = tried.attacker.name, tried.case.folder / "restarts.json"
        if self.path.exists():
            self.further = cached_json(self.path, tried.case.owner, Further, Further)
        self._read_all(self.further.steps)

    @property
    def restarts(self) -> int:
        return self.tried.plan.restarts

    @cached_property
    def judging(self) -> float:
        """Seconds that ranking and scoring take for each restart. They grow with the number of candidates."""
        began = Clock.now()
        judged(self.tried, looks=1)
        return (Clock.now() - began) / self.restarts

    def affordable(self, kept: float = 0.0) -> int:
        """The steps of another restart, at the speed of the others, so that ``kept`` seconds are left; 0 if too few."""
        paces = [run.seconds / self.planned.steps for runs in self.tried.runs.values() for run in runs[:NEEDED_RUNS]]
        if self.further.closed or not paces or not (pace := median(paces)):
            return 0
        steps = int(SURE * (self.tried.case.clock.seconds_left - kept) / pace)
        return min(self.planned.steps, two_digits(steps)) if steps >= SHORTEST * self.planned.steps else 0

    def add(self, steps: list[int]) -> None:
        times = "once" if len(steps) == 1 else f"{len(steps)} times"
        note(f"time is left: rung {self.name} is read {times} more, {steps[0]} steps")
        self.write(replace(self.further, steps=(*self.further.steps, *steps)))
        self._read_all(steps)

    def write(self, further: Further) -> None:
        self.further = further
        write_atomically(self.path, packed_json(asdict(further), owner=self.tried.case.owner))

    def _read_all(self, every: Sequence[int]) -> None:
        """Further restarts, each with its steps. If the time runs out, the rest is taken back."""
        for steps in dict.fromkeys(every):
            runs = [("subject", number) for number, its in enumerate(every, self.restarts) if its == steps]
            read_on_workers(self.tried.case, replace(self.planned, steps=steps), runs)
        for steps in every:
            if not self._read(steps):
                break

    def _read(self, steps: int) -> bool:
        """One further restart. If the time runs out, it is taken back, because no verdict needs it."""
        case, number = self.tried.case, self.restarts
        try:
            plan = replace(self.planned, steps=steps, restarts=number + 1)
            run = read_once(case, plan, "subject", number, self.problems)
        except OutOfTimeError:
            note(f"out of time: rung {self.name} keeps {number} restarts")
            for late in range(number, self.planned.restarts + len(self.further.steps)):
                file = case.folder / file_of("subject", late)
                file.unlink(missing_ok=True)  # of a faster worker
                file.with_suffix(CHECKPOINT).unlink(missing_ok=True)
            self.write(replace(self.further, steps=self.further.steps[: number - self.planned.restarts]))
            return False
        self.tried.plan = replace(self.planned, restarts=number + 1)
        if len(run.images):
            self.tried.runs["subject"].append(run)
        return True
