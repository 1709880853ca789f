"""Controls: a network without anything to read, and one of the same kind that holds public images."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palimpsest import datasets
from palimpsest.auditing.case import Case
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.subject import Subject
from palimpsest.errors import TrainingDivergedError
from palimpsest.files.weights import fit_into
from palimpsest.objectives.binding import parameters_of
from palimpsest.runs.journal import note
from palimpsest.training import Fit, LossName, train

LOSSES: dict[str, LossName] = {"kkt": "logistic", "multiclass": "cross_entropy"}
TRAININGS, LEAST_POWER = 6, 0.3  # of the positive control, to move as far as the subject
TOO_FAR, BEYOND = 1.3, 1.1  # of the subject's distance: the upper limit, and the aim


def shuffled(subject: Subject, method: str, *, seed: int) -> nn.Module:
    """The negative control: the network with the values of each change θ − θ_0 randomly permuted.

    Where the initial weights are unknown, the values of θ itself are permuted.
    """
    generator = torch.Generator().manual_seed(seed)
    model, initial = copy.deepcopy(subject.model), subject.initial if method == "ntk" else None
    with torch.no_grad():
        for name, θ in model.named_parameters():
            start = torch.zeros_like(θ) if initial is None else initial[name].to(θ)
            change = (θ - start).flatten()
            θ.copy_(start + change[torch.randperm(len(change), generator=generator)].view_as(θ))
    return model


@dataclass(frozen=True)
class PublicImages:
    """Images from a public dataset, centred, in the shape that the audited network sees."""

    images: Tensor
    labels: Tensor
    held_out: Tensor


def public_images(count: int, image_shape: tuple[int, ...], outputs: int, *, seed: int) -> PublicImages:
    """Faces and other pictures, or digits if those are too few or too large, resized; and others held out.

    Labels are ±1 for one output. For several outputs the classes take turns, because no public dataset has them.
    """
    per_class, small = (count + 1) // 2, min(image_shape[1:]) < 16
    name = "digits" if small or per_class > 50 else "faces"
    data = datasets.load(name, per_class=per_class, held_out_per_class=max(20, per_class), seed=seed, task="binary")
    order = torch.arange(len(data.train)).view(2, -1).T.flatten()[:count]  # the two sides take turns
    images, held_out = (_resized(data.centred(part.images), image_shape) for part in (data.train, data.held_out))
    labels = data.train.labels[order] if outputs == 1 else torch.arange(count) % outputs
    return PublicImages(images[order], labels, held_out)


def _resized(images: Tensor, image_shape: tuple[int, ...]) -> Tensor:
    channels, height, width = image_shape
    sized = F.interpolate(images, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return sized.expand(-1, channels, -1, -1).contiguous()


def distance(model: nn.Module, initial: Mapping[str, Tensor] | None) -> float:
    """How far training went: ‖θ − θ_0‖, or ‖θ‖ if the start is unknown."""
    θ = parameters_of(model)
    start = {name: torch.zeros_like(t) if initial is None else initial[name].to(t) for name, t in θ.items()}
    return math.hypot(*(float((t - start[name]).double().norm()) for name, t in θ.items()))


def control_images(case: Case, plan: Plan) -> PublicImages:
    """The images of the positive control."""
    return public_images(plan.control_images, case.subject.image_shape, case.subject.outputs, seed=plan.seed)


def positive_control(case: Case, plan: Plan) -> tuple[nn.Module, dict[str, Tensor]]:
    """The positive control and its initial weights, trained once and kept in the run folder."""

    def compute() -> Contents:
        note("training the positive control")
        fit = trained_control(case.subject, plan, control_images(case, plan), case.device)
        parts = {"final": fit.model.state_dict(), "initial": fit.initial}
        named = {f"{part}/{name}": t for part, weights in parts.items() for name, t in weights.items()}
        return named, {"summary": fit.summary}

    def parse(tensors: dict[str, Tensor], _: Any) -> tuple[nn.Module, dict[str, Tensor]]:
        final, initial = (
            {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
            for part in ("final/", "initial/")
        )
        model = case.subject.fresh()
        fit_into(model, final)
        return model, initial

    return cached_tensors(case.folder / "control.safetensors", case.owner, compute, parse)


def trained_control(subject: Subject, plan: Plan, public: PublicImages, device: torch.device) -> Fit:
    """A network of the same kind, trained on public images.

    It has the start of the audited network, if that is known, and its normalisation, so that only the images differ.
    From a known start it also moves as far, because a network that moved less is easier to read.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(plan.seed)  # does not change CUDA's generators
        model = subject.fresh()
    every_name = model.named_parameters(remove_duplicate=False)  # a tied parameter has several names
    trainable = {name for name, parameter in every_name if parameter.requires_grad}
    statistics = {name: value for name, value in subject.model.state_dict().items() if name not in trainable}
    start = {} if plan.method != "ntk" else dict(subject.initial or {})
    model.load_state_dict(model.state_dict() | start | statistics)
    model = model.to(device)
    if plan.method == "ntk":
        return _moved_as_far(model, subject, public, plan.control_steps)
    loss, decay = LOSSES.get(plan.method, "squared"), 1e-3 if plan.method == "kkt-signed" else 0.0
    return train(model, public.images, public.labels, loss=loss, steps=plan.control_steps, weight_decay=decay)


def _moved_as_far(model: nn.Module, subject: Subject, public: PublicImages, steps: int) -> Fit:
    """Fit the targets s·y, with s such that the network moves as far as the subject did.

    The distance is about a power of s, so a few trainings find it. All of them together take at most ``steps``.
    """
    goal, s, power = distance(subject.model, subject.initial), 1.0, 1.0
    fit, before = None, None
    y = public.labels if subject.outputs == 1 else F.one_hot(public.labels, subject.outputs)
    for _ in range(TRAININGS):
        try:
            fit = train(model, public.images, s * y.float(), steps=steps, tolerance=0.01 * s)
        except TrainingDivergedError:
            if fit is None:
                raise
            break
        steps -= int(fit.history[-1]["step"])
        way = distance(fit.model, fit.initial)
        if goal <= way <= TOO_FAR * goal or steps < 1 or way == 0:
            break
        if before is not None and way != before[1]:
            power = min(max(math.log(way / before[1]) / math.log(s / before[0]), LEAST_POWER), 1.0)
        before = (s, way)
        s *= (BEYOND * goal / way) ** (1 / power)
    assert fit is not None
    return fit
