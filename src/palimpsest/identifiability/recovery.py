"""Exact recovery: from evaluations of f to the samples, with a certificate.

    evaluations → span of the samples → T by interpolation → terms by simultaneous diagonalisation → Gauss–Newton
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.identifiability import partial
from palimpsest.identifiability.certificate import Certificate, Margins, Verdict, margins
from palimpsest.identifiability.decomposition import Terms, decompose, orders
from palimpsest.identifiability.interpolation import DENSE_LIMIT, Interpolant, interpolate
from palimpsest.identifiability.lowrank import complete
from palimpsest.identifiability.polynomials import kernel, monomial_count
from palimpsest.identifiability.readout import propagate, samples_and_weights
from palimpsest.identifiability.refinement import Refined, model, refine
from palimpsest.networks import PolynomialNetwork

LARGEST_ERROR = 1e-2
"""A sample whose expected error exceeds this fraction of its norm is not called determined."""


@dataclass(frozen=True)
class Identification:
    """Recovered samples, and what vouches for them.

    Attributes:
        samples: x_i, (n, d); only those that are determined. Without a bias the sign is chosen to make the
            coordinates sum to a positive number, and the norm is 1 or the one given.
        weights: b_i, (n,).
        certificate: the verdict and its evidence.
        subspace: orthonormal basis (d, r) of the part of the span of the active samples that is determined.
    """

    samples: Tensor
    weights: Tensor
    certificate: Certificate
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
    """Recover x_i and b_i from values[j] = f(points[j]), f(w) = Σ_i b_i (x_i·w)^{α−1} x_i, or say why not.

    Args:
        points: w_j, (m, d).
        values: f(w_j), (m, d), or the scalars p(w_j) = w_j·f(w_j), (m,).
        degree: α, at least 3.
        bias: whether the last coordinate of every sample is the constant 1 of a bias. It fixes sign and norm, and
            is not part of the returned samples.
        norm: the common norm of the samples, where it is known.
        count: the number of active samples, where it is known. Without it the verdict is conditional: the answer is
            the only data set of at most its own size, but α samples in one plane can imitate two others.
        noise: standard deviation of the error of the values, relative to their root mean square. By default the
            values are taken to be as accurate as their floating-point type. If they turn out not to be, up to 1e-3
            is tried, and the verdict depends on the misfit being noise.
        network: the stationary point the values came from, to compare margins, scale and labels.
        seed: of the random slices.

    >>> x = torch.nn.functional.normalize(torch.randn(4, 5, dtype=torch.float64), dim=1)
    >>> w = torch.randn(20, 5, dtype=torch.float64)
    >>> found = identify(w, (w @ x.T) ** 2 @ x, degree=3)
    >>> bool((found.samples @ x.T).abs().max(0).values.min() > 1 - 1e-12)
    True
    """
    problem = _Problem.prepare(points, values, degree, bias, norm, count, noise)
    if not problem.values.any():
        return problem.undetermined("every value is zero, so no sample is active")
    first, misfits = None, dict[int, float]()
    for level in problem.levels:
        trial = replace(problem, noise=level)
        if misfits.get(trial.rank, 0.0) > trial.allowed:
            continue  # the same span leaves the same misfit
        found = _solve(trial, network, seed)
        consistent = found.certificate.interpolation_misfit <= trial.allowed  # no more noise than this
        if consistent or found.certificate.verdict is not Verdict.NOT_IDENTIFIED:
            return found
        first = first or found
        misfit = found.certificate.interpolation_misfit if trial.scalar else found.certificate.misfit
        misfits[trial.rank] = misfit if misfit > 0 else torch.inf
    return first


def _solve(problem: _Problem, network: PolynomialNetwork | None, seed: int) -> Identification:
    """Recovery from values of known accuracy."""
    basis, bounds, interpolant = _interpolate(problem, seed)
    if not basis.shape[1]:
        return problem.undetermined("no sample stands out of the noise")
    if interpolant.tensor is None:
        return problem.undetermined(_shortage(problem, interpolant, basis), basis, bounds, interpolant)
    if not _checked(problem, basis):
        reason = f"{len(problem.points)} evaluations are just enough to fit anything; one more is needed as a check"
        return problem.undetermined(reason, basis, bounds, interpolant)
    T, U = _reduce(problem, interpolant.tensor, basis, interpolant)
    if not U.shape[1]:
        return problem.undetermined("no sample stands out of the noise", U, bounds[:0], interpolant)
    best = torch.inf
    for p in orders(problem.degree):
        attempt = _fit(problem, _start(problem, interpolant, T, U, p, seed))
        if attempt.misfit <= problem.allowed:
            return _conclude(problem, interpolant, attempt, U, bounds, network)
        best = min(best, attempt.misfit)
    return _in_part(problem, interpolant, T, U, bounds, seed, best)


@dataclass(frozen=True)
class _Problem:
    """Validated evaluations in double precision, points and values scaled to unit root mean square."""

    points: Tensor
    values: Tensor
    degree: int
    bias: bool
    norm: float | None
    count: int | None
    noise: float
    rounding: float  # the least noise
    declared: bool  # whether the caller vouches for the noise
    unit: float  # weights in the caller's units per weight in ours

    @classmethod
    def prepare(cls, points, values, degree, bias, norm, count, noise) -> _Problem:
        w, F = torch.as_tensor(points).detach(), torch.as_tensor(values).detach()
        if degree < 3:
            raise InvalidInputError(
                f"degree {degree} determines only a moment of the data (see counterexample); use degree 3 or more"
            )
        if w.dim() != 2 or F.shape not in (w.shape, w.shape[:1]) or not w.numel():
            raise InvalidInputError(
                f"points {tuple(w.shape)} and values {tuple(F.shape)} do not fit; give (m, d) and (m, d) or (m,)"
            )
        if norm is not None and (bias or not norm > 0):
            raise InvalidInputError("norm must be positive, and a bias already fixes it; give one of the two")
        if not (torch.isfinite(w).all() and torch.isfinite(F).all()):
            raise NonFiniteError("points or values hold NaN or infinity; leave those evaluations out")
        kinds = [t.dtype for t in (w, F) if t.is_floating_point()]
        rounding = 100 * max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float64).eps)
        w, F = w.to("cpu", torch.float64), F.to("cpu", torch.float64)
        ω, ν = (float(t.square().mean().sqrt()) or 1.0 for t in (w, F))
        unit = ν / ω ** (degree - 1 if F.dim() == 2 else degree)
        return cls(w / ω, F / ν, degree, bias, norm, count, noise or rounding, rounding, noise is not None, unit)

    @property
    def scalar(self) -> bool:
        return self.values.dim() == 1

    @property
    def levels(self) -> list[float]:
        """Noise to presume: the declared one, or else rounding, then ever more of it."""
        more = [] if self.declared else [10.0**k for k in range(-13, -2) if 10.0**k > 2 * self.noise]
        return [self.noise, *more]

    @property
    def estimated(self) -> bool:
        return not self.declared and self.noise > self.rounding

    @property
    def rank(self) -> int:
        """Dimension of the span of the samples at the presumed noise; vector values only."""
        return -1 if self.scalar else partial.span(self.values, self.noise)[0].shape[1]

    @property
    def allowed(self) -> float:
        """The largest relative misfit that the noise explains."""
        return 5 * self.noise

    def undetermined(self, reason, basis=None, bounds=None, interpolant=None) -> Identification:
        """No samples; the span where it is known."""
        d = self.points.shape[1]
        basis = self.points.new_zeros(d, 0) if basis is None else basis
        bounds = self.points.new_zeros(0) if bounds is None else bounds
        fit = interpolant or Interpolant(None, 0, 0, 0.0, torch.nan, self.points.new_zeros(0, 0))
        certificate = Certificate(
            verdict=Verdict.NOT_IDENTIFIED, reason=reason, not_identified=("the samples",),
            degree=self.degree, dimension=d, reduced_dimension=basis.shape[1], evaluations=len(self.points),
            needed=fit.needed, rank=fit.rank, family=fit.nullity, interpolation_misfit=fit.misfit,
            misfit=torch.nan, noise=self.noise, interpolation_conditioning=fit.conditioning,
            sample_conditioning=torch.nan, jacobian_conditioning=torch.nan,
            error_per_noise=self.points.new_zeros(0), direction_bounds=bounds,
        )  # fmt: skip
        return Identification(self.points.new_zeros(0, d - self.bias), self.points.new_zeros(0), certificate, basis)


@dataclass(frozen=True)
class _Attempt:
    terms: Terms
    fit: Refined
    signs: Tensor
    embedding: Tensor  # from the coordinates of the fit to those of the samples
    misfit: float

    @property
    def z(self) -> Tensor:
        return self.fit.z @ self.embedding.T


def _interpolate(problem: _Problem, seed: int) -> tuple[Tensor, Tensor, Interpolant]:
    """The span of the samples, read off vector values beforehand, and T on it."""
    w, F = problem.points, problem.values
    if problem.scalar:
        if not monomial_count(w.shape[1], problem.degree) <= min(len(w), DENSE_LIMIT):
            basis, interpolant = complete(w, F, problem.degree, seed=seed)
            return basis, w.new_full((basis.shape[1],), torch.nan), interpolant
        basis = torch.eye(w.shape[1], dtype=w.dtype)
        return basis, w.new_full((len(basis),), torch.nan), interpolate(w, F, problem.degree)
    basis, bounds = partial.span(F, problem.noise)
    w, F = w @ basis, F @ basis
    N = monomial_count(max(w.shape[1], 1), problem.degree - 1)
    if N > DENSE_LIMIT:
        raise InvalidInputError(
            f"samples spanning {w.shape[1]} dimensions need {N} monomials, more than {DENSE_LIMIT}; project the data"
        )
    return basis, bounds, interpolate(w, F, problem.degree)


def _checked(problem: _Problem, basis: Tensor) -> bool:
    """Do evaluations outnumber what they determine: the dimension of the span, and the entries of T on it?

    Where every independent evaluation brings a new direction, as at the minimum of the margin problem, the next might
    have too. Independent evaluations are counted by the rank of K_pq = (w_p·w_q)^{α−1}.
    """
    m, r = len(problem.points), basis.shape[1]
    if problem.scalar:
        return r < len(basis) or m > monomial_count(r, problem.degree)  # completion keeps its own reserve
    some = problem.points[torch.randperm(m, generator=torch.Generator().manual_seed(0))[: max(4 * r, 200)]]
    some = torch.nn.functional.normalize(some, dim=1)
    independent = int(torch.linalg.matrix_rank(kernel(some, some, problem.degree - 1), hermitian=True, rtol=1e-12))
    return independent > r and m * r > monomial_count(r, problem.degree)


def _reduce(problem: _Problem, T: Tensor, basis: Tensor, interpolant: Interpolant) -> tuple[Tensor, Tensor]:
    """T on the span of the samples, which scalar values reveal only now, and the basis of that span."""
    if not problem.scalar:
        return T, basis
    left, σ, _ = torch.linalg.svd(T.flatten(1), full_matrices=False)
    kept = left[:, σ > 3 * interpolant.tensor_error(problem.noise)]
    for _ in range(problem.degree):
        T = torch.tensordot(T, kept, dims=([0], [0]))
    return T, basis @ kept


def _shortage(problem: _Problem, fit: Interpolant, basis: Tensor) -> str:
    return (
        f"{len(problem.points)} evaluations give rank {fit.rank}, but {fit.needed} are needed for samples spanning "
        f"{basis.shape[1]} dimensions, so many data sets share these values"
    )


def _start(problem: _Problem, interpolant: Interpolant, T: Tensor, U: Tensor, p: int, seed: int) -> _Attempt:
    """The terms of T in the coordinates of the fit: those of the span, or for scalar values of the whole space."""
    terms = decompose(T, p, noise=min(1e-3, 10 * problem.noise / interpolant.conditioning), seed=seed)
    embedding = torch.eye(len(U), dtype=U.dtype) if problem.scalar else U
    z = terms.weights.abs().pow(1 / problem.degree)[:, None] * (terms.samples @ U.T @ embedding)
    return _Attempt(terms, Refined(z, None, torch.nan, 0), terms.weights.sign(), embedding, torch.inf)


def _fit(problem: _Problem, start: _Attempt) -> _Attempt:
    """Refine the terms on the values; the misfit is that of all values, in all directions."""
    if not torch.isfinite(start.z).all():
        return start
    w, F = problem.points @ start.embedding, problem.values
    fit = refine(w, F if problem.scalar else F @ start.embedding, start.fit.z, start.signs, problem.degree)
    fitted = model(w, fit.z, start.signs, problem.degree, scalar=problem.scalar)
    residual = F - (fitted if problem.scalar else fitted @ start.embedding.T)
    return replace(start, fit=fit, misfit=float(residual.norm() / F.norm()))


def _conclude(
    problem: _Problem, interpolant: Interpolant, attempt: _Attempt, U: Tensor, bounds: Tensor, network
) -> Identification:
    """Samples in the caller's units, their expected errors, and the verdict."""
    if problem.estimated:
        spare = 1 - attempt.fit.z.numel() / (attempt.embedding.shape[1] ** (not problem.scalar) * len(problem.points))
        problem = replace(problem, noise=max(problem.rounding, attempt.misfit / max(spare, 1e-2) ** 0.5))
    samples, weights, errors = _in_units(problem, attempt, interpolant)
    size = samples.norm(dim=1) if not problem.bias else (samples.square().sum(1) + 1).sqrt()
    sure = errors * problem.noise <= LARGEST_ERROR * size
    compared = None if network is None else margins(network, samples, weights)
    verdict, reason, open_ = _verdict(problem, sure, len(samples), U.shape[1], attempt.fit.nullity, compared)
    if verdict is Verdict.NOT_IDENTIFIED:
        sure = torch.zeros_like(sure)
    certificate = problem.undetermined(reason, U, bounds, interpolant).certificate
    certificate = replace(
        certificate, verdict=verdict, not_identified=open_, family=attempt.fit.nullity, misfit=attempt.misfit,
        sample_conditioning=attempt.terms.conditioning, jacobian_conditioning=attempt.fit.conditioning,
        error_per_noise=errors[sure], margins=compared,
    )  # fmt: skip
    return Identification(samples[sure], weights[sure], certificate, U)


def _in_units(problem: _Problem, attempt: _Attempt, interpolant: Interpolant) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, weights and expected errors per unit of relative noise."""
    x, b, derivative = samples_and_weights(
        attempt.z, attempt.signs, problem.degree, bias=problem.bias, norm=problem.norm or 1.0
    )
    covariance, outside = _variance(problem, attempt, interpolant)
    errors = propagate(derivative, covariance, outside, attempt.embedding)
    return x, b * problem.unit, errors.nan_to_num(nan=torch.inf)


def _variance(problem: _Problem, attempt: _Attempt, interpolant: Interpolant) -> tuple[Tensor, Tensor]:
    """Variance of z_i for unit noise: a block per sample, and that of each coordinate outside the span.

    Outside the span, z is the regression of the values on h_ji = (w_j·z_i)^{α−1}. Where the normal matrix was not
    formed, z_i ∝ f(u_i) to first order, and the error is that of the interpolated f.
    """
    z, (n, k) = attempt.fit.z, attempt.fit.z.shape
    if attempt.fit.covariance is None:
        if problem.scalar or attempt.terms.duals.shape[1] != k:
            return z.new_full((n, k, k), torch.inf), z.new_full((n,), torch.inf)
        gain = interpolant.noise_gain(attempt.terms.duals) * z.norm(dim=1) / attempt.terms.weights.abs()
        return gain.square()[:, None, None] * torch.eye(k, dtype=z.dtype), gain.square()
    i = torch.arange(n)
    h = (problem.points @ attempt.z.T) ** (problem.degree - 1)
    return attempt.fit.covariance[i, :, i, :], torch.linalg.pinv(h.T @ h, hermitian=True).diagonal()


def _verdict(
    problem: _Problem, sure: Tensor, n: int, r: int, family: int, compared: Margins | None
) -> tuple[Verdict, str, tuple[str, ...]]:
    if problem.count not in (None, n):
        reason = f"{problem.count} active samples were announced, but the values are those of {n}"
        return Verdict.NOT_IDENTIFIED, reason, ("the samples",)
    if problem.count is None and 1 < r and n * r >= monomial_count(r, problem.degree):
        reason = f"any tensor in {r} dimensions is a sum of {n} terms, so these prove nothing; give the count"
        return Verdict.NOT_IDENTIFIED, reason, ("the samples",)
    if family:
        reason = f"the samples belong to a family of dimension {family} with the same values"
        return Verdict.NOT_IDENTIFIED, reason, ("the samples",)
    if not sure.any():
        return Verdict.NOT_IDENTIFIED, "noise of the presumed size hides every sample", ("the samples",)
    open_ = _open(problem, compared)
    if not sure.all():
        reason = f"{int((~sure).sum())} of {n} samples are hidden by noise of the presumed size"
        return (Verdict.NOT_IDENTIFIED if problem.estimated else Verdict.IN_PART), reason, open_
    conditions = [f"no more than {n} samples are active"] if problem.count is None else []
    if problem.estimated:
        conditions.append(f"the misfit of {problem.noise:.0e} is noise in the values")
    if conditions:
        return Verdict.CONDITIONAL, " and ".join(conditions), open_
    return (Verdict.UP_TO if open_ else Verdict.IDENTIFIED), "", open_


def _open(problem: _Problem, compared: Margins | None) -> tuple[str, ...]:
    """What no evaluation of f can tell about an active sample."""
    open_ = []
    if not problem.bias:
        open_.append("the sign of each sample" + (" (and so its label)" if problem.degree % 2 else ""))
        if problem.norm is None:
            open_.append("its norm")
    if compared is not None:
        open_.append("the common scale of the weights")
    return tuple(open_)


def _in_part(
    problem: _Problem, interpolant: Interpolant, T: Tensor, U: Tensor, bounds: Tensor, seed: int, misfit: float
) -> Identification:
    """T is known, but is no sum of independent terms to within the noise: keep the terms that split off."""
    attempt = _start(problem, interpolant, T, U, 1, seed)
    if interpolant.misfit > problem.allowed:
        reason = (
            f"the values are no evaluations of an f: the best one misses them by {interpolant.misfit:.1e}, "
            f"where noise explains {problem.allowed:.1e}"
        )
        return _with_misfit(problem.undetermined(reason, U, bounds, interpolant), misfit)
    defects = partial.split_off(T, attempt.terms)
    samples, weights, errors = _in_units(problem, attempt, interpolant)
    tolerance = 100 * problem.noise / (interpolant.conditioning * attempt.terms.conditioning**2)
    errors += defects.sqrt() / problem.noise  # two samples this close together would pass for one
    kept = attempt.terms.genuine & (defects <= tolerance) & (errors * problem.noise <= LARGEST_ERROR)
    reason = f"only {int(kept.sum())} terms split off; the active samples are linearly dependent, or too many"
    rest = _with_misfit(problem.undetermined(reason, U, bounds, interpolant), misfit)
    if not kept.any() or problem.count is not None or problem.scalar:
        return rest
    certificate = replace(
        rest.certificate, verdict=Verdict.IN_PART, error_per_noise=errors[kept],
        not_identified=_open(problem, None), sample_conditioning=attempt.terms.conditioning,
    )  # fmt: skip
    return Identification(samples[kept], weights[kept], certificate, U)


def _with_misfit(found: Identification, misfit: float) -> Identification:
    return replace(found, certificate=replace(found.certificate, misfit=misfit))
