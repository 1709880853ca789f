"""The whole state of a run. To load a saved state and go on gives the same result as not to stop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from palimpsest.errors import CheckpointError
from palimpsest.solver.checks import Range, SplitRecord, StepRecord, check_candidates, check_lineage, require
from palimpsest.solver.optimisers import Moments


class Ending(Enum):
    """Why a run ended. Files hold the name, so that the sentence can be edited."""

    FINISHED = "all steps were done"
    CONVERGED = "the gradient fell below the tolerance"
    PLATEAU = "the objective stopped falling"
    STABLE = "descent ended at a point where no split lowers the objective"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SavedState:
    """The description of a saved state, beside its tensors."""

    fingerprint: str  # of the problem and the settings
    outcome: Ending | None
    history: tuple[StepRecord | SplitRecord, ...]
    multiplier_unit: Annotated[float, Range(above=1e-300)]
    step: int
    round: int
    phase_start: int


@dataclass(frozen=True)
class State:
    """Candidates, multipliers, labels, lineage, the optimiser's memory, the random generator and the clock.

    States are values: a step makes a new one and does not change the old one. On several processes `tensors` hold the
    rows of this process's share of the candidates, and everything else is the same on all of them.
    """

    x: Tensor  # (k, *shape) coordinates of the candidates
    multipliers: Tensor
    labels: Tensor | None
    ids: Tensor  # a number for each candidate of all processes, never used again after it has split
    lineage: Tensor  # for every number ever given, the number of the candidate that it split from, or −1
    moments: dict[str, Moments]  # of the optimiser, for "x" and for "multipliers"
    generator: Tensor  # state of the random generator
    multiplier_unit: float = 1.0  # the natural size of a multiplier, in which steps are measured
    step: int = 0
    round: int = 0  # how often Phase II has been entered
    phase_start: int = 0  # the step at which the present Phase I began
    outcome: Ending | None = None
    history: tuple[dict[str, Any], ...] = ()  # one entry for each recorded step and for each round of splitting

    @property
    def parents(self) -> Tensor:
        """(k,) number of the candidate that each split from, or −1."""
        return self.lineage[self.ids]

    @property
    def point(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of an objective."""
        return self.x, self.multipliers, self.labels

    def inherited(self, parents: Tensor) -> Self:
        """The state with the numbers and the optimiser's memory of these candidates."""
        moments = {of: {name: t[parents] for name, t in m.items()} for of, m in self.moments.items()}
        return replace(self, ids=self.ids[parents], moments=moments)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The state with the rows of other candidates: a function changes each of `tensors`."""
        tensors = {name: change(t) for name, t in self.tensors().items()}
        x, λ, labels = tensors["x"], tensors["multipliers"], tensors.get("labels")
        return replace(self, x=x, multipliers=λ, labels=labels, moments=moments_of(tensors))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a gradient step reads and changes, by name."""
        tensors = {"x": self.x, "multipliers": self.multipliers}
        tensors |= {f"moments/{of}/{name}": t for of, m in self.moments.items() for name, t in m.items()}
        return tensors if self.labels is None else tensors | {"labels": self.labels}

    def save(self, path: Path | str, fingerprint: str) -> None:
        from palimpsest.files.storage import save_tensors

        tensors = self.tensors() | {"ids": self.ids, "lineage": self.lineage, "generator": self.generator}
        names = (f.name for f in fields(SavedState) if f.name != "fingerprint")
        save_tensors(path, tensors, {"fingerprint": fingerprint} | {name: getattr(self, name) for name in names})

    @classmethod
    def load(cls, path: Path | str, fingerprint: str, device: torch.device) -> Self:
        from palimpsest.files.schema import built
        from palimpsest.files.storage import load_tensors

        tensors, description = load_tensors(path)
        if description.get("fingerprint") != fingerprint:
            raise CheckpointError(f"{path} belongs to other settings; finish that run, or delete the file")
        try:
            return cls._unpacked(tensors, built(SavedState, description), device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it and start again") from error

    @classmethod
    def _unpacked(cls, tensors: dict[str, Tensor], saved: SavedState, device: torch.device) -> Self:
        """The saved state; a KeyError, TypeError, ValueError or RuntimeError if the file does not hold one."""
        tensors = {name: t if name == "generator" else t.to(device) for name, t in tensors.items()}
        parts: dict[str, Any] = {"labels": None, "moments": moments_of(tensors)}
        parts |= {name: t for name, t in tensors.items() if not name.startswith("moments/")}
        parts |= {name: value for name, value in vars(saved).items() if name != "fingerprint"}
        state = cls(**parts)
        state._check()
        return state

    def _check(self) -> None:
        check_candidates(self.x, self.ids)
        check_lineage(self.lineage, self.ids)
        require(bool(self.multipliers.isfinite().all()), "multipliers that are not finite")
        require(self.phase_start <= self.step, "a phase that begins after the present step")
        torch.Generator().set_state(self.generator)

    def continues(self, fresh: Self) -> bool:
        """Whether this may be a later state of a run that began with the fresh one: as many candidates, of one kind."""
        first, of_fresh = (int((state.lineage < 0).sum()) for state in (self, fresh))  # those that began the run
        return self._kinds() == fresh._kinds() and first == of_fresh

    def _kinds(self) -> dict[str, Any]:
        return {name: (t.dtype, t.shape[1:], len(t) == len(self.x)) for name, t in self.tensors().items()}


def moments_of(tensors: Mapping[str, Tensor]) -> dict[str, Moments]:
    """The optimiser's memory among the tensors of a state."""
    moments: dict[str, Moments] = {}
    for name, t in tensors.items():
        if name.startswith("moments/"):
            _, of, kind = name.split("/")
            moments.setdefault(of, {})[kind] = t
    return moments
