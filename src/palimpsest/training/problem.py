"""The function F that training minimises: its value, gradient and curvature at any θ."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.functional import one_hot

from palimpsest.errors import InvalidInputError
from palimpsest.execution.fusion import fusible
from palimpsest.training.coordinates import coordinates
from palimpsest.training.losses import margins, separable, shares, squared, tiny

LossName = Literal["squared", "logistic", "cross_entropy"]


class Numbers(NamedTuple):
    """The numbers that describe one θ, on the device."""

    value: Tensor  # F
    log_loss: Tensor
    gap: Tensor
    margin: Tensor
    kkt_residual: Tensor  # NaN for squared loss
    norm: Tensor  # ‖θ‖
    gradient_norm: Tensor  # ‖∇F‖


class Evaluation(NamedTuple):
    numbers: Numbers
    gradient: tuple[Tensor, ...]


class TrainingProblem:
    """The function F that training minimises: its value, gradient and curvature at any θ."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, loss: LossName, decay: float) -> None:
        self.loss, self.decay = loss, decay
        self.network = coordinates(model, images)
        self.images = self.network.images
        self.start = {name: p.detach() for name, p in self.network.named.items()}
        with torch.no_grad():
            outputs = self.outputs(self.start)
        self.labels = labels.to(outputs.device)
        self.targets = _targets(self.labels, outputs, loss)
        self.has_margin = (
            not self.labels.dtype.is_floating_point if outputs.shape[1] > 1 else bool((self.targets.abs() == 1).all())
        )
        self._fitted_shape = outputs.shape if loss == "squared" else outputs.shape[:1]

    def outputs(self, θ: Mapping[str, Tensor]) -> Tensor:
        """Φ for each image, (n, C)."""
        return self.network.outputs(θ)

    def start_of_iteration(self) -> Tensor:
        """A direction from which to look for the largest curvature."""
        return torch.randn(self._fitted_shape, generator=torch.Generator().manual_seed(0)).to(self.images)

    @property
    def stride(self) -> float:
        """The fraction of ‖θ‖ by which a step of chosen length may move θ.

        It is short for squared loss, because images do not explain the change of an overshooting step. It is longer
        towards the maximum margin, where weights grow many times over, and under weight decay, which forgets the way.
        """
        return 0.00025 if self.loss == "squared" and not self.decay else 0.02

    @property
    def default_tolerance(self) -> float:
        return 0.001 if self.decay else 0.01 if self.loss == "squared" else 0.1

    def fitted(self, outputs: Tensor) -> Tensor:
        """The argument of the loss: the outputs Φ for squared loss, otherwise the margins m."""
        return outputs if self.loss == "squared" else margins(outputs, self.targets)

    def evaluate(self, θ: Mapping[str, Tensor]) -> Evaluation:
        """F and ∇F: the loss is differentiated by hand in the outputs, the network by autograd."""
        leaves = {name: p.detach().requires_grad_() for name, p in θ.items()}
        with torch.enable_grad():
            outputs = self.outputs(leaves)
        loss = squared if self.loss == "squared" else separable
        *numbers, pull = loss(outputs.detach(), self.targets, bool(self.decay), self.has_margin)
        parameters = list(leaves.values())
        gradient = torch.autograd.grad(outputs, parameters, pull, allow_unused=True, materialize_grads=True)
        return Evaluation(*with_geometry(numbers, parameters, gradient, self.decay, self.loss != "squared"))

    def curvature(self, θ: Mapping[str, Tensor], direction: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue of JᵀDJ (+ δ), by power iteration, and the direction for the next estimate.

        J is the Jacobian in θ of the outputs or margins. D is 2/n for squared loss, σ(m)σ(−m)/n for a separable one,
        and for its logarithm the p_i = σ(−m_i)/Σ_j ℓ_j of ∇F = −Σ_i p_i ∇m_i. This bounds the curvature of log L. It is
        at least about ‖∇F‖², which keeps steps short if one image dominates and F looks straight.
        """

        def function(θ: dict[str, Tensor]) -> Tensor:
            return self.fitted(self.outputs(θ))

        point = {name: p.detach() for name, p in θ.items()}
        fitted, pull = vjp(function, point)[:2]
        D = self._weights(fitted).sqrt()
        u, λ = direction, direction.new_zeros(())
        for _ in range(iterations):
            u = u / u.norm().clamp_min(tiny(u))
            (v,) = pull(D * u)
            u = D * jvp(function, (point,), (v,))[1]
            λ = u.norm()
        # A little of every direction is kept, so the next estimate finds one that has become the steepest.
        onwards = u / λ.clamp_min(tiny(u)) + 0.01 / math.sqrt(u.numel())
        return λ.clamp_min(1e-30) + self.decay, onwards.detach()

    def _weights(self, fitted: Tensor) -> Tensor:
        if self.loss == "squared":
            return torch.full_like(fitted, 2 / len(fitted))
        if self.decay:
            return torch.sigmoid(fitted) * torch.sigmoid(-fitted) / len(fitted)
        return shares(fitted)

    def accuracy(self, θ: Mapping[str, Tensor]) -> float:
        outputs = self.outputs(θ)
        if not self.has_margin:
            return math.nan
        if outputs.shape[1] > 1:
            return float((outputs.argmax(1) == self.labels).double().mean())
        return float((outputs * self.targets > 0).double().mean())

    def degree(self, θ: Mapping[str, Tensor]) -> float | None:
        """L with Φ(2θ) = 2^L Φ(θ) for every image, to three digits; None if there is no such L."""
        outputs, twice = self.outputs(θ), self.outputs({name: 2 * p for name, p in θ.items()})
        scale = float((twice * outputs).sum() / (outputs**2).sum().clamp_min(tiny(outputs)))
        same = bool(torch.allclose(twice, scale * outputs, rtol=1e-3, atol=1e-3 * float(twice.abs().max())))
        return round(math.log2(scale), 2) if same and scale > 0 else None


def _targets(labels: Tensor, outputs: Tensor, loss: LossName) -> Tensor:
    """The targets of the outputs, after checking that labels, outputs and loss fit together."""
    n, C = outputs.shape
    if loss == "squared" and labels.dtype.is_floating_point and labels.numel() == outputs.numel():
        return labels.to(outputs).reshape(n, C)
    if labels.shape != (n,):
        raise InvalidInputError(f"labels have shape {tuple(labels.shape)}; give one for each of the {n} images")
    if C == 1 and loss != "cross_entropy":
        if not bool((labels.abs() == 1).all()):
            raise InvalidInputError("the labels do not fit a network with one output; give −1 and 1")
        return labels.to(outputs).reshape(n, 1)
    if loss == "logistic" or C == 1:
        raise InvalidInputError(f"{loss} loss does not fit {C} output(s); use logistic for 1, cross_entropy for more")
    if labels.dtype.is_floating_point or not bool(((labels >= 0) & (labels < C)).all()):
        raise InvalidInputError(f"the labels do not fit a network with {C} outputs; give integers from 0 to {C - 1}")
    return one_hot(labels.long(), C).to(outputs)


@fusible
def with_geometry(
    of_outputs: Sequence[Tensor], θ: Sequence[Tensor], gradient: Sequence[Tensor], decay: float, separable: bool
) -> tuple[Numbers, tuple[Tensor, ...]]:
    """The numbers of the outputs completed by those of θ and the gradient, and the gradient with weight decay.

    The KKT residual min_{c≥0} ‖θ + c∇L‖/‖θ‖ is the sine of the angle between θ and −∇L = Σ λ_i ∇m_i, and 1 if the angle
    is obtuse. It is the gap of a separable loss once all images are on the right side.
    """
    value, log_loss, gap, margin = of_outputs
    θ = [p.detach() for p in θ]
    norm, gradient_norm, inner = (
        torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
        for left, right in ((θ, θ), (gradient, gradient), (θ, gradient))
    )
    norm, gradient_norm = norm.sqrt(), gradient_norm.sqrt()
    kkt = torch.full_like(value, math.nan)
    if separable:
        cosine = -inner / (norm * gradient_norm).clamp_min(tiny(norm))
        kkt = (1 - cosine.clamp_min(0.0) ** 2).clamp_min(0.0).sqrt()
        gap = torch.where(margin > 0, kkt, torch.ones_like(kkt))
    if decay:
        value = value + 0.5 * decay * norm**2
        gradient_norm = (gradient_norm**2 + 2 * decay * inner + (decay * norm) ** 2).clamp_min(0).sqrt()
        gradient = [g + decay * p for g, p in zip(gradient, θ, strict=True)]
    return Numbers(value, log_loss, gap, margin, kkt, norm, gradient_norm), tuple(gradient)
