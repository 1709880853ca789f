"""The second job: reconstruct images from the weights in a run folder, without and with splitting."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.errors import CheckpointError, InvalidInputError, RunFolderError
from palimpsest.execution.processes import Processes
from palimpsest.files.schema import Positive, Range, Share, check_options
from palimpsest.files.series import series
from palimpsest.files.storage import tensor_digest
from palimpsest.files.weights import Found
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.runs import estimates
from palimpsest.runs.folder import VARIANTS, RunFolder, Snapshots, variant
from palimpsest.runs.journal import Journal, note
from palimpsest.runs.problems import METHODS, Within, problem
from palimpsest.runs.train import TrainedRun
from palimpsest.solver.callbacks import Callback

NODES: dict[str, tuple[float, ...]] = {"ntk": (0.15, 0.85), "path": (0.5,)}  # tangent points of each segment
UNTIL = 0.4  # of the steps: splits come early, so that every candidate sharpens slowly


@dataclass(frozen=True)
class ReconstructOptions:
    """How to reconstruct images from the weights."""

    method: Literal["ntk", "path", "kkt", "multiclass"] | None = None
    """ntk and path for any loss, kkt for logistic, multiclass for cross-entropy. If omitted: path with --checkpoints,
    else the last that fits the loss."""
    checkpoints: tuple[Path, ...] = ()
    """Weights on the way from the initial to the final ones, for path: files, folders or patterns in quotes."""
    at: tuple[Share, ...] | None = None
    """Tangent points between the first (0) and the last weights (1) of a segment. If omitted: 0.15 and 0.85 for ntk,
    0.5 for path."""
    candidates: Positive = 80
    """Number of candidates at the start. Twice the number of training images is a safe choice."""
    steps: Positive = 2000
    """Gradient steps, over all phases together."""
    within: Within | None = None
    """Search in the span of the first layer's change, or everywhere. If omitted: the span for NTK, if readable."""
    whitening: Share | None = None
    """How strongly the directions of a layer's change are balanced, from 0 (not at all) to 1. NTK and Path only. If
    omitted: 0.5 in the span of a dense network, 0 elsewhere."""
    share: Annotated[float, Range(above=0, most=1)] = 0.25
    """Maximum share of the candidates that split in one round."""
    rounds: Positive = 2
    """Number of splitting rounds."""
    seed: int = 0
    """Seed of the initial candidates."""

    def problem(
        self, model: nn.Module, initial: Mapping[str, Tensor], loss: str, way: Sequence[Mapping[str, Tensor]] = ()
    ) -> tuple[Objective, Subspace | None]:
        """The objective that fits the training loss and the weights on the way, and the subspace to search in."""
        if self.at == ():
            raise InvalidInputError("--at does not have a value; give one or more numbers from 0 to 1")
        fitting = METHODS[loss]
        method = self.method or ("path" if way else fitting)
        if method not in ("ntk", "path", fitting):
            raise InvalidInputError(f"{method} does not fit {loss} loss; use --method {fitting}")
        if way and method != "path":
            raise InvalidInputError(f"{method} does not read weights on the way; leave out --checkpoints or --method")
        at, within, whitening = self.at or NODES.get(method, ()), self.within, self.whitening
        return problem(method, model, initial, checkpoints=way or None, at=at, within=within, whitening=whitening)

    def way(self, model: nn.Module, initial: dict[str, Tensor]) -> list[Found]:
        """The weights from the first to the last, if there are --checkpoints."""
        if not self.checkpoints:
            return []
        trained = Found(dict(model.state_dict()), "the trained weights")
        return series(model, self.checkpoints, initial=Found(initial, "the initial weights"), trained=trained)

    @property
    def splitting(self) -> pal.Splitting:
        return pal.Splitting(rounds=self.rounds, share=self.share, until=UNTIL)

    def settings(self, way: Sequence[Found] = ()) -> dict[str, Any]:
        """The options as a run folder keeps them, with a checksum of the weights on the way."""
        content = {f"{j}/{name}": t for j, found in enumerate(way) for name, t in found.tensors.items()}
        known = f"{' '.join(map(str, self.checkpoints))} (sha256 {tensor_digest(content)})" if way else None
        return json.loads(json.dumps(asdict(self) | {"checkpoints": known}))


def reconstruct(
    folder: RunFolder,
    options: ReconstructOptions,
    *,
    device: torch.device,
    variants: Sequence[str] = tuple(VARIANTS),
    callbacks: Callable[[str], Sequence[Callback]] = lambda variant: (),
    progress: bool | None = None,
    execution: pal.Execution | None = None,
    again: bool = False,
) -> None:
    """Reconstruct images from the folder's weights, each variant in turn. Finished variants are not run again.

    Variants with other settings are replaced only with ``again``, and only when the replacement is there. On several
    processes the first one writes.
    """
    options, processes = check_options(options), Processes(execution.processes if execution else None)
    run = TrainedRun.read(folder)
    model, initial = run.model_and_start(folder)
    image_shape = model.image_shape
    most = math.ceil(options.candidates * (1 + options.share) ** options.rounds)
    way = options.way(model, initial)
    nodes = len(options.at or NODES["path" if way else "ntk"]) * max(1, len(way) - 1)
    estimates.check_reconstruction(folder.path, run.network.widths, most, tangents=nodes, variants=len(variants))
    states = [found.tensors for found in way]
    objective, within = options.problem(model, initial, run.training.loss, states)
    objective = objective.to(device)
    for found in way:
        note(f"weights on the way: {found}")
    images = (lambda x: x) if within is None else within.shaped(image_shape).to(device, objective.dtype).images
    settings = options.settings(way)
    finished = _finished_variants(folder, settings, again=again)
    for name in variants:
        if name in finished and finished[name]["settings"] == settings:
            continue
        snapshots = Snapshots(
            folder, name, owner=folder.owner_of(name, settings), every=8 * max(1, options.steps // 200), images=images
        )
        run_variant = partial(
            pal.reconstruct,
            objective,
            image_shape=image_shape,
            candidates=options.candidates,
            steps=options.steps,
            within=within,
            splitting=options.splitting if name == "with" else None,
            seed=options.seed,
            callbacks=[*callbacks(name), Journal(VARIANTS[name], options.steps), snapshots],
            progress=progress,
            execution=execution,
        )
        began = time.monotonic()
        rec = _resumed(run_variant, folder, again=again, writes=processes.first)
        finished[name] = variant(rec, settings, time.monotonic() - began)
        if processes.first:
            folder.write_variants(finished)
    same = {name: fields for name, fields in finished.items() if fields["settings"] == settings}
    if len(same) < len(finished) and processes.first:
        folder.write_variants(same)


def _resumed(
    run: Callable[..., pal.Reconstruction], folder: RunFolder, *, again: bool, writes: bool
) -> pal.Reconstruction:
    """Continue from the checkpoint. A useless one, if it may be replaced, stays until there is a new one."""
    try:
        return run(checkpoint=folder.checkpoint)
    except CheckpointError:
        if not again:
            raise
    try:
        return run(checkpoint=folder.new_checkpoint)
    finally:
        if writes:
            folder.adopt_new_checkpoint()


def _finished_variants(folder: RunFolder, settings: dict[str, Any], *, again: bool) -> dict[str, dict[str, Any]]:
    """The finished variants. Those with other settings are refused unless they may be replaced."""
    try:
        finished = folder.variants()
    except CheckpointError:
        if not again:
            raise
        return {}
    for name, fields in finished.items():
        if not again and (other := _difference(fields["settings"], settings)):
            raise RunFolderError(
                f"{folder.path} holds a reconstruction {name} splitting, with {other}; add --again to replace it"
            )
    return finished


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The settings that were different before, in words."""
    if before.keys() != after.keys():
        return "the options of another version"
    changed = {name: value for name, value in before.items() if value != after[name]}
    return ", ".join(f"{name} {'left open' if value is None else value}" for name, value in changed.items())
