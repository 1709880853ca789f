"""The picture at the top of the README: colour images read out of a convolutional network.

    python experiments/showcase.py        writes docs/figures/convolutional.png and docs/results/showcase.json

The network is the row `cnn-20-whitened` of experiments/networks_in_use, with its first seed. The picture shows all of
its 20 training images, so that no choice is made, below their nearest candidates. CIFAR-10 is looked for in
PALIMPSEST_DATA. It takes minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from networks_in_use import reading, training
from networks_in_use.rows import ROWS, Row
from PIL import Image
from provenance import made_by
from torch import Tensor

import palimpsest as pal
from palimpsest.scoring.metrics import minmax

ROOT = Path(__file__).parents[1]
ROW = "cnn-20-whitened"
ZOOM = 2


def read(row: Row, seed: int) -> tuple[dict, Tensor]:
    """The scores of one network, and its images below their nearest candidates."""
    images, device = training.load(row, seed), reading.device()
    model = training.before(row, seed, Path()).to(device).eval()
    x, y = (images.train - images.mean).to(device), images.labels.to(device).float()
    model, checkpoints, _ = training.train(model, x, y, row.training, seed)
    rec, facts = reading.read(model, checkpoints, row, images, seed=seed, ends=math.inf)
    found = rec.images.cpu()
    score = pal.score(found, images.train, held_out=images.held_out, mean=images.mean)
    assert score.held_out is not None
    shown = minmax((found + images.mean)[score.match].double()).float()
    rows = [torch.cat([*part], dim=-1) for part in (shown, images.train)]
    result = {
        "row": row.name,
        "seed": seed,
        "mean ssim": round(float(score.ssim.mean()), 3),
        "ssim": [round(v, 3) for v in score.ssim.tolist()],
        "recovered": score.verdict.recovered,
        "best held-out ssim": round(float(score.held_out.ssim.max()), 3),
        "seconds": facts["seconds"],
    }
    return result, torch.cat(rows, dim=-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--small", action="store_true", help="a network of seconds, which reads nothing")
    options = parser.parse_args()
    row = ROWS[ROW].small() if options.small else ROWS[ROW]
    result, picture = read(row, training.REPORTED[0])
    print(result, flush=True)
    sheet = Image.fromarray((255 * picture.movedim(0, -1)).round().byte().numpy())
    for folder in ("figures", "results"):
        (options.out / folder).mkdir(exist_ok=True, parents=True)
    sheet.resize((ZOOM * sheet.width, ZOOM * sheet.height), Image.Resampling.NEAREST).save(
        options.out / "figures" / "convolutional.png", optimize=True
    )
    text = json.dumps(made_by("python experiments/showcase.py") | result, indent=1)
    (options.out / "results" / "showcase.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
