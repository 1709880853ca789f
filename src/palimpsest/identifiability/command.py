"""`palimpsest identify`: what the saved weights of a polynomial network determine about its training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from palimpsest import weights
from palimpsest.errors import InvalidInputError, PalimpsestError
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
    """What to read, and what is known.

    Args:
        weights: safetensors file with W (m, d), a (m,) and perhaps b (m,): a stationary point, unless one of
            the next two is given.
        gradient: safetensors file with a batch gradient at these weights, under the same names.
        initial: safetensors file with the weights before training of the head, or of all in a lazy regime.
        activation: degree α of σ(t) = t^α, or the coefficients c_0, c_1, …, c_α of σ(t) = Σ_q c_q t^q.
        norm: the common norm of the samples, where known.
        count: the number of active samples, where known.
        noise: relative error of the evaluations, where known.
        output: safetensors file to write samples, weights and the determined subspace to.
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
    try:
        found = _identify(options)
    except InvalidInputError as error:
        return 2, str(error)
    except PalimpsestError as error:
        return 1, str(error)
    if options.output is not None:
        save_file(
            {"samples": found.samples, "weights": found.weights, "subspace": found.subspace.contiguous()},
            options.output,
        )
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
    if torch.equal(initial.W, network.W):
        return from_head_training(initial, network)
    return from_lazy_training(initial, network)


def _network(path: Path, activation: tuple[float, ...]) -> PolynomialNetwork:
    tensors = weights.load(path)
    W, a, b = (tensors.get(name) for name in ("W", "a", "b"))
    if (
        W is None
        or a is None
        or not W.is_floating_point()
        or W.dim() != 2
        or a.shape != W.shape[:1]
        or (b is not None and b.shape != a.shape)
    ):
        raise InvalidInputError(f"{path} holds no polynomial network; it needs W (m, d), a (m,) and perhaps b (m,)")
    network = PolynomialNetwork(
        W.shape[1],
        len(W),
        activation=int(activation[0]) if len(activation) == 1 else activation,
        bias=b is not None,
    ).to(W.dtype)
    network.load_state_dict({name: t for name, t in tensors.items() if name in ("W", "a", "b")})
    return network
