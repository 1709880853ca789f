"""Sources of evaluations of f(w) = Σ_i b_i (x_i·w)^{α−1} x_i.

Every function returns ``points`` (m, d) and ``values``: f(w_j), (m, d), or the scalars p(w_j) = w_j·f(w_j) =
Σ_i b_i (x_i·w_j)^α, (m,). A network with biases counts as one on inputs (x, 1): the points are (W_j, b_j), and
`identify(..., bias=True)` recovers samples whose last coordinate is 1. Lower powers in the activation are fitted and
subtracted, so that the values are homogeneous.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NoGradientError
from palimpsest.identifiability.polynomials import monomial_count, monomials
from palimpsest.identifiability.problem import check_degree, check_finite
from palimpsest.networks import PolynomialNetwork

Evaluations = tuple[Tensor, Tensor]


def from_network(network: PolynomialNetwork) -> Evaluations:
    """Points and values for `identify` from a stationary point of the margin problem: f(W_j) = W_j/(α a_j).

    The certificate's misfit shows whether the network is stationary. This function does not check it.

    Examples:
        >>> points, values = from_network(PolynomialNetwork(3, 10, activation=3))
        >>> points.shape, values.shape
        (torch.Size([10, 3]), torch.Size([10, 3]))
    """
    w, (alive, a) = _rows(network), _alive_heads(network)
    values = w[alive] / (network.degree * network.coefficients[-1] * a)
    return w[alive], _leading_part(w[alive], values, network)


def from_gradient(network: PolynomialNetwork, gradient: Mapping[str, Tensor]) -> Evaluations:
    """Points and values for `identify` from one batch gradient: f(W_j) = ∇_{W_j}L/(α a_j).

    The weights of the samples are b_i = ∂L/∂Φ(x_i). The evaluations are stated at multiples of W_j that leave the
    gradient undivided, so that small a_j do not magnify its errors.

    Args:
        network: the network at which the gradient was taken.
        gradient: the gradient, keyed like ``network.named_parameters()``.

    Examples:
        >>> net = PolynomialNetwork(3, 10, activation=3)
        >>> net(torch.randn(4, 3)).sum().backward()
        >>> points, values = from_gradient(net, {name: p.grad for name, p in net.named_parameters()})
        >>> points.shape, values.shape
        (torch.Size([10, 3]), torch.Size([10, 3]))
    """
    return _undivided(network, _rows(network), _rows(network, gradient))


def from_lazy_training(initial: PolynomialNetwork, final: PolynomialNetwork, *, at: float | None = None) -> Evaluations:
    """Points and values for `identify` from the change of the weights: f(W_j) ≈ (W_j(1) − W_j(0))/(α a_j).

    W_j and a_j are taken between start and end. The error is of first order in the relative movement of the parameters.
    It is smallest at the average place of the gradients: half-way after many small steps, (k−1)/2k of the way after k.

    Args:
        initial: the network before training.
        final: the network after training.
        at: the fraction of the way from start to end. None finds it from the parameters.

    Examples:
        >>> start = PolynomialNetwork(3, 10, activation=3)
        >>> end = copy.deepcopy(start)
        >>> end(torch.randn(4, 3)).sum().backward()
        >>> torch.optim.SGD(end.parameters(), lr=1e-3).step()
        >>> from_lazy_training(start, end)[0].shape
        torch.Size([10, 3])
    """
    start, end = _states(initial, final)
    at = _place_of_gradients(initial, final, start, end) if at is None else at
    between = copy.deepcopy(initial)
    with torch.no_grad():
        between.a.lerp_(final.a, at)
    return _undivided(between, start.lerp(end, at), end - start)


def _place_of_gradients(initial: PolynomialNetwork, final: PolynomialNetwork, start: Tensor, end: Tensor) -> float:
    """The t at which W_j(t)·ΔW_j = α a_j(t) Δa_j holds best.

    Every gradient of a homogeneous network satisfies W_j·∇_{W_j} = α a_j ∇_{a_j} at its own weights.
    """
    α, moved = initial.degree, (final.a - initial.a).detach()
    if any(initial.coefficients[:-1]) or not moved.any():
        return 0.5
    defect = (start * (end - start)).sum(1) - α * initial.a.detach() * moved
    change = (end - start).square().sum(1) - α * moved.square()
    return float((-(defect @ change) / change.square().sum()).clamp(0, 0.5))


def from_head_training(initial: PolynomialNetwork, final: PolynomialNetwork) -> Evaluations:
    """Points and values for `identify` after training the head alone, without weight decay: p(W_j) = a_j − a_j(0).

    Each step of (S)GD adds to a_j a multiple of σ(W_j·x_i) for each sample. W_j never moves, so the sum is exact.

    Examples:
        >>> start = PolynomialNetwork(3, 10, activation=3)
        >>> end = copy.deepcopy(start)
        >>> end(torch.randn(4, 3)).sum().backward()
        >>> torch.optim.SGD([end.a], lr=1e-3).step()
        >>> from_head_training(start, end)[1].shape
        torch.Size([10])
    """
    w, same = _states(initial, final)
    if not torch.equal(w, same):
        raise InvalidInputError("W or b changed, so not only the head was trained; use from_lazy_training")
    values = (final.a - initial.a).detach() / initial.coefficients[-1]
    return w, _leading_part(w, values, initial)


def _states(initial: PolynomialNetwork, final: PolynomialNetwork) -> tuple[Tensor, Tensor]:
    """The rows (W_j, b_j) before and after."""
    start, end = _rows(initial), _rows(final)
    check_finite("the head weights", initial.a, final.a)
    same_kind = start.dtype == end.dtype and initial.a.dtype == final.a.dtype
    if start.shape != end.shape or initial.coefficients != final.coefficients or not same_kind:
        raise InvalidInputError("the networks differ in shape, activation or precision; give states of one network")
    return start, end


def _rows(network: PolynomialNetwork, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """The rows (W_j, b_j), or W_j without a bias, of the network's own parameters or of a gradient."""
    check_degree(network.degree)
    own = {name: p.detach() for name, p in network.named_parameters() if name != "a"}
    given = own if parameters is None else parameters
    for name, parameter in own.items():
        if (block := given.get(name)) is None or block.shape != parameter.shape:
            raise InvalidInputError(f"the gradient does not contain {name} of shape {tuple(parameter.shape)}; add it")
    blocks = [given[name].detach() for name in own]
    check_finite("the weights or the gradient", *blocks)
    return torch.cat([block.reshape(len(network.W), -1) for block in blocks], 1)


def _alive_heads(network: PolynomialNetwork) -> tuple[Tensor, Tensor]:
    """Which a_j are not zero to working precision, (m,), and those as a column."""
    a = network.a.detach()
    check_finite("the head weights", a)
    if not a.any():
        raise NoGradientError("every head weight a_j is zero, so W does not depend on the data; train the head")
    alive = a.abs() > torch.finfo(a.dtype).eps * a.abs().max()
    return alive, a[alive, None]


def _undivided(network: PolynomialNetwork, w: Tensor, numerators: Tensor) -> Evaluations:
    """f(c_j w_j) with c_j^{α−1} = |a_j|/ā, for the mean ā of |a_j|: numerators times sign(a_j)/(α c_α ā)."""
    alive, a = _alive_heads(network)
    w, a, numerators = w[alive], a.to(w), numerators.to(w)[alive]
    share = a.abs() / a.abs().mean()
    values = _leading_part(w, numerators / (network.degree * network.coefficients[-1] * a), network)
    return share ** (1 / (network.degree - 1)) * w, share * values


def _leading_part(w: Tensor, values: Tensor, network: PolynomialNetwork) -> Tensor:
    """Subtract what lower powers of the activation contribute to the values.

    A polynomial of degree q in w is homogeneous of degree q in (w, 1): fit it, and keep the monomials without the
    last variable. The residual of the fit stays in the result, and the certificate's misfit shows it.
    """
    degree = network.degree - (values.dim() - 1)
    if not any(network.coefficients[network.degree - degree : -1]):
        return values
    F = values.to(torch.float64).reshape(len(values), -1)
    if values.dim() == 2:  # f lies in the span of the samples: interpolate there
        _, σ, Vh = torch.linalg.svd(F, full_matrices=False)
        U = Vh[σ > 100 * torch.finfo(values.dtype).eps * σ[0]].T
        F, u = F @ U, w.to(torch.float64) @ U
    else:
        U, u = F.new_ones(1, 1), w.to(torch.float64)
    needed = monomial_count(u.shape[1] + 1, degree)
    if len(u) < needed:
        raise InvalidInputError(f"{len(u)} neurons cannot separate the activation's powers; use at least {needed}")
    scale = u.norm(dim=1).square().mean().sqrt()  # brings the constant to the size of the other variables
    lifted = torch.cat([u / scale, u.new_ones(len(u), 1)], 1)
    V = monomials(lifted, degree)
    leading = monomials(torch.cat([u / scale, u.new_zeros(len(u), 1)], 1), degree)
    lower = (V - leading) @ torch.linalg.lstsq(V, F, driver="gelsy").solution
    return (values.to(torch.float64) - (lower @ U.T).reshape(values.shape)).to(values)
