"""`pal.reconstruct` runs the solver from random candidates to a result that can be saved, plotted and scored."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from palimpsest.errors import CheckpointError, DivergenceError, InvalidInputError
from palimpsest.execution import Execution
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Everywhere, Parametrisation, Space
from palimpsest.scoring import metrics, score
from palimpsest.solver.callbacks import Callback, Checkpoint, Progress
from palimpsest.solver.checks import SplitRecord, StepRecord, check_candidates, check_lineage, require
from palimpsest.solver.loop import Solver
from palimpsest.solver.merging import Merging
from palimpsest.solver.optimisers import Adam, Optimiser, Units
from palimpsest.solver.priors import Box, Prior, TotalVariation
from palimpsest.solver.settings import Settings
from palimpsest.solver.splitting import Splitting
from palimpsest.solver.state import Ending, State
from palimpsest.solver.stationarity import Certificate, certify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEEP = 'To keep an interrupted run, call pal.reconstruct(…, checkpoint="run.safetensors"); the same call continues it.'
TENSORS = ("images", "multipliers", "ids", "parents", "lineage")
SHOWN, COLUMNS = 60, 10  # pictures in a plot at most, and in a row
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class SavedReconstruction:
    """The description of a saved reconstruction, beside its tensors."""

    history: list[StepRecord | SplitRecord]
    outcome: Ending
    loss: float


@dataclass(frozen=True, repr=False)
class Reconstruction:
    """The candidates that a run found. `pal.reconstruct` returns one.

    Attributes:
        images: (k, *image_shape), as the network sees images. If it was trained on centred images, they are centred.
        multipliers: the multipliers λ_i of each candidate. The first axis has length k.
        labels: (k,) the label of each candidate, or None if the method does not use labels.
        ids: (k,) the number of each candidate. Numbers are not reused after a split.
        parents: (k,) the number of the candidate that each one split from, or −1.
        lineage: the parent of every candidate that ever existed, indexed by number.
        history: one dictionary for each recorded step and for each round of splitting.
        outcome: why the run ended.
        loss: the final L / ‖T‖², at the sharpness with which the run ended.
        certify: ``rec.certify(epsilon=1e-6)`` measures how stationary the final point is.

    Examples:
        >>> import palimpsest as pal
        >>> network = pal.networks.MLP((1, 4, 4), hidden=(5,))
        >>> rec = pal.reconstruct(pal.KKT(network), image_shape=(1, 4, 4), candidates=3, steps=10)
        >>> rec.images.shape, len(rec.parents)
        (torch.Size([3, 1, 4, 4]), 3)
    """

    images: Tensor
    multipliers: Tensor
    labels: Tensor | None
    ids: Tensor
    parents: Tensor
    lineage: Tensor
    history: list[dict[str, Any]]
    outcome: Ending
    loss: float
    certify: Callable[..., Certificate]

    def __repr__(self) -> str:
        count, *shape = self.images.shape
        return f"Reconstruction({count} images of {'×'.join(map(str, shape))}, loss {self.loss:.3g}, {self.outcome})"

    @cached_property
    def certificate(self) -> Certificate:
        """How stationary the final point is. It is measured on first use."""
        return self.certify()

    def ancestors(self, i: int) -> list[int]:
        """The number of candidate i, followed by the numbers of its ancestors, youngest first."""
        line = [int(self.ids[i])]
        while (parent := int(self.lineage[line[-1]])) >= 0:
            line.append(parent)
        return line

    def save(self, path: Path | str) -> None:
        """Write everything except `certify` to a safetensors file with a checksum."""
        from palimpsest.files.storage import save_tensors

        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors |= {} if self.labels is None else {"labels": self.labels}
        save_tensors(path, tensors, {"history": self.history, "outcome": self.outcome, "loss": self.loss})

    @classmethod
    def load(cls, path: Path | str, *, device: torch.device | str = "cpu") -> Reconstruction:
        """Read a file that `save` wrote. A damaged file is refused.

        The file does not hold the objective, so `certify` and `certificate` of a loaded reconstruction raise an error.
        """
        from palimpsest.files.schema import built
        from palimpsest.files.storage import load_tensors

        remedy = "save the reconstruction again"
        tensors, description = load_tensors(path, remedy=remedy)
        try:
            saved = built(SavedReconstruction, description)
            require(tensors.keys() - {"labels"} == set(TENSORS), "other tensors")
            check_candidates(tensors["images"], tensors["ids"])
            check_lineage(tensors["lineage"], tensors["ids"])
            fields: dict[str, Any] = {"labels": None} | {name: t.to(device) for name, t in tensors.items()}
            return cls(**fields, **vars(saved), certify=_cannot_certify)
        except ValueError as error:
            raise CheckpointError(f"{path} does not hold a reconstruction ({error}); {remedy}") from error

    def plot(self, *, truth: Tensor | None = None, mean: Tensor | None = None) -> Figure:
        """A matplotlib figure of the candidates, each scaled to its own range of values.

        Args:
            truth: the training images. Each is then shown above its nearest candidate, the best match first.
            mean: the image that was subtracted before training. It is added to the candidates.

        At most 60 pictures are shown. ``rec.plot().savefig("candidates.png")`` writes the figure to a file.
        """
        if self.images.ndim != 4:
            shape = tuple(self.images.shape[1:])
            raise InvalidInputError(f"candidates of shape {shape} cannot be drawn; reconstruct with (C, H, W) images")
        images = self.images.detach().cpu()
        images = metrics.minmax(images if mean is None else images + mean.detach().to(images))
        if truth is None:
            shown = images[:SHOWN]
            return _figure([shown], [""] * len(shown), f"{len(shown)} of {len(images)} candidates")
        scores = score(self, truth, mean=mean)
        best = scores.ssim.argsort(descending=True)[:SHOWN]
        titles = [f"SSIM {float(scores.ssim[i]):.2f}" for i in best]
        rows = [metrics.minmax(truth.detach().cpu()[best]), images[scores.match[best]]]
        return _figure(rows, titles, f"{len(best)} of {len(truth)} training images, each above its nearest candidate")


def _cannot_certify(*_: Any, **__: Any) -> Certificate:
    raise InvalidInputError("a loaded reconstruction does not hold its objective; call"
                            " pal.certify(objective, rec.images, rec.multipliers, rec.labels)")  # fmt: skip


def _figure(rows: Sequence[Tensor], titles: Sequence[str], heading: str) -> Figure:
    """Pictures (n, C, H, W) in lines of ten; each line shows all rows, one below the other."""
    from matplotlib.figure import Figure

    count = len(rows[0])
    lines = -(-count // COLUMNS) * len(rows)
    figure = Figure(figsize=(COLUMNS, 0.6 + 1.2 * lines), layout="constrained")
    figure.suptitle(heading)
    panels = figure.subplots(lines, COLUMNS, squeeze=False, subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
    for i in range(count):
        for j, images in enumerate(rows):
            panel = panels[i // COLUMNS * len(rows) + j, i % COLUMNS]
            pixels = images[i].movedim(0, -1) if len(images[i]) == 3 else images[i].mean(0)
            panel.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1)
        panel.set_title(titles[i], fontsize=8, y=-0.25)
    return figure


def refusing_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a call that does not fit the signature into one sentence, which names the nearest keyword."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            reason = str(error)
            for unknown in sorted(kwargs.keys() - signature.parameters.keys()):
                near = difflib.get_close_matches(unknown, signature.parameters, n=1)
                reason = f"there is no argument {unknown!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
            known = ", ".join(signature.parameters)
            raise InvalidInputError(f"pal.{function.__name__}: {reason}; its arguments are {known}") from error
        return function(*args, **kwargs)

    return checked


@refusing_unknown_keywords
@torch.inference_mode(False)  # the solver needs derivatives, whatever mode the caller is in
def reconstruct(
    objective: Objective,
    *,
    image_shape: Sequence[int] | int,
    candidates: int,
    steps: int = 4000,
    within: Space | None = None,
    splitting: Splitting | None = None,
    merging: Merging | None = None,
    priors: Prior | Sequence[Prior] = (Box(), TotalVariation()),  # noqa: B008 (immutable)
    optimiser: Optimiser = Adam(),  # noqa: B008 (immutable)
    schedule: Literal["cosine", "constant"] = "cosine",
    sharpness: tuple[float, float] | Callable[[float], float] | None = (10.0, 200.0),
    prior_strength: tuple[float, float] = (1.0, 1.0),
    gradient_tolerance: float = 0.0,
    plateau: float = 0.0,
    record_every: int | None = None,
    units: Units | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | str | None = None,
    progress: bool | None = None,
    execution: Execution | None = None,
) -> Reconstruction:
    """Read training images out of weights, starting from random candidates.

    The defaults are one recipe for every problem. Most calls set `image_shape`, `candidates`, `steps` and `within`.

    Args:
        objective: the method, for example ``pal.NTK(model, initial)``.
        image_shape: the shape of one image, for example ``(3, 32, 32)``.
        candidates: the number k of candidates at the start. Twice the number of training images is safe.
        steps: the number of gradient steps, all phases together.
        within: where to search: a subspace, for example ``pal.span(model, initial).subspace``, or all images by their
            cosines, ``pal.Cosines.of(image_shape)``. None searches all images, pixel by pixel.
        splitting: when and how candidates split. None runs a single phase of descent.
        merging: which candidates are merged or dropped before each round of splitting. If it counts images, it also
            acts at the end. None keeps all candidates.
        priors: one `pal.priors.Prior` or several. ``()`` means none.
        optimiser: `pal.optimisers.Adam`, `pal.optimisers.SGD`, or your own `pal.optimisers.Optimiser`.
        schedule: ``"cosine"`` lets the learning rate fall to zero in each phase and restarts it after a split.
            ``"constant"`` keeps it, as the published methods do.
        sharpness: β of the smoothed ReLUs at the start and at the end of each phase. It changes geometrically. None
            keeps the sharpness of the objective. A function gives β for each share of all steps, from 0 to 1, and
            splits do not restart it.
        prior_strength: factors on the priors at the start and at the end of each phase. They change geometrically.
            Strong priors find the images, and weak priors leave them sharp.
        gradient_tolerance: a phase ends when ‖∇_x L‖ / ‖T‖² is at most this. Priors pull against this gradient, so
            with them it may never vanish.
        plateau: a phase ends when L with its priors fell by less than this share over the last ten records.
        record_every: the number of steps between two entries of the history. None records about 200 times.
        units: `pal.optimisers.Units` start and step in the raw numbers of a published recipe. None uses natural units,
            which do not depend on the scale of the network.
        seed: seed of the initial candidates and of random directions.
        callbacks: objects that are called as the run progresses; see `pal.Callback`.
        checkpoint: a file that the state is saved to every few seconds. If the file exists, the run continues from
            it, on any number of processes. The result is the same as without the interruption: bit for bit on a CPU
            with the same number of threads and processes.
        progress: whether to show a bar on standard error. None shows one in a terminal if the run takes long enough.
        execution: how steps are carried out. None is as fast as the device allows.

    Examples:
        >>> import palimpsest as pal, torch
        >>> _ = torch.manual_seed(0)
        >>> images, labels = torch.rand(4, 1, 4, 4) - 0.5, torch.tensor([1, -1, 1, -1])
        >>> fit = pal.train(pal.networks.MLP((1, 4, 4), hidden=(50,)), images, labels, loss="squared", steps=100)
        >>> objective = pal.NTK(fit.model, fit.initial)
        >>> pal.reconstruct(objective, image_shape=(1, 4, 4), candidates=8, steps=50, progress=False)
        Reconstruction(8 images of 1×4×4, loss ..., all steps were done)
    """
    # Every argument that is a setting. A test compares names and defaults with the signature above.
    settings = Settings(**{name: value for name, value in locals().items() if name in Settings.__dataclass_fields__})
    if not isinstance(objective, Objective):
        kind = type(objective).__name__
        raise InvalidInputError(f"the objective is a {kind}; give a method, such as pal.NTK(model, initial)")
    solver = Solver(objective, _space(objective, image_shape, within), settings, execution)
    with solver.execution.matrix_precision(objective.device):
        watchers = [*callbacks]
        saver = None if checkpoint is None else Checkpoint(Path(checkpoint), solver.fingerprint())
        if saver is not None:
            watchers.insert(0, saver)  # it saves before another callback can fail
        if progress is not False:
            watchers.append(Progress(steps, show=progress))
        try:
            state = _run(solver, _start(solver, saver), watchers)
        except KeyboardInterrupt as interrupt:
            if checkpoint is None:
                interrupt.add_note(KEEP)
            raise
        return _result(solver, state)


def _space(objective: Objective, image_shape: Sequence[int] | int, within: Space | None) -> Parametrisation:
    """The coordinates of the candidates: pixels, cosines, or those of the subspace."""
    shape = (image_shape,) if isinstance(image_shape, int) else tuple(image_shape)
    if within is None:
        return Everywhere(shape)
    if not isinstance(within, Space):
        kind = type(within).__name__
        raise InvalidInputError(f"within is a {kind}; give a Subspace, as pal.span(…).subspace, or pal.Cosines.of(…)")
    return within.shaped(shape).to(objective.device, objective.dtype)


def _start(solver: Solver, saver: Checkpoint | None) -> State:
    """The saved state, as the first process reads it, or a fresh one: the candidates of all processes."""
    fresh = solver.init()
    return fresh if saver is None else solver.processes.from_first(partial(saver.saved, fresh)) or fresh


def _run(solver: Solver, good: State, watchers: Sequence[Callback]) -> State:
    """Step until done. Callbacks of the first process receive states of all candidates, known to be finite."""
    callbacks, state, started = watchers if solver.processes.first else (), solver.share(good), list[Callback]()
    try:
        for callback in callbacks:
            callback.on_start(good)
            started.append(callback)
        while not solver.done(state):
            new = solver.step(state)
            if watchers and len(new.history) > len(state.history):  # recording read the loss: this state is finite
                good = solver.whole(state)
                for callback in callbacks:
                    callback.on_record(good, new.history[-1])
            good, state = good if callbacks else state, new  # a process keeps all candidates only to save them
        whole = solver.whole(state)
    except BaseException as stop:
        alone, diverged = solver.processes.count == 1, isinstance(stop, DivergenceError)
        last = state if alone and not diverged and bool(state.x.isfinite().all()) else good
        with ExitStack() as calls:  # makes every call, even if one raises; the last one pushed comes first
            for callback in reversed(started):
                calls.callback(callback.on_stop, last)
            raise
    with ExitStack() as calls:
        for callback in reversed(callbacks):
            calls.callback(callback.on_end, whole)
    return whole


def _result(solver: Solver, state: State) -> Reconstruction:
    solver.prepare(state)
    objective = solver.final()
    return Reconstruction(
        images=solver.space.images(state.x),
        **{name: getattr(state, name) for name in ("multipliers", "labels", "ids", "parents", "lineage")},
        history=list(state.history),
        outcome=state.outcome or Ending.FINISHED,
        loss=float(objective.loss(*state.point) / objective.target_norm_squared),
        certify=partial(certify, objective, *state.point),
    )
