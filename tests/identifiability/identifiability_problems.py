"""Random problems with a known answer, healthy and degenerate, shared by the tests and the experiments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from palimpsest.errors import PalimpsestError
from palimpsest.identifiability import Extent, Identification, identify
from palimpsest.identifiability.polynomials import monomial_count
from palimpsest.networks import PolynomialNetwork

DEGENERACIES = (
    "duplicate", "collinear", "dependent", "few", "inactive", "near",
    "points", "junk", "noise", "overcomplete", "tiny", "corrupted", "planes", "hidden", "flat",
)  # fmt: skip


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1)


def error(found: Tensor, truth: Tensor, *, signed: bool = False) -> float:
    """Largest distance of a true sample to the nearest recovered one, up to sign unless it is identified."""
    if not len(found):
        return float("inf")
    apart = torch.cdist(truth, found, compute_mode="donot_use_mm_for_euclid_dist")
    if not signed:
        flipped = torch.cdist(truth, -found, compute_mode="donot_use_mm_for_euclid_dist")
        apart = torch.minimum(apart, flipped)
    return float(apart.min(1).values.max())


def healthy(n: int, d: int, α: int, m: int, *, scalar: bool = False, seed: int = 0):
    """Unit samples, weights, points and exact values of f (or p)."""
    generator = torch.Generator().manual_seed(seed)
    x = unit(torch.randn(n, d, generator=generator, dtype=torch.float64))
    b = torch.randn(n, generator=generator, dtype=torch.float64)
    b = b + 0.3 * b.sign()
    w = torch.randn(m, d, generator=generator, dtype=torch.float64)
    return x, b, w, evaluate(x, b, w, α, scalar=scalar)


def evaluate(x: Tensor, b: Tensor, w: Tensor, α: int, *, scalar: bool = False) -> Tensor:
    t = w @ x.T
    return t**α @ b if scalar else t ** (α - 1) @ (b[:, None] * x)


def digits(n: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Raw 8×8 digits in [0, 1], flattened, with labels ±1 for odd and even."""
    data = load_digits()
    i = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(seed))[:n]
    return torch.tensor(data.data)[i] / 16, torch.tensor(data.target)[i].double() % 2 * 2 - 1


def network(d: int, m: int, activation=3, *, bias: bool = False, seed: int = 0) -> PolynomialNetwork:
    torch.manual_seed(seed)
    net = PolynomialNetwork(d, m, activation=activation, bias=bias).double()
    if net.b is not None:
        torch.nn.init.normal_(net.b)
    return net


def batch_gradient(net: PolynomialNetwork, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = (net(x)[:, 0] - y).square().mean()
    return dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))


@dataclass(frozen=True)
class Degenerate:
    """A problem that breaks an assumption: evaluations, the distinct active directions, the samples' number, noise."""

    kind: str
    degree: int
    points: Tensor
    values: Tensor
    directions: Tensor
    active: int
    noise: float | None = None

    def answers(self) -> Iterator[Identification | PalimpsestError]:
        """With and without the number of samples, and with and without the noise where there is some."""
        for count in (None, self.active):
            for noise in dict.fromkeys((None, self.noise)):
                try:
                    yield identify(self.points, self.values, self.degree, count=count, noise=noise)
                except PalimpsestError as refusal:
                    yield refusal


def degenerate(seed: int) -> Degenerate:
    """A kind of trouble, in dimension 2 to 6 (or what it takes), degree 3 to 5, vector or scalar values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    kind, α, d = DEGENERACIES[seed % len(DEGENERACIES)], whole(3, 5), whole(2, 6)
    n, scalar = whole(2, d), whole(0, 3) == 0
    if kind in ("planes", "hidden", "flat"):  # samples that imitate fewer do so for cubics
        α, n, scalar = 3, 6 if kind == "planes" else 4, False
        d = n + whole(0, 2)
    x, b = normal(n, d), normal(n)
    b = b + 0.2 * b.sign()
    N = monomial_count(d, α if scalar else α - 1)
    m = whole(1, N) if kind == "few" else N + whole(2, 12)
    extra = {
        "duplicate": lambda: x[:1],
        "collinear": lambda: x[:1] * 2 * normal(1),
        "dependent": lambda: normal(whole(1, 2), 2) @ x[:2],
        "near": lambda: x[:1] + 10.0 ** -whole(1, 9) * normal(1, d),
        "overcomplete": lambda: normal(whole(d - n + 1, d + 3), d),
        "planes": lambda: torch.cat([normal(1, 2) @ x[:2], normal(1, 2) @ x[2:4]]),  # three in each, two beside
        "hidden": lambda: normal(1, 2) @ x[:2],  # three in a plane, one beside, one in the noise
        "flat": lambda: normal(1, 3) * torch.tensor([1, 1, 10.0 ** -whole(1, 10)]) @ x[:3],  # four, nearly in a plane
    }.get(kind, lambda: x[:0])()
    x, b = torch.cat([x, extra]), torch.cat([b, normal(len(extra))])
    if kind == "inactive":
        b[0] = 0
    if kind == "tiny":
        b[0] *= 10.0 ** -whole(3, 14)
    if kind == "hidden":
        b[3] *= 10.0 ** -whole(2, 6)
    w = normal(m, d)
    if kind == "points":  # in a hyperplane, or with repetitions
        flat = normal(m, max(1, d - 1)) @ normal(max(1, d - 1), d)
        w = flat if whole(0, 1) else w[torch.randint(0, whole(1, m), (m,), generator=generator)]
    F = evaluate(x, b, w, α, scalar=scalar)
    if kind == "junk":
        F = normal(*F.shape) if whole(0, 1) or scalar else w * normal(m, 1)
    noise = 10.0 ** -whole(2, 12) if kind in ("noise", "hidden") else None
    if noise:
        F = F + F.square().mean().sqrt() * noise * normal(*F.shape)
    if kind == "corrupted":
        F[: whole(1, 3)] *= 1 + 10.0 ** -whole(0, 10)
    return Degenerate(kind, α, w, F, _distinct(unit(x[b != 0])), int((b != 0).sum()), noise)


def _distinct(u: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for v in u:
        if all(min((v - o).norm(), (v + o).norm()) > 1e-13 for o in kept):
            kept.append(v)
    return torch.stack(kept)


def is_wrong(found: Identification, truth: Degenerate) -> bool:
    """Does the certificate claim anything false?

    A returned sample must be a true one to ten times its expected error. "Identified", "identified up to" and
    "identified if" claim that none is missing. If the claim supposes that no more than so many samples are
    active, it is void where more are.
    """
    verdict, n = found.certificate.verdict, len(found.samples)
    if is_void(found, truth):
        return False
    if verdict in (Extent.IDENTIFIED, Extent.UP_TO, Extent.CONDITIONAL) and len(truth.directions) != n:
        return True
    tolerance = 10 * found.certificate.expected_error + 1e-9
    return any(error(truth.directions, x[None]) > float(t) for x, t in zip(found.samples, tolerance, strict=True))


def is_void(found: Identification, truth: Degenerate) -> bool:
    """Is the claim made on a condition, stated with it, that does not hold?"""
    most = found.certificate.most_active
    return most is not None and len(truth.directions) > most
