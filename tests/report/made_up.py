"""Results made up in milliseconds: all that a report can be asked to show."""

import math

import torch

from palimpsest.report import Content, Snapshot, Variant
from palimpsest.scoring import score

N, HELD_OUT, CANDIDATES, SPLIT, STEPS = 14, 16, 10, 5, (0, 100, 200)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"


def smooth_images(n, channels, seed):
    """Blobs: each unlike the others, none flat."""
    coarse = torch.rand(n, channels, 5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(12, 12), mode="bicubic").clamp(0, 1)


def variant(name, truth, held_out, *, splitting, noise, seed):
    """A run that ends with noisy copies of the first training images; with splitting, half of it splits once."""
    generator = torch.Generator().manual_seed(seed)
    k = CANDIDATES + SPLIT * splitting
    images = truth[torch.arange(k) % N] + noise * torch.randn(k, *truth.shape[1:], generator=generator)
    images[0] = truth[0]  # identical: an infinite PSNR
    first = torch.arange(CANDIDATES)
    born = torch.arange(CANDIDATES, CANDIDATES + 2 * SPLIT)
    ids = torch.cat([born[:SPLIT], first[SPLIT:], born[SPLIT:]]) if splitting else first
    lineage = torch.cat([torch.full_like(first, -1), first[:SPLIT].repeat(2 if splitting else 0)])
    snapshots = [Snapshot(s, first, torch.rand(CANDIDATES, *truth.shape[1:], generator=generator)) for s in STEPS[:-1]]
    return Variant(
        name,
        images,
        ids,
        lineage,
        history(splitting),
        score(images, truth, held_out=held_out),
        [*snapshots, Snapshot(STEPS[-1], ids, images)],
        [{"step": s, "ssim": 0.1 + s / 400, "recovered": s // 20} for s in STEPS],
        seconds=83.2,
    )


def history(splitting):
    records = [{"step": s, "loss": math.exp(-s / 40), "candidates": CANDIDATES} for s in range(0, STEPS[-1], 10)]
    eigenvalues = [(i - 7) * 1e-5 for i in range(CANDIDATES)]
    event = {"step": 100, "split": SPLIT, "eta": 0.5, "before": 0.2, "after": 1e-7, "eigenvalues": eigenvalues}
    return records + [event] * splitting


def content(*, variants=2, channels=1, truth=True, held_out=HELD_OUT, noise=0.02, title="An audit", **settings):
    """Results for one or two variants, with or without training and held-out images."""
    images = smooth_images(N, channels, seed=0)
    others = smooth_images(held_out, channels, seed=1) if held_out else None
    runs = [
        variant(name, images, others, splitting=splitting, noise=noise, seed=i)
        for i, (name, splitting) in enumerate([("without splitting", False), ("with splitting", True)])
    ][-variants:]
    if not truth:
        runs = [Variant(v.name, v.images, v.ids, v.lineage, v.history, None, v.snapshots) for v in runs]
    defaults = {
        "configuration": {
            "method": "NTK",
            "reconstruction": {"steps": 200, "task": None, "optimiser": {"learning_rate": 0.02}},
        },
        "versions": {"palimpsest": "0.1.0"},
        "seeds": {"data": 0},
        "training": {"loss": 3.2e-9, "converged": True, "kkt_residual": None},
        "seconds": {"training": 4.0},
    }
    return Content(title, runs, images if truth else None, held_out, **{**defaults, **settings})
