"""Exact recovery: from evaluations of f to the samples, with a certificate.

1. The span of the samples, from the values.
2. T on the span, by interpolation.
3. The terms of T, by simultaneous diagonalisation.
4. The samples, by Gauss–Newton on the values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.identifiability import partial
from palimpsest.identifiability.certificate import (
    Extent,
    IdentifiabilityCertificate,
    claim,
    margins,
    no_more_active_than,
    open_questions,
    scale_is_known,
)
from palimpsest.identifiability.decomposition import Terms, decompose, orders
from palimpsest.identifiability.interpolation import DENSE_LIMIT, Interpolant, interpolate
from palimpsest.identifiability.lowrank import complete
from palimpsest.identifiability.partial import SampleSpan
from palimpsest.identifiability.polynomials import distinct_directions, monomial_count
from palimpsest.identifiability.problem import Problem
from palimpsest.identifiability.refinement import Refined, model, propagate, refine, samples_and_weights, weighed
from palimpsest.networks import PolynomialNetwork

LARGEST_ERROR = 1e-2
"""A sample with a larger expected error, as a fraction of its norm, does not count as determined."""

RETRY_LIMIT = 400
"""The largest problem, in unknowns n·d, for which further slices are tried. A larger one takes minutes."""


@dataclass(frozen=True)
class Identification:
    """The recovered samples and their certificate.

    Attributes:
        samples: x_i, (n, d), only those that are determined. Without a bias, the sign is chosen so that the coordinates
            sum to a positive number, and the norm is 1 or the one given.
        weights: b_i, (n,).
        certificate: the verdict and its evidence.
        subspace: orthonormal basis (d, r) of the determined part of the span of the active samples.
    """

    samples: Tensor
    weights: Tensor
    certificate: IdentifiabilityCertificate
    subspace: Tensor


def identify(
    points: Tensor | np.ndarray,
    values: Tensor | np.ndarray,
    degree: int = 3,
    *,
    bias: bool = False,
    norm: float | None = None,
    count: int | None = None,
    noise: float | None = None,
    network: PolynomialNetwork | None = None,
    seed: int = 0,
) -> Identification:
    """Recover x_i and b_i from values[j] = f(points[j]), or say why this is not possible.

        f(w) = Σ_i b_i (x_i·w)^{α−1} x_i

    Args:
        points: w_j, (m, d).
        values: f(w_j), (m, d), or the scalars p(w_j) = w_j·f(w_j), (m,).
        degree: α, at least 3.
        bias: whether the last coordinate of every sample is the constant 1 of a bias. It fixes sign and norm. The
            returned samples do not contain it.
        norm: the common norm of the samples, if known.
        count: the number of active samples, if known. Without it the verdict is conditional: the answer is the only
            dataset of at most its own size, but α samples in one plane can imitate two.
        noise: the standard deviation of the error of the values, relative to their root mean square. None assumes the
            accuracy of their floating-point type. If they are less accurate, up to 1e-3 is tried. The verdict then
            assumes that the misfit is noise.
        network: the stationary point that the values were taken from, to compare margins, scale and labels.
        seed: the seed of the random slices.

    Examples:
        >>> x = torch.nn.functional.normalize(torch.randn(4, 5, dtype=torch.float64), dim=1)
        >>> w = torch.randn(20, 5, dtype=torch.float64)
        >>> found = identify(w, (w @ x.T) ** 2 @ x, degree=3)
        >>> bool((found.samples @ x.T).abs().max(0).values.min() > 1 - 1e-12)
        True
    """
    problem = Problem.prepare(points, values, degree, bias, norm, count, noise)
    if not problem.values.any():
        return _refused(problem, "every value is zero, so no sample is active")
    first, misfits = None, dict[int, float]()
    for level in problem.levels:
        trial = replace(problem, noise=level)
        if misfits.get(trial.rank, 0.0) > trial.allowed:
            continue  # the same span leaves the same misfit
        if not trial.scalar and monomial_count(max(1, trial.rank), degree - 1) > DENSE_LIMIT:
            continue
        found = _solve(trial, network, seed)
        first = first or found
        evidence = found.certificate
        if evidence.verdict is not Extent.NOT_IDENTIFIED or evidence.interpolation_misfit <= level:
            return found  # a claim, or values without more noise than this
        misfit = evidence.interpolation_misfit if trial.scalar else evidence.misfit
        misfits[trial.rank] = misfit if misfit > 0 else torch.inf
    if first is None:
        raise InvalidInputError(
            f"the samples span {problem.rank} dimensions, which need more than {DENSE_LIMIT} monomials; "
            "give the noise if the span should be smaller, or project the data"
        )
    return first


def _solve(problem: Problem, network: PolynomialNetwork | None, seed: int) -> Identification:
    """Recovery from values of known accuracy."""
    if problem.rank == 0:
        return _refused(problem, "no sample exceeds the noise")
    span, T = _interpolate(problem, seed)
    m = len(problem.points)
    if not T.determined:
        reason = (
            f"{m} evaluations give rank {T.rank}, but samples that span {span.dimension} dimensions need {T.needed}, "
            "and many datasets share these values"
        )
        return _refused(problem, reason, span, T)
    if not _checked(problem, span):
        return _refused(problem, f"{m} evaluations fit any samples; more are needed as a check", span, T)
    span, T = _reduced(problem, span, T)
    least = torch.inf
    for attempt in _attempts(problem, T, span, seed):
        if attempt.misfit <= _allowed(problem, T, attempt):
            return _conclude(problem, T, attempt, span, network)
        least = min(least, attempt.misfit)
    return _in_part(problem, T, _start(problem, T, span, 1, seed), span, least)


@dataclass(frozen=True)
class _Attempt:
    """Terms of T, and samples fitted from them. The embedding maps the coordinates of the fit to all coordinates."""

    terms: Terms
    fit: Refined
    signs: Tensor
    embedding: Tensor
    misfit: float

    @property
    def z(self) -> Tensor:
        return self.fit.z @ self.embedding.T


def _refused(
    problem: Problem,
    reason: str,
    span: SampleSpan | None = None,
    T: Interpolant | None = None,
    misfit: float = torch.nan,
) -> Identification:
    """No samples, only the span if it is known; the misfit is that of the best samples."""
    d, nothing = problem.points.shape[1], problem.points.new_zeros(0)
    span = span or SampleSpan(problem.points.new_zeros(d, 0), nothing)
    T = T or Interpolant(nothing, 0, 0, 0.0, torch.nan, nothing)
    certificate = IdentifiabilityCertificate(
        verdict=Extent.NOT_IDENTIFIED, reason=reason, most_active=None, not_identified=("the samples",),
        degree=problem.degree, dimension=d, reduced_dimension=span.dimension, evaluations=len(problem.points),
        needed=T.needed, rank=T.rank, family=T.needed - T.rank, interpolation_misfit=T.misfit, misfit=misfit,
        noise=problem.noise, interpolation_conditioning=T.conditioning, sample_conditioning=torch.nan,
        jacobian_conditioning=torch.nan, error_per_noise=nothing, direction_bounds=span.bounds,
    )  # fmt: skip
    return Identification(problem.points.new_zeros(0, d - problem.bias), nothing, certificate, span.basis)


def _interpolate(problem: Problem, seed: int) -> tuple[SampleSpan, Interpolant]:
    """The span of the samples, which only vector values reveal beforehand, and T on it."""
    w, F = problem.points, problem.values
    if problem.scalar:
        basis = torch.eye(w.shape[1], dtype=w.dtype)
        if monomial_count(w.shape[1], problem.degree) <= min(len(w), DENSE_LIMIT):
            T = interpolate(w, F, problem.degree)
        else:
            basis, T = complete(w, F, problem.degree, seed=seed)
        return SampleSpan(basis, w.new_full((basis.shape[1],), torch.nan)), T
    span = partial.span(F, problem.noise)
    return span, interpolate(w @ span.basis, F @ span.basis, problem.degree)


def _checked(problem: Problem, span: SampleSpan) -> bool:
    """Whether evaluations outnumber what they determine: the dimension of the span, and the entries of T on it.

    If every independent evaluation brings a new direction, as at the minimum of the margin problem, the next one
    might bring one too. The rank of K_pq = (w_p·w_q)^{α−1} counts independent evaluations.
    """
    (m, d), r, distinct = problem.points.shape, span.dimension, distinct_directions(problem.points)
    if d == 1:
        return True  # on a line every tensor is one term, and every sample has that direction
    if problem.scalar:  # r < d: a completion, which has its own reserve
        return r < d or distinct > monomial_count(r, problem.degree)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(0))
    some = torch.nn.functional.normalize(problem.points[order[: max(4 * r, 200)]], dim=1)
    K = (some @ some.T) ** (problem.degree - 1)
    independent = int(torch.linalg.matrix_rank(K, hermitian=True, rtol=1e-12))
    return independent > r and distinct * r > monomial_count(r, problem.degree)


def _reduced(problem: Problem, span: SampleSpan, T: Interpolant) -> tuple[SampleSpan, Interpolant]:
    """T on the span of the samples, which scalar values reveal only now."""
    if not problem.scalar:
        return span, T
    left, σ, _ = torch.linalg.svd(T.tensor.flatten(1), full_matrices=False)
    kept = left[:, σ > min(3 * T.tensor_error(problem.noise), 0.5 * float(σ[0]))]
    tensor = T.tensor
    for _ in range(problem.degree):
        tensor = torch.tensordot(tensor, kept, dims=([0], [0]))
    return SampleSpan(span.basis @ kept, span.bounds[: kept.shape[1]]), replace(T, tensor=tensor)


def _start(problem: Problem, T: Interpolant, span: SampleSpan, p: int, seed: int) -> _Attempt:
    """The terms of T in the coordinates of the fit: those of the span, or of all space for scalar values."""
    U = span.basis
    terms = decompose(T.tensor, p, noise=min(1e-3, 10 * problem.noise / T.conditioning), seed=seed)
    embedding = torch.eye(len(U), dtype=U.dtype) if problem.scalar else U
    z = terms.weights.abs().pow(1 / problem.degree)[:, None] * (terms.samples @ U.T @ embedding)
    return _Attempt(terms, Refined(z, None, torch.nan, 0), terms.weights.sign(), embedding, torch.inf)


def _attempts(problem: Problem, T: Interpolant, span: SampleSpan, seed: int) -> Iterator[_Attempt]:
    """Fits of the terms of T: from one set of slices, then with damping from others, because noise may spoil slices."""
    for p in orders(problem.degree):
        yield _fit(problem, _start(problem, T, span, p, seed))
    if T.misfit > problem.allowed or problem.points.shape[1] * span.dimension > RETRY_LIMIT:
        return
    for p, again in product(orders(problem.degree), range(1, 9)):
        yield _fit(problem, _start(problem, T, span, p, seed + again), damping=1e-3)


def _fit(problem: Problem, start: _Attempt, damping: float = 0.0) -> _Attempt:
    """Refine the terms on the values. The misfit counts all values, in all directions."""
    if not torch.isfinite(start.z).all():
        return start
    w, F = problem.points @ start.embedding, problem.values
    inside, z, signs = F if problem.scalar else F @ start.embedding, start.fit.z, start.signs
    if damping:
        z, signs = weighed(w, inside, z, problem.degree)
    fit = refine(w, inside, z, signs, problem.degree, damping=damping)
    fitted = model(w, fit.z, signs, problem.degree, scalar=problem.scalar)
    residual = F - (fitted if problem.scalar else fitted @ start.embedding.T)
    rested = fit.converged or not damping  # without damping, Gauss–Newton starts close and stops at rounding
    return replace(start, fit=fit, signs=signs, misfit=float(residual.norm() / F.norm()) if rested else torch.inf)


def _allowed(problem: Problem, T: Interpolant, attempt: _Attempt) -> float:
    """The largest misfit that noise explains in these samples, given the misfit of T.

    T has k unknowns more than the samples, so Gaussian noise of the declared size ε separates the squared misfits
    by ε² χ²_k per equation, and P(χ²_k ≥ k + 2√(kt) + 2t) ≤ e^{−t} (Laurent and Massart).
    """
    if not problem.declared or not len(T.factor):
        return problem.allowed
    F, U = problem.values, attempt.embedding
    inside = F if problem.scalar else F @ U
    outside = 0.0 if problem.scalar else float((F - inside @ U.T).square().sum())
    least = (T.misfit**2 * float(inside.square().sum()) + outside) / float(F.square().sum())
    k = max(1, monomial_count(U.shape[1], problem.degree) - attempt.fit.z.numel())
    apart = k + 2 * (15 * k) ** 0.5 + 30
    return min(problem.allowed, (least + problem.noise**2 * apart / F.numel()) ** 0.5)


def _conclude(
    problem: Problem, T: Interpolant, attempt: _Attempt, span: SampleSpan, network: PolynomialNetwork | None
) -> Identification:
    """Samples in the caller's units, their expected errors, and the verdict."""
    if problem.estimated:
        equations = len(problem.points) * (1 if problem.scalar else attempt.fit.z.shape[1])
        spare = max(1e-2, 1 - attempt.fit.z.numel() / equations)
        problem = replace(problem, noise=max(problem.rounding, attempt.misfit / spare**0.5))
    samples, weights, errors = _in_units(problem, attempt, T)
    size = (samples.square().sum(1) + problem.bias).sqrt()
    sure = errors * problem.noise <= LARGEST_ERROR * size
    compared = None if network is None else margins(network, samples, weights)
    if compared is not None and scale_is_known(problem, compared):
        weights = weights * compared.scale ** (problem.degree - 1)
    verdict, reason, open_ = claim(problem, sure, span.dimension, attempt.fit.nullity, compared)
    refused = verdict is Extent.NOT_IDENTIFIED
    sure &= not refused
    certificate = replace(
        _refused(problem, reason, span, T, attempt.misfit).certificate, verdict=verdict, not_identified=open_,
        most_active=None if refused or problem.count else len(sure), family=attempt.fit.nullity,
        sample_conditioning=attempt.terms.conditioning, jacobian_conditioning=attempt.fit.conditioning,
        error_per_noise=errors[sure], margins=compared,
    )  # fmt: skip
    return Identification(samples[sure], weights[sure], certificate, span.basis)


def _in_units(problem: Problem, attempt: _Attempt, T: Interpolant) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, weights and expected errors per unit of relative noise."""
    x, b, derivative = samples_and_weights(
        attempt.z, attempt.signs, problem.degree, bias=problem.bias, norm=problem.norm or 1.0
    )
    errors = propagate(derivative, *_variance(problem, attempt, T), attempt.embedding)
    return x, b * problem.unit, errors.nan_to_num(nan=torch.inf)


def _variance(problem: Problem, attempt: _Attempt, T: Interpolant) -> tuple[Tensor, Tensor]:
    """Variance of z_i for unit noise: a block per sample, and that of each coordinate outside the span.

    Outside the span, z is the regression of the values on h_ji = (w_j·z_i)^{α−1}. If the normal matrix was not
    formed, z_i ∝ f(u_i) to first order, and the error is that of the interpolated f.
    """
    z, (n, k) = attempt.fit.z, attempt.fit.z.shape
    if attempt.fit.covariance is not None:
        i = torch.arange(n)
        h = (problem.points @ attempt.z.T) ** (problem.degree - 1)
        return attempt.fit.covariance[i, :, i, :], torch.linalg.pinv(h.T @ h, hermitian=True).diagonal()
    if problem.scalar or attempt.terms.duals.shape[1] != k:
        return z.new_full((n, k, k), torch.inf), z.new_full((n,), torch.inf)
    gain = T.noise_gain(attempt.terms.duals) * z.norm(dim=1) / attempt.terms.weights.abs()
    return gain.square()[:, None, None] * torch.eye(k, dtype=z.dtype), gain.square()


def _in_part(problem: Problem, T: Interpolant, start: _Attempt, span: SampleSpan, misfit: float) -> Identification:
    """T is not a sum of independent terms to within the noise. Keep the terms that split off."""
    if T.misfit > problem.allowed:
        completed = problem.scalar and not len(T.factor)
        best = "no tensor of few terms fits the values" if completed else "no f fits the values"
        where = f" in the {span.dimension} dimensions that exceed the noise" if problem.declared else ""
        reason = f"{best}{where}: the smallest misfit is {T.misfit:.1e}, but noise explains {problem.allowed:.1e}"
        return _refused(problem, reason, span, T, misfit)
    kept, errors = _split_off(problem, T, start)
    reason = f"{int(kept.sum())} terms split off; the samples are linearly dependent, too many or too similar"
    refusal = _refused(problem, reason, span, T, misfit)
    if not kept.any():
        return refusal
    most = None if problem.count else span.dimension + 1
    samples, weights, _ = _in_units(problem, start, T)
    certificate = replace(
        refusal.certificate, verdict=Extent.IN_PART, most_active=most,
        reason=reason if most is None else f"{reason}; the returned ones are samples if {no_more_active_than(most)}",
        error_per_noise=errors[kept], not_identified=open_questions(problem),
        sample_conditioning=start.terms.conditioning,
    )  # fmt: skip
    return Identification(samples[kept], weights[kept], certificate, span.basis)


def _split_off(problem: Problem, T: Interpolant, start: _Attempt) -> tuple[Tensor, Tensor]:
    """Which terms are samples if no more than r + 1 are active, and the expected errors per unit of noise."""
    defects = partial.split_off(T.tensor, start.terms)
    errors = _in_units(problem, start, T)[2]
    errors += defects.sqrt() / problem.noise  # two samples this close together would look like one
    tolerance = 100 * problem.noise / (T.conditioning * start.terms.conditioning**2)
    kept = start.terms.genuine & (defects <= tolerance) & (errors * problem.noise <= LARGEST_ERROR)
    if problem.estimated or problem.count not in (None, T.tensor.shape[0] + 1):
        return torch.zeros_like(kept), errors
    # Neither the noise nor the change that splits the term off entirely may make T decompose.
    distances = 10 * T.tensor_error(problem.noise) + defects * start.terms.weights.abs()
    proved = [partial.is_indecomposable(T.tensor, float(distance)) for distance in distances]
    return kept & torch.tensor(proved), errors
