"""`palimpsest identify`: exact recovery of training data from the saved weights of a polynomial network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from palimpsest.errors import InvalidInputError, PalimpsestError, StorageError
from palimpsest.files import weights
from palimpsest.files.storage import write_atomically
from palimpsest.identifiability.recovery import Identification, identify
from palimpsest.identifiability.sources import (
    Evaluations,
    from_gradient,
    from_head_training,
    from_lazy_training,
    from_network,
)
from palimpsest.networks import PolynomialNetwork


@dataclass(frozen=True)
class IdentifyOptions:
    """Input files and known facts.

    Args:
        weights: Safetensors file with W (m, d), a (m,) and optionally b (m,). They must be a stationary point unless
            you give a gradient or initial weights.
        gradient: Safetensors file with a batch gradient at these weights, under the same names.
        initial: Safetensors file with the weights before training. Training must have changed the head alone, or all
            weights only slightly (lazy training).
        activation: Degree α of σ(t) = t^α, or the coefficients c_0, c_1, …, c_α of σ(t) = Σ_q c_q t^q.
        norm: Common norm of the samples, if known.
        count: Number of active samples, if known.
        noise: Relative error of the evaluations, if known.
        output: Safetensors file for the samples, their weights and the determined subspace.
    """

    weights: Path
    gradient: Path | None = None
    initial: Path | None = None
    activation: tuple[float, ...] = (3,)
    norm: float | None = None
    count: int | None = None
    noise: float | None = None
    output: Path | None = None


def run_identify(options: IdentifyOptions) -> tuple[int, str]:
    """Exit status and text: 0 with the certificate, 1 where recovery failed, 2 for wrong use."""
    output = options.output
    try:
        if output is not None and not output.parent.is_dir():
            raise InvalidInputError(f"there is no folder {output.parent} for the output; make it or choose another")
        found = _identify(options)
        if output is not None:
            tensors = {"samples": found.samples, "weights": found.weights, "subspace": found.subspace}
            write_atomically(output, save({name: t.contiguous() for name, t in tensors.items()}))
    except (InvalidInputError, StorageError) as error:
        return 2, str(error)
    except PalimpsestError as error:
        return 1, str(error)
    return 0, f"{len(found.samples)} samples recovered\n{found.certificate}"


def _identify(options: IdentifyOptions) -> Identification:
    network = _network(options.weights, options.activation)
    points, values = _evaluations(network, options)
    stationary = network if options.gradient is None and options.initial is None else None
    return identify(
        points, values, network.degree, bias=network.b is not None, norm=options.norm, count=options.count,
        noise=options.noise, network=stationary,
    )  # fmt: skip


def _evaluations(network: PolynomialNetwork, options: IdentifyOptions) -> Evaluations:
    if options.gradient is not None and options.initial is not None:
        raise InvalidInputError("both a gradient and initial weights were given; give one of them")
    if options.gradient is not None:
        return from_gradient(network, weights.load(options.gradient))
    if options.initial is None:
        return from_network(network)
    initial = _network(options.initial, options.activation)
    if torch.equal(initial.W.double(), network.W.double()):
        return from_head_training(initial, network)
    return from_lazy_training(initial, network)


def _network(path: Path, activation: tuple[float, ...]) -> PolynomialNetwork:
    tensors = weights.load(path)
    W, a, b = (tensors.get(name) for name in ("W", "a", "b"))
    if W is None or a is None or W.dim() != 2 or a.shape != W.shape[:1] or (b is not None and b.shape != a.shape):
        raise InvalidInputError(f"{path} holds no polynomial network; it needs W (m, d), a (m,) and perhaps b (m,)")
    if not all(t.is_floating_point() for t in (W, a, b) if t is not None):
        raise InvalidInputError(f"{path} holds weights that are no floating-point numbers; save them as float")
    network = PolynomialNetwork(W.shape[1], len(W), activation=_powers(activation), bias=b is not None).to(W.dtype)
    network.load_state_dict({name: t for name, t in tensors.items() if name in ("W", "a", "b")})
    return network


def _powers(activation: tuple[float, ...]) -> int | tuple[float, ...]:
    """A degree, where one number is given, or the coefficients."""
    if not all(math.isfinite(c) for c in activation) or (len(activation) == 1 and activation[0] % 1):
        given = " ".join(map(str, activation))
        raise InvalidInputError(f"activation is {given}; give a whole degree, or finite coefficients c_0 c_1 … c_α")
    return int(activation[0]) if len(activation) == 1 else activation
