"""Measure exact recovery, its certificate and its limits; write the figures and docs/results/*.json.

    python experiments/identifiability.py                 # everything, some minutes on two cores
    python experiments/identifiability.py noise margin    # some of it

Problems are those of the tests, in larger numbers.
"""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "identifiability"))
from identifiability_problems import (  # noqa: E402
    Degenerate,
    batch_gradient,
    degenerate,
    digits,
    error,
    healthy,
    is_void,
    is_wrong,
    network,
    unit,
)
from margin_problem import NoCounterexampleError, counterexample, max_margin, stationary_network  # noqa: E402

from palimpsest.errors import PalimpsestError  # noqa: E402
from palimpsest.identifiability import (  # noqa: E402
    Extent,
    from_gradient,
    from_head_training,
    from_lazy_training,
    from_network,
    identify,
)
from palimpsest.identifiability.polynomials import power_sum  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "docs" / "results" / "identifiability.json"


def stationary() -> dict:
    """Rank-N stationary points from tensor eigenvectors, nearly orthogonal samples, five seeds each."""
    worst = {}
    for d in range(3, 9):
        errors = []
        for seed in range(5):
            generator = torch.Generator().manual_seed(10 * d + seed)
            Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
            x = unit(Q + 0.05 * torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5)
            b = torch.rand(d, generator=generator, dtype=torch.float64) + 0.5
            b *= torch.randn(d, generator=generator, dtype=torch.float64).sign()
            errors.append(error(identify(*from_network(stationary_network(x, b)), norm=1.0).samples, x))
        worst[f"d={d}"] = max(errors)
    return {"largest error": worst}


def gradient() -> dict:
    """One batch gradient on raw digits, three seeds: the pixels with a bias, the directions without."""
    out = {}
    for n in (10, 20, 40):
        for bias in (True, False):
            errors = []
            for seed in range(3):
                x, y = digits(n, seed=100 * n + seed)
                net = network(64, n * (n + 1) // 2 + 60, bias=bias, seed=seed)
                found = identify(*from_gradient(net, batch_gradient(net, x, y)), bias=bias)
                errors.append(error(found.samples, x if bias else unit(x), signed=bias))
                if (n, bias, seed) == (10, True, 0):
                    _draw_digits(found.samples, x, errors[0])
            out[f"n={n}, {'pixels' if bias else 'directions'}"] = max(errors)
    for n, bias in ((10, True), (10, False), (40, False)):
        x, y = digits(n, seed=1)
        net = network(64, n * (n + 1) // 2 + 60, bias=bias).float()
        found = identify(*from_gradient(net, batch_gradient(net, x.float(), y.float())), bias=bias)
        what = "pixels" if bias else "directions"
        out[f"n={n}, {what}, single precision"] = error(found.samples, x if bias else unit(x), signed=bias)
    return out


def _draw_digits(found: Tensor, x: Tensor, worst: float) -> None:
    order = torch.cdist(x, found).argmin(1)
    figure, axes = plt.subplots(2, len(x), figsize=(len(x), 2.3))
    for column, (true, recovered) in enumerate(zip(x, found[order], strict=True)):
        for axis, image in zip(axes[:, column], (recovered, true), strict=True):
            axis.imshow(image.reshape(8, 8), cmap="gray", vmin=0, vmax=1)
            axis.axis("off")
    figure.suptitle(f"recovered from one gradient, and the training images: error {worst:.0e}", fontsize=9)
    _save(figure, "gradient")


def head() -> dict:
    """Training of the head alone, ten raw digits: 3,000 neurons for the 45,760 entries of T."""
    x, y = digits(10, seed=3)
    initial = network(64, 3000)
    features = (x @ initial.W.detach().T) ** 3
    rate = 1 / float(torch.linalg.matrix_norm(features, 2)) ** 2
    out = {}
    for steps in (1, 100, 5000):
        final = copy.deepcopy(initial)
        with torch.no_grad():
            for _ in range(steps):
                final.a -= rate * features.T @ (features @ final.a - y)
        found = identify(*from_head_training(initial, final))
        out[f"{steps} steps"] = {"samples": len(found.samples), "error": error(found.samples, unit(x))}
    return out


def lazy() -> dict:
    """Lazy training with relative movement 1e-5, 200 steps of gradient descent, ten digits."""
    out = {}
    raw, y = digits(10, seed=3)
    for name, x in {"raw digits": raw, "unit digits": unit(raw)}.items():
        for m in (300, 2000):
            initial, final = network(64, m), network(64, m)
            _train_lazily(final, x, y, movement=1e-5, steps=200)
            found = identify(*from_lazy_training(initial, final))
            out[f"{name}, {m} neurons"] = error(found.samples, unit(x))
    return out


def _train_lazily(net, x: Tensor, y: Tensor, *, movement: float, steps: int) -> None:
    size = float(torch.cat([p.detach().flatten() for p in net.parameters()]).norm())
    rate = 0.0
    for _ in range(steps):
        g = batch_gradient(net, x, y)
        rate = rate or movement * size / steps / float(torch.cat([t.flatten() for t in g.values()]).norm())
        with torch.no_grad():
            for name, p in net.named_parameters():
                p -= rate * g[name]


def other() -> dict:
    """Non-homogeneous activations, and the overcomplete quintic over five seeds."""
    x, y = digits(10, seed=5)
    out = {}
    for activation in ((0.0, 1.0, 0.5, 1.0), (0.3, -1.0, 2.0, 1.5, 0.7)):
        net = network(64, 900, activation)
        found = identify(*from_gradient(net, batch_gradient(net, x, y)), net.degree)
        out[f"activation {activation}"] = error(found.samples, unit(x))
    errors = []
    for seed in range(5):
        x, _, w, F = healthy(18, 6, 5, 260, seed=seed)
        errors.append(error(identify(w, F, 5).samples, x))
    return out | {"α=5, d=6, n=18": max(errors)}


NOISY = {  # n, d, α, m, whether the values are those of p
    "α=3, n=4, d=6, values of f": (4, 6, 3, 40, False),
    "α=4, n=5, d=5, values of f": (5, 5, 4, 60, False),
    "α=5, n=4, d=5, values of f": (4, 5, 5, 90, False),
    "α=3, n=4, d=5, values of p": (4, 5, 3, 50, True),
}
LEVELS = [10.0**k for k in range(-12, -2)]
SETS = 50


def noise() -> dict:
    """Gaussian noise from 1e-12 to 1e-3, declared, fifty sample sets: actual over predicted error, slope, refusals."""
    figure, (errors, refusals) = plt.subplots(1, 2, figsize=(8.2, 3.6))
    out = {}
    for name, case in NOISY.items():
        tried = [(set_, ε, _with_noise(case, set_, ε)) for set_ in range(SETS) for ε in LEVELS]
        answered = torch.tensor([(set_, ε, *o[:2]) for set_, ε, o in tried if o.whole], dtype=torch.float64)
        actual, predicted = answered[:, 2:].T
        ratio = actual / predicted  # at every level another draw of the same random variable
        expected = [float(ratio[answered[:, 0] == s].square().mean().sqrt()) for s in answered[:, 0].unique()]
        refused = [sum(not o.whole for _, e, o in tried if e == ε) for ε in LEVELS]
        out[name] = {
            "smallest ratio": float(ratio.min()),
            "largest ratio": float(ratio.max()),
            "answers": len(ratio),
            "answers within a factor 10": int(((ratio > 0.1) & (ratio < 10)).sum()),
            "root mean square ratio per sample set, smallest and largest": [min(expected), max(expected)],
            "slope": _slope_within_sets(answered),
            "false claims": sum(o.wrong for *_, o in tried),
            f"refused of {SETS}": {f"{ε:.0e}": count for ε, count in zip(LEVELS, refused, strict=True)},
        }
        errors.loglog(predicted, actual, ".", ms=2, label=name)
        refusals.semilogx(LEVELS, [count / SETS for count in refused], ".-", lw=0.7)
    line = torch.tensor(errors.get_xlim())
    for factor in (0.1, 1, 10):
        errors.loglog(line, factor * line, "k-", lw=0.5)
    errors.set(xlabel="error the certificate predicts", ylabel="measured error of the samples")
    errors.legend(fontsize=6)
    refusals.set(xlabel="relative noise on the evaluations", ylabel="part of the sample sets refused", ylim=(-0.02, 1))
    _save(figure, "noise")
    return out


class Outcome(NamedTuple):
    """Measured and predicted error of all samples together, whether all came back, whether a claim was false."""

    actual: float
    predicted: float
    whole: bool
    wrong: bool


def _with_noise(case: tuple[int, int, int, int, bool], set_: int, ε: float) -> Outcome:
    n, d, α, m, scalar = case
    x, _, w, F = healthy(n, d, α, m, scalar=scalar, seed=set_)
    generator = torch.Generator().manual_seed(1000 * set_ - round(math.log10(ε)))
    noisy = F + ε * F.square().mean().sqrt() * torch.randn(F.shape, generator=generator, dtype=F.dtype)
    found = identify(w, noisy, α, noise=ε, count=n)
    actual = math.hypot(*(error(x, sample[None]) for sample in found.samples))
    predicted = float(found.certificate.expected_error.norm())
    wrong = is_wrong(found, Degenerate("noise", α, w, noisy, x, n, ε))
    return Outcome(actual, predicted, len(found.samples) == n, wrong)


def _slope_within_sets(answered: Tensor) -> float:
    """Slope of log error over log noise, each sample set with an intercept of its own."""
    u, v = answered[:, 1].log(), answered[:, 2].log()
    for set_ in answered[:, 0].unique():
        here = answered[:, 0] == set_
        u[here] -= u[here].mean()
        v[here] -= v[here].mean()
    return float((u * v).sum() / u.square().sum())


def margin() -> dict:
    """Sixty random max-margin problems: residual to 1e-12, curvature, neurons, counterexample, verdict."""
    counts: Counter = Counter()
    dots = []
    for k in range(60):
        generator = torch.Generator().manual_seed(1000 + k)
        n, d, α = 2 + (k // 3) % 7, 3 + k % 5, 3 + k % 3
        x = unit(torch.randn(n, d, generator=generator, dtype=torch.float64))
        y = torch.randn(n, generator=generator, dtype=torch.float64).sign()
        found = max_margin(x, y, degree=α, neurons=max(12, 2 * n), seed=k)
        if found.residual > 1e-12:
            continue
        active, neurons = int(found.active.sum()), len(found.network.a)
        tight = y * found.network(x)[:, 0].detach() < 1 + 1e-9
        counts["strict local minima"] += found.is_minimum
        counts["strictly complementary"] += torch.equal(tight, found.active)
        dots.append((active, neurons, α))
        verdict = identify(*from_network(found.network), α).certificate.verdict
        counts.update({"solved": 1, "neurons at most active samples": neurons <= active})
        counts["not identified"] += verdict is Extent.NOT_IDENTIFIED
        try:
            explains = counterexample(found.network, x[found.active], (y * found.multipliers)[found.active])
            counts["counterexample to 1e-12"] += explains.residual <= 1e-12
        except NoCounterexampleError:
            counts["no counterexample found"] += 1
    _draw_neurons(dots)
    return {"problems": 60, **counts}


def _draw_neurons(dots: list[tuple[int, int, int]]) -> None:
    figure, axis = plt.subplots(figsize=(3.8, 3.4))
    for α, marker in ((3, "o"), (4, "s"), (5, "^")):
        here = torch.tensor([dot[:2] for dot in dots if dot[2] == α], dtype=torch.float64)
        axis.plot(here[:, 0] + 0.12 * (α - 4), here[:, 1], marker, ms=4, alpha=0.5, label=f"α = {α}")
    axis.plot([1, 8], [1, 8], "k-", lw=0.7)
    axis.set(xlabel="active samples", ylabel="active neurons")
    axis.legend(fontsize=7)
    _save(figure, "neurons")


def plane() -> dict:
    """Two samples and three in their plane with the same cubic: what the count is needed for."""
    x, b = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    net = stationary_network(x, b)
    tries = [counterexample(net, x, b, margins=False, distance=0.05, seed=seed) for seed in range(20)]
    found = max(tries, key=lambda data: data.distance)
    angle = torch.linspace(0, 2 * math.pi, 400, dtype=torch.float64)
    w = torch.stack([angle.cos(), angle.sin()], 1)
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.9))
    for axis, samples, weights in ((axes[0], x, b), (axes[1], found.samples, found.weights)):
        axis.plot(*(w * ((w @ samples.T) ** 3 @ weights).abs()[:, None]).T, lw=0.8)
        for z in samples * (weights.sign() * weights.abs() ** (1 / 3))[:, None]:
            axis.annotate("", xy=z.tolist(), xytext=(0, 0), arrowprops={"arrowstyle": "->"})
        axis.set(aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), title=f"{len(samples)} samples")
    figure.suptitle("|T(w, w, w)| over directions w is the same", fontsize=9)
    _save(figure, "plane")
    difference = power_sum(found.samples, found.weights, 3) - power_sum(x, b, 3)
    return {"difference of the tensors": float(difference.norm()), "samples": [2, len(found.samples)]}


def frozen() -> dict:
    """Random, untrained networks: full rank, but no stationary points."""
    misfits, refused = [], 0
    for seed in range(20):
        certificate = identify(*from_network(network(3 + seed % 5, 60, seed=seed))).certificate
        misfits.append(certificate.interpolation_misfit)
        refused += certificate.verdict is Extent.NOT_IDENTIFIED and certificate.rank == certificate.needed
    return {"networks": 20, "full rank and refused": refused, "smallest misfit": min(misfits)}


def degenerates() -> dict:
    """Five hundred degenerate problems, each with and without the number of samples and the noise, if any."""
    table: dict[str, Counter] = defaultdict(Counter)
    wrong = void = 0
    for problem in map(degenerate, range(500)):
        for found in problem.answers():
            if isinstance(found, PalimpsestError):
                table[problem.kind][type(found).__name__] += 1
                continue
            wrong += is_wrong(found, problem)
            void += is_void(found, problem)
            table[problem.kind][str(found.certificate.verdict)] += 1
    return {
        "problems": 500,
        "answers": sum(row.total() for row in table.values()),
        "false claims": wrong,
        "claims on a condition that did not hold": void,
        "verdicts": {kind: dict(row) for kind, row in table.items()},
    }


def speed() -> dict:
    """Seconds for α = 3, n = d = 40, and n = 100 in d = 200, with the threads torch has."""
    out: dict = {"threads": torch.get_num_threads(), "load of the machine": os.getloadavg()[0]}
    for n, d, m in ((40, 40, 840), (100, 200, 5100)):
        x, _, w, F = healthy(n, d, 3, m)
        start, processor = time.perf_counter(), time.process_time()
        found = identify(w, F)
        out[f"n={n}, d={d}"] = {
            "seconds": time.perf_counter() - start,
            "processor seconds": time.process_time() - processor,
            "error": error(found.samples, x),
        }
    return out


EXPERIMENTS: dict[str, Callable[[], dict]] = {
    f.__name__: f for f in (stationary, gradient, head, lazy, other, noise, margin, plane, frozen, degenerates, speed)
}


def _save(figure, name: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(FIGURES / f"identifiability-{name}.png", dpi=90)
    plt.close(figure)


def main(names: list[str]) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results["command"] = "python experiments/identifiability.py"
    results["machine"] = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for name in names or EXPERIMENTS:
        start = time.perf_counter()
        results[name] = {"what": EXPERIMENTS[name].__doc__, **EXPERIMENTS[name]()}
        print(
            f"{name}: {time.perf_counter() - start:.0f} s",
            json.dumps(results[name], indent=1, ensure_ascii=False),
        )
        RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
