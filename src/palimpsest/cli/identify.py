"""`palimpsest identify`: exact recovery of training data from the saved weights of a polynomial network."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from palimpsest.cli.shared import CommandFailedError
from palimpsest.errors import InvalidInputError, PalimpsestError
from palimpsest.files import weights
from palimpsest.files.storage import write_atomically
from palimpsest.identifiability import sources
from palimpsest.identifiability.recovery import Identification, identify
from palimpsest.networks import PolynomialNetwork


@dataclass(frozen=True)
class Identify:
    """Recover training data exactly from the saved weights of a polynomial network.

    Needs a stationary point, a batch gradient, or the weights before and after training; see docs/identifiability.md.
    Prints a certificate that states which samples are identified.

        palimpsest identify --weights net.safetensors --gradient gradient.safetensors --output samples.safetensors
    """

    weights: Path
    """Safetensors file with W (m, d), a (m,) and optionally b (m,): a stationary point, if nothing else is given."""
    gradient: Path | None = None
    """Safetensors file with a batch gradient at these weights, under the same names."""
    initial: Path | None = None
    """Safetensors file with the weights before training that changed the head alone, or all weights only slightly."""
    activation: tuple[float, ...] = (3,)
    """Degree α of σ(t) = t^α, or the coefficients c_0, c_1, …, c_α of σ(t) = Σ_q c_q t^q."""
    norm: float | None = None
    """Common norm of the samples, if known."""
    count: int | None = None
    """Number of active samples, if known."""
    noise: float | None = None
    """Relative error of the evaluations, if known."""
    output: Path | None = None
    """Safetensors file for the samples, their weights and the determined subspace."""

    def run(self) -> None:
        if self.output is not None and not self.output.parent.is_dir():
            raise InvalidInputError(f"there is no folder {self.output.parent} for --output; make it or choose another")
        try:
            found = self.identification()
        except InvalidInputError:
            raise
        except PalimpsestError as error:
            raise CommandFailedError(str(error)) from error
        if self.output is not None:
            tensors = {"samples": found.samples, "weights": found.weights, "subspace": found.subspace}
            write_atomically(self.output, save({name: t.contiguous() for name, t in tensors.items()}))
        print(f"{len(found.samples)} samples recovered\n{found.certificate}")

    def identification(self) -> Identification:
        network = _network(self.weights, self.activation)
        points, values = self._evaluations(network)
        stationary = network if self.gradient is None and self.initial is None else None
        return identify(
            points, values, network.degree, bias=network.b is not None, norm=self.norm, count=self.count,
            noise=self.noise, network=stationary,
        )  # fmt: skip

    def _evaluations(self, network: PolynomialNetwork) -> sources.Evaluations:
        if self.gradient is not None and self.initial is not None:
            raise InvalidInputError("both a gradient and initial weights were given; give one of them")
        if self.gradient is not None:
            return sources.from_gradient(network, weights.load(self.gradient))
        if self.initial is None:
            return sources.from_network(network)
        initial = _network(self.initial, self.activation)
        if torch.equal(initial.W.double(), network.W.double()):
            return sources.from_head_training(initial, network)
        return sources.from_lazy_training(initial, network)


def _network(path: Path, activation: tuple[float, ...]) -> PolynomialNetwork:
    tensors = weights.load(path)
    W, a, b = (tensors.get(name) for name in ("W", "a", "b"))
    if W is None or a is None or W.dim() != 2 or a.shape != W.shape[:1] or (b is not None and b.shape != a.shape):
        raise InvalidInputError(f"{path} is not a polynomial network; save W (m, d), a (m,) and optionally b (m,)")
    if not all(t.is_floating_point() for t in (W, a, b) if t is not None):
        raise InvalidInputError(f"{path} does not hold floating-point numbers; save the weights as float")
    network = PolynomialNetwork(W.shape[1], len(W), activation=_powers(activation), bias=b is not None).to(W.dtype)
    network.load_state_dict({name: t for name, t in tensors.items() if name in ("W", "a", "b")})
    return network


def _powers(activation: tuple[float, ...]) -> int | tuple[float, ...]:
    """A degree, where one number is given, or the coefficients."""
    if not all(math.isfinite(c) for c in activation) or (len(activation) == 1 and activation[0] % 1):
        given = " ".join(map(str, activation))
        raise InvalidInputError(f"activation is {given}; give a whole degree, or finite coefficients c_0 c_1 … c_α")
    return int(activation[0]) if len(activation) == 1 else activation
