"""Signs that the files or options of an audit are wrong: swapped weights, classes in another order, another scale.

Each sign compares how well the network fits the given training images with its fit under one other reading of the
files. The right reading fits better, because training fitted it. A sign says what may be wrong and decides nothing.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from palimpsest.auditing.subject import Subject
from palimpsest.auditing.truth import Truth, accuracy
from palimpsest.runs.problems import Rule

GOOD = 0.9  # accuracy of another reading of the files that raises a doubt,
MARGIN = 0.25  # if it is higher by this share of the images,
TIMES = 4  # or if it fits this many times better,
LOUDER = 2  # unless it also makes the images this many times larger: saturated outputs scatter less, fitted or not
CLEAR = 0.25  # share of the outputs' variance inside classes, below which a fit is clear
FEW = 8  # images, below which chance fits one of several scales
COMMON = {
    "0 and 1": (0.0, 1.0),
    "0.5 and 1": (0.5, 1.0),
    "0.5 and 0.5": (0.5, 0.5),
    "0 and 1/255": (0.0, 1 / 255),
    "0.1307 and 0.3081": (0.1307, 0.3081),
    "0.4914,0.4822,0.4465 and 0.247,0.2435,0.2616": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "0.485,0.456,0.406 and 0.229,0.224,0.225": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}  # mean and standard deviation, as training scripts have them


@dataclass(frozen=True)
class FitToClasses:
    """How well outputs fit classes."""

    accuracy: float
    scatter: float
    """The share of the outputs' variance inside classes. It does not depend on the classes' order, nor on a scale."""

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        Φ = outputs.double()
        total = float((Φ - Φ.mean(0)).square().sum())
        inside = sum(float((own := Φ[labels == y]).sub(own.mean(0)).square().sum()) for y in labels.unique())
        return cls(accuracy(outputs, labels), inside / total if total > 0 else 1.0)

    def far_better_than(self, other: "FitToClasses") -> bool:
        return self.classifies_far_better_than(other) or self.scatter <= min(CLEAR, other.scatter / TIMES)

    def classifies_far_better_than(self, other: "FitToClasses") -> bool:
        return self.accuracy >= max(GOOD, other.accuracy + MARGIN)


def doubts(
    subject: Subject, truth: Truth | None, *, rule: Rule | None = None, counted: int | None = None
) -> tuple[str, ...]:
    """Everything that may be wrong, each a clause without a full stop.

    Images show swapped files themselves. Counters alone may mislead: those of a pretrained start are high.

    Args:
        rule: the optimiser that the user named.
        counted: the number of training images, if the change of the first layer shows it.
    """
    signs = subject.doubts if truth is None else tuple(_of_the_images(subject, truth))
    return (*signs, *_of_the_rule(subject, rule, counted))


def _of_the_rule(subject: Subject, rule: Rule | None, counted: int | None) -> Iterator[str]:
    if rule is not None and subject.rule not in (None, rule):
        yield f"--optimiser is {rule}, but the file of the final weights holds a state of {subject.rule}"
    elif rule == "adam" and counted is not None:
        shown = f"the change of the first layer has {counted} directions, as after gradient descent"
        yield f"--optimiser adam may be wrong: {shown}, and Adam would move it in all"


def _of_the_images(subject: Subject, truth: Truth) -> Iterator[str]:
    labels, outputs = truth.labels_for(subject.outputs), truth.outputs(subject.model)
    fit = FitToClasses.of(outputs, labels)
    if subject.initial is not None and subject.start_given:
        before = FitToClasses.of(truth.outputs(_at_start(subject)), labels)
        if before.far_better_than(fit) and before.accuracy > fit.accuracy:
            share = f"{before.accuracy:.0%} of the given images correctly, and the final ones {fit.accuracy:.0%}"
            yield f"the files --weights and --initial may be swapped: the initial weights classify {share}"
            return  # the other signs are about the trained weights
    if order := _other_order(outputs, labels):
        yield order
    if len(labels) >= FEW and (scale := _other_scale(subject, truth, labels, fit)):
        yield scale


def _at_start(subject: Subject) -> torch.nn.Module:
    model = copy.deepcopy(subject.model)
    model.load_state_dict({**model.state_dict(), **(subject.initial or {})})
    return model


def _other_order(outputs: Tensor, labels: Tensor) -> str | None:
    """Classes that training numbered differently."""
    if outputs.shape[1] == 1:
        usual, turned = (accuracy(Φ, labels, either_way=False) for Φ in (outputs, -outputs))
        exchanged = "the two classes may be exchanged: the network's output is higher for the first"
        return exchanged if turned >= max(GOOD, usual + MARGIN) else None
    C, answers = outputs.shape[1], outputs.argmax(1)
    counts = torch.zeros(C, C).index_put((labels, answers), torch.ones(len(labels)), accumulate=True)
    _, order = linear_sum_assignment(counts.numpy(), maximize=True)
    usual, other = float((answers == labels).double().mean()), float(counts[range(C), order].sum() / len(labels))
    if other < max(GOOD, usual + MARGIN):
        return None
    moved = [f"class {y} may be output {order[y]}" for y in range(C) if order[y] != y and counts[y, order[y]]]
    return f"the classes may be numbered differently: {', '.join(moved[:3])}{', …' if len(moved) > 3 else ''}"


def _other_scale(subject: Subject, truth: Truth, labels: Tensor, fit: FitToClasses) -> str | None:
    """Another mean and standard deviation, under which the network fits the images far better."""
    x = truth.images
    by_channel, one = x.mean((0, 2, 3)), torch.tensor(1.0)
    own = {"those of the given images, by channel": (by_channel, x.std((0, 2, 3))),
           "the mean of the given images, by channel, and 1": (by_channel, one),
           "the mean of the given images and 1": (x.mean(0), one)}  # fmt: skip
    every = common_scales(x) | {name: (_by_channel(mean), _by_channel(std)) for name, (mean, std) in own.items()}
    fits = {
        name: FitToClasses.of(truth.outputs(subject.model, mean=mean, std=std.clamp_min(1e-6)), labels)
        for name, (mean, std) in every.items()
    }
    least = float(torch.as_tensor(truth.std, dtype=x.dtype).mean()) / LOUDER
    quiet = [name for name in fits if float(every[name][1].mean()) > least and fits[name].far_better_than(fit)]
    better = quiet + [name for name in fits if fits[name].classifies_far_better_than(fit)]
    if not better:
        return None
    best = min(better, key=lambda name: fits[name].scatter)
    return f"--mean and --std may be wrong: the network fits the given images far better, for example, with {best}"


def common_scales(images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and standard deviation of each usual scale that fits the images' channels."""
    scales = {
        name: (torch.tensor(mean, dtype=images.dtype), torch.tensor(std, dtype=images.dtype))
        for name, (mean, std) in COMMON.items()
    }
    fitting = {name: pair for name, pair in scales.items() if pair[0].ndim == 0 or len(pair[0]) == images.shape[1]}
    return {name: (_by_channel(mean), _by_channel(std)) for name, (mean, std) in fitting.items()}


def _by_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1) if values.ndim == 1 else values
