"""Everything a reconstruction is, at one moment. Loading a saved state and going on is the same as never stopping."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest.errors import CheckpointError
from palimpsest.solver.checks import check_candidates, check_history, check_lineage, is_count, is_positive, require
from palimpsest.solver.optimisers import Moments

CLOCK = ("multiplier_unit", "step", "round", "phase_start")


class Ending(StrEnum):
    """Why a run ended."""

    FINISHED = "all steps were done"
    CONVERGED = "the gradient fell below the tolerance"
    PLATEAU = "the objective stopped falling"
    STABLE = "descent ended at a point where no candidate wants to split"


@dataclass(frozen=True)
class State:
    """Candidates, multipliers, labels, lineage, the optimiser's memory, the random generator and the clock.

    States are values: a step makes a new one and leaves the old one as it was.
    """

    x: Tensor
    """(k, *shape) coordinates of the candidates."""
    multipliers: Tensor
    labels: Tensor | None
    ids: Tensor
    """(k,) a number for each candidate, never used again after it has split."""
    lineage: Tensor
    """For every number ever given, that of the candidate it split from, or −1."""
    moments: dict[str, Moments]
    generator: Tensor
    """State of the random generator."""
    multiplier_unit: float = 1.0
    """The natural size of a multiplier, in which steps are measured."""
    step: int = 0
    round: int = 0
    """How often Phase II has been entered."""
    phase_start: int = 0
    """The step at which the present Phase I began."""
    outcome: Ending | None = None
    history: tuple[dict[str, Any], ...] = ()
    """What was recorded: one entry per recording step and one per split."""

    @property
    def parents(self) -> Tensor:
        """(k,) number of the candidate that each split from, or −1."""
        return self.lineage[self.ids]

    def save(self, path: Path | str, fingerprint: str) -> None:
        from palimpsest.files.storage import save_tensors

        tensors = {
            "x": self.x,
            "multipliers": self.multipliers,
            "ids": self.ids,
            "lineage": self.lineage,
            "generator": self.generator,
        } | {f"moments/{of}/{name}": t for of, moments in self.moments.items() for name, t in moments.items()}
        if self.labels is not None:
            tensors["labels"] = self.labels
        description = {"fingerprint": fingerprint, "outcome": self.outcome, "history": self.history}
        save_tensors(path, tensors, description | {name: getattr(self, name) for name in CLOCK})

    @classmethod
    def load(cls, path: Path | str, fingerprint: str, device: torch.device) -> State:
        from palimpsest.files.storage import load_tensors

        tensors, description = load_tensors(path)
        if description.get("fingerprint") != fingerprint:
            raise CheckpointError(
                f"{path} belongs to another problem or other settings; finish that run, or delete the file"
            )
        try:
            return cls._unpacked(tensors, description, device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it and start afresh") from error

    @classmethod
    def _unpacked(cls, tensors: dict[str, Tensor], description: dict[str, Any], device: torch.device) -> State:
        """The state that was saved; a KeyError, TypeError, ValueError or RuntimeError if none was."""
        moments: dict[str, Moments] = {}
        fields: dict[str, Any] = {"labels": None}
        for name, t in tensors.items():
            if name.startswith("moments/"):
                _, of, kind = name.split("/")
                moments.setdefault(of, {})[kind] = t.to(device)
            else:
                fields[name] = t if name == "generator" else t.to(device)
        fields |= {name: description[name] for name in CLOCK}
        outcome = None if description["outcome"] is None else Ending(description["outcome"])
        check_history(description["history"])
        state = cls(**fields, moments=moments, outcome=outcome, history=tuple(description["history"]))
        state._check()
        return state

    def _check(self) -> None:
        check_candidates(self.x, self.ids)
        check_lineage(self.lineage, self.ids)
        require(bool(self.multipliers.isfinite().all()), "multipliers that are not finite")
        require(all(is_count(getattr(self, name)) for name in ("step", "round", "phase_start")), "no time")
        require(self.phase_start <= self.step and is_positive(self.multiplier_unit), "no time or unit")
        torch.Generator().set_state(self.generator)

    def continues(self, fresh: State) -> bool:
        """Whether this may be a later state of a run that began with the fresh one: as many candidates, of one kind."""
        return self._kinds() == fresh._kinds() and self._first() == fresh._first()

    def _first(self) -> int:
        """How many candidates the run began with: those that did not split from another."""
        return int((self.lineage < 0).sum())

    def _kinds(self) -> dict[str, Any]:
        tensors = {"x": self.x, "multipliers": self.multipliers}
        tensors |= {f"{of}/{name}": t for of, moments in self.moments.items() for name, t in moments.items()}
        if self.labels is not None:
            tensors["labels"] = self.labels
        return {name: (t.dtype, t.shape[1:], len(t) == len(self.x)) for name, t in tensors.items()}
