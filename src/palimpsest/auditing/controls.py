"""Controls: a network without anything to read, and one of the same kind that holds public images."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palimpsest import datasets
from palimpsest.auditing.case import Case
from palimpsest.auditing.moving import Moved, Tick, by_adam, by_descent, distance, live, moved_as_far, outputs_of
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.subject import Subject
from palimpsest.errors import TrainingDivergedError
from palimpsest.files.weights import fit_into
from palimpsest.methods import moments
from palimpsest.methods.optimiser_states import match
from palimpsest.objectives.binding import parameters_of
from palimpsest.runs.journal import note
from palimpsest.training import Fit, LossName, train

LOSSES: dict[str, LossName] = {"kkt": "logistic", "multiclass": "cross_entropy"}
CONTROL = Path("control.safetensors")  # in the folder of a rung
BATCHES = 4  # in which an optimiser sees the public images, because the subject's are unknown


def _share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


SOUND: dict[str, Callable[[Any], bool]] = {  # settings that make a moment; a file may hold anything there
    "lr": lambda value: isinstance(value, int | float) and 0 <= value < math.inf,
    "weight_decay": _share,
    "decoupled_weight_decay": lambda value: isinstance(value, bool),
    "momentum": _share,
    "betas": lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_share, value)),
}


def shuffled(subject: Subject, method: str, *, seed: int) -> Subject:
    """The negative control: the network with the values of each change θ − θ_0 randomly permuted.

    Path permutes the change of each segment, and Gradient the moment. Where the initial weights are unknown, the values
    of θ itself are permuted.
    """
    generator = torch.Generator().manual_seed(seed)

    def permuted(T: Tensor) -> Tensor:
        return T.flatten()[torch.randperm(T.numel(), generator=generator)].view_as(T)

    if method == "gradient" and subject.moment is not None:
        return replace(subject, moment={name: permuted(m) for name, m in subject.moment.items()})
    trained = parameters_of(subject.model)
    if method == "path":
        changed = [{name: permuted(end[name] - start[name]) for name in trained} for start, end in subject.segments]
        pairs = zip(subject.segments, changed, strict=True)
        ends = [(start, {**end, **{name: start[name] + t for name, t in T.items()}}) for (start, end), T in pairs]
        return replace(subject, segments=tuple(ends))
    model, initial = copy.deepcopy(subject.model), subject.initial if method == "ntk" else None
    with torch.no_grad():
        for name, θ in model.named_parameters():
            start = torch.zeros_like(θ) if initial is None else initial[name].to(θ)
            θ.copy_(start + permuted(θ - start))
    return replace(subject, model=model)


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


def way(control: Subject, subject: Subject, plan: Plan) -> float:
    """How far the control moved, relative to the subject, on the segment where it moved least.

    For Gradient, the share of the steps in the subject's moment that the control took.
    """
    if plan.method == "gradient":
        return min(1.0, plan.control_steps / remembered_steps(subject))
    pairs = zip(_ends(control, plan.method), _ends(subject, plan.method), strict=True)
    return min(distance(*its) / max(distance(*ours), 1e-300) for its, ours in pairs)


def _ends(subject: Subject, method: str) -> list[tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]]:
    """(θ_j, θ_{j−1}) of each segment that the method uses."""
    θ = parameters_of(subject.model)
    if method == "path":
        return [({name: end[name] for name in θ}, start) for start, end in subject.segments]
    return [(θ, subject.initial if method == "ntk" else None)]


def control_images(case: Case, plan: Plan) -> PublicImages:
    """The images of the positive control."""
    return public_images(plan.control_images, case.subject.image_shape, case.subject.outputs, seed=plan.seed)


def positive_control(case: Case, plan: Plan) -> Subject:
    """The positive control, made once and kept in the run folder: a subject whose weights hold public images."""

    def compute() -> Contents:
        note("training the positive control")
        made = trained_control(case.subject, plan, control_images(case, plan), case.device, case.clock.check)
        parts = {"final": made.model.state_dict(), "initial": made.initial or {}, "moment": made.moment or {}}
        parts |= {f"end {j}": end for j, (_, end) in enumerate(made.segments)}
        return {f"{part}/{name}": t for part, weights in parts.items() for name, t in weights.items()}, {}

    def parse(tensors: dict[str, Tensor], _: Any) -> Subject:
        def part(of: str) -> dict[str, Tensor]:
            return {name.removeprefix(f"{of}/"): t for name, t in tensors.items() if name.startswith(f"{of}/")}

        model = case.subject.fresh()
        fit_into(model, part("final"))
        segments = tuple((start, part(f"end {j}")) for j, (start, _) in enumerate(case.subject.segments))
        return replace(case.subject, model=model, initial=part("initial"), segments=segments, moment=part("moment"))

    return cached_tensors(case.folder / CONTROL, case.owner, compute, parse)


def trained_control(
    subject: Subject, plan: Plan, public: PublicImages, device: torch.device, callback: Tick = None
) -> Subject:
    """A network of the same kind, trained on public images. The callback may stop the training.

    It has the start of the audited network, if that is known, and its normalisation, so that only the images differ.
    From a known start it also moves as far, because a network that moved less is easier to read. Path starts again at
    each segment. Gradient continues from the weights of the subject, with a new state of the same optimiser.
    """
    if plan.method == "gradient":
        return _continued(subject, plan, public, device, callback)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(plan.seed)  # does not change CUDA's generators
        model = subject.fresh()
    every_name = model.named_parameters(remove_duplicate=False)  # a tied parameter has several names
    trainable = {name for name, parameter in every_name if parameter.requires_grad}
    statistics = {name: value for name, value in subject.model.state_dict().items() if name not in trainable}
    model.load_state_dict(model.state_dict() | statistics)
    y = public.labels if subject.outputs == 1 else F.one_hot(public.labels, subject.outputs)

    training = by_adam if plan.rule == "adam" else by_descent
    targets = y.float().to(device)

    def moved(start: Mapping[str, Tensor], end: Mapping[str, Tensor], steps: int, state: Any = None) -> Moved:
        model.load_state_dict(model.state_dict() | dict(start) | statistics)
        goal = distance({name: end[name] for name in parameters_of(model)}, start)
        trained = live(model) if plan.live else model
        return moved_as_far(
            training, trained.to(device), goal, public.images.to(device), targets, steps, callback, state
        )

    if plan.method == "path":
        steps = max(1, plan.control_steps // len(subject.segments))
        found: list[Moved] = []
        for segment in subject.segments:  # Adam continues with the state of the last segment, if the subject did
            found.append(moved(*segment, steps, found[-1].state if found and subject.continues else None))
        ends = [(start, model.state_dict() | each.model.state_dict())
                for (start, _), each in zip(subject.segments, found, strict=True)]  # fmt: skip
        return replace(subject, model=_holding(model, found[-1].model), segments=tuple(ends), moment=None)
    if plan.method == "ntk" and subject.initial is not None:
        fit: Moved | Fit = moved(subject.initial, subject.model.state_dict(), plan.control_steps)
    else:
        loss, decay = LOSSES.get(plan.method, "squared"), 1e-3 if plan.method == "kkt-signed" else 0.0
        how: Any = {"loss": loss, "steps": plan.control_steps, "weight_decay": decay, "callback": callback}
        fit = train(model.to(device), public.images, public.labels, **how)
    initial = model.state_dict() | fit.initial
    return replace(subject, model=_holding(model, fit.model), initial=initial, segments=(), moment=None)


def _holding(model: nn.Module, trained: nn.Module) -> nn.Module:
    """The network with trained weights. Those of live batch normalisation come without running statistics."""
    model.load_state_dict(model.state_dict() | trained.state_dict())
    return model


def _continued(subject: Subject, plan: Plan, public: PublicImages, device: torch.device, callback: Tick) -> Subject:
    """The subject and its moment after more steps of its own optimiser, on mini-batches of the public images."""
    model = (live if plan.live else copy.deepcopy)(subject.model).to(device)
    settings = _settings(subject)
    groups = [{"params": [model.get_parameter(name)], **settings[name]} for name in settings]
    adam = any("betas" in group for group in groups)
    rule = torch.optim.Adam(groups) if adam else torch.optim.SGD(groups, lr=1e-3)  # each group has its own lr
    x, y = public.images.to(device), public.labels.to(device)
    batches: list[Tensor] = []
    generator = torch.Generator().manual_seed(plan.seed)
    for step in range(min(remembered_steps(subject), plan.control_steps)):
        batches = batches or _batches(torch.randperm(len(x), generator=generator).to(device), live=plan.live)
        i = batches.pop()
        Φ = outputs_of(model, x[i]).reshape(len(i), -1)
        loss = F.mse_loss(Φ[:, 0], y[i].to(Φ)) if subject.outputs == 1 else F.cross_entropy(Φ, y[i])
        if not loss.isfinite():
            raise TrainingDivergedError(step, "the optimiser's learning rate is too high for public images")
        rule.zero_grad()
        loss.backward()
        rule.step()
        if callback is not None:
            callback({"step": step})
    moment = {name: m.cpu() for name, m in moments(model, rule.state_dict(), names=list(settings)).items()}
    return replace(subject, model=_holding(copy.deepcopy(subject.model), model.cpu()), segments=(), moment=moment)


def _batches(order: Tensor, *, live: bool) -> list[Tensor]:
    """Mini-batches. Those of live batch normalisation have two images at least, or they would not have a deviation."""
    return list(order.tensor_split(min(BATCHES, max(1, len(order) // 2))) if live else order.chunk(BATCHES))


def _settings(subject: Subject) -> dict[str, dict[str, Any]]:
    """The optimiser's settings of each parameter that has a moment, as far as they are sound."""
    every = match(subject.model, subject.optimiser or {}).settings
    θ = parameters_of(subject.model)
    return {
        name: {setting: v for setting, sound in SOUND.items() if sound(v := every[name].get(setting))}
        for name in subject.moment or {} if name in θ
    }  # fmt: skip


def remembered_steps(subject: Subject) -> int:
    """3 / (1 − β): the number of steps that make 95 % of the moment."""
    βs = [s["betas"][0] if "betas" in s else s.get("momentum", 0.0) for s in _settings(subject).values()]
    return round(3 / (1 - max(βs)))
