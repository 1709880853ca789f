"""Is the verdict right? Demo-like runs judged with their real training images, and with images from outside.

Ten models are trained and read as in the demo, each from its own seed. Judged against the images they were trained on,
the verdict must claim leakage; judged against forty other images, four draws for each model, it must not.

    python experiments/calibration.py        writes docs/results/calibration.json
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import palimpsest as pal
from palimpsest.datasets.faces import read
from palimpsest.jobs import Reading, Training

ROOT = Path(__file__).parents[1]
SEEDS, DRAWS, WORKERS = range(10), 4, 10 if torch.cuda.is_available() else 1


def one_model(seed: int) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, reading = Training(seed=seed), Reading(seed=seed)
    data = training.load()
    model = training.network(data).to(device)
    fit = pal.train(model, data.centred(data.train.images), data.train.labels, loss=training.loss)
    result: dict = {"seed": seed}
    objective, within = reading.problem(fit.model, fit.initial, training.loss)
    for name, splitting in (("without", None), ("with", reading.splitting)):
        rec = pal.reconstruct(
            objective,
            image_shape=data.image_shape,
            within=within,
            candidates=reading.candidates,
            steps=reading.steps,
            splitting=splitting,
            seed=seed,
            progress=False,
        )
        candidates = rec.images.cpu()
        score = pal.score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean)
        beyond = int((score.ssim > score.held_out.ssim.max()).sum())
        result[name] = {
            "mean ssim": float(score.ssim.mean()),
            "recovered": score.verdict.recovered,
            "above every held-out ssim": beyond,
            "best held-out ssim": float(score.held_out.ssim.max()),
            "outcome": score.verdict.outcome.value,
        }
    result["outside"] = [_outside(candidates, data, seed, draw) for draw in range(DRAWS)]
    return result


def _outside(candidates: torch.Tensor, data: pal.datasets.DataSet, seed: int, draw: int) -> dict:
    """The verdict on forty images that were not trained on, calibrated on forty others, both sides balanced."""
    source = read(None)
    images = torch.as_tensor(source.images, dtype=torch.float32)
    trained = {image.numpy().tobytes() for image in data.train.images}
    generator = torch.Generator().manual_seed(1000 * seed + draw)
    members, held_out = [], []
    for label in range(len(source.classes)):
        pool = [
            image for image in images[torch.as_tensor(source.labels) == label] if image.numpy().tobytes() not in trained
        ]
        order = torch.randperm(len(pool), generator=generator)
        members += [pool[i] for i in order[:20]]
        held_out += [pool[i] for i in order[20:40]]
    verdict = pal.score(candidates, torch.stack(members), held_out=torch.stack(held_out), mean=data.mean).verdict
    return {"outcome": verdict.outcome.value, "p": verdict.p_value, "recovered": verdict.recovered}


def main() -> None:
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        models = list(pool.map(one_model, SEEDS))
    claims = sum(model["with"]["outcome"] == "leakage" for model in models)
    false = sum(draw["outcome"] == "leakage" for model in models for draw in model["outside"])
    summary = {"leakage claimed, real images": claims, "leakage claimed, images from outside": false}
    result = {"command": "python experiments/calibration.py", "models": len(models), "draws": len(models) * DRAWS}
    path = ROOT / "docs" / "results" / "calibration.json"
    path.write_text(json.dumps(result | summary | {"runs": models}, indent=1) + "\n", encoding="utf-8")
    for model in models:
        print(model["seed"], {name: model[name] for name in ("without", "with")})
    print(summary)


if __name__ == "__main__":
    main()
