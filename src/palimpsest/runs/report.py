"""The third job: compare the reconstructions with the training images. It is the only one that sees them."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

import palimpsest as pal
from palimpsest.errors import DataError, RunFolderError
from palimpsest.files.storage import packed_json
from palimpsest.report import Content, Snapshot, Variant, render
from palimpsest.report.pictures import strip
from palimpsest.runs.folder import VARIANTS, RunFolder
from palimpsest.runs.journal import note
from palimpsest.runs.train import TrainedRun, fingerprint
from palimpsest.scoring import Score


def report(folder: RunFolder, *, title: str | None = None) -> tuple[dict[str, Score], Path]:
    """Score the folder's reconstructions against the training images, and write the verdict and the report."""
    run = TrainedRun.read(folder)
    folder.weights()  # a report is about the weights that are here
    data = run.training.load()
    if fingerprint(data) != run.images:
        raise DataError("the images are not those that were trained on; restore the data, or train again")
    variants = _comparable_variants(folder)
    note("scoring begins")

    def scored(images: Tensor) -> Score:
        held_out, looks = data.held_out.images, len(variants)
        return pal.score(images.cpu(), data.train.images, held_out=held_out, mean=data.mean, looks=looks)

    scores = {name: scored(fields["images"]) for name, fields in variants.items()}
    settings = {VARIANTS[name]: fields["settings"] for name, fields in variants.items()}
    content = Content(
        title=title or f"{folder.path.name}: what can be read out of the weights",
        variants=[_variant(folder, name, variants[name], scores[name], scored, data.mean) for name in variants],
        truth=data.train.images,
        held_out_count=len(data.held_out.images),
        configuration={"training": folder.config["training"]} | settings,
        versions=run.versions,
        seeds={"training": run.training.seed, "reconstruction": next(iter(settings.values())).get("seed")},
        training=asdict(run.trained),
        seconds={"training": run.trained.seconds} | {VARIANTS[name]: v["seconds"] for name, v in variants.items()},
    )
    folder.write("scores.json", packed_json({name: _score_fields(score) for name, score in scores.items()}))
    folder.write("pictures.png", strip(content))
    return scores, folder.write("report.html", render(content).encode())


def _comparable_variants(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """All variants, made with the same settings."""
    found = folder.variants()
    if folder.checkpoint.exists():
        raise RunFolderError(
            f"a reconstruction in {folder.path} is unfinished; finish it, or delete checkpoint.safetensors"
        )
    ordered = {name: found[name] for name in VARIANTS if name in found}
    if not ordered:
        raise RunFolderError(f"there is no reconstruction; make one with `palimpsest reconstruct {folder.path}`")
    if any(fields["settings"] != next(iter(ordered.values()))["settings"] for fields in ordered.values()):
        raise RunFolderError(f"the variants in {folder.path} have different settings; reconstruct both again")
    return ordered


def _variant(
    folder: RunFolder, name: str, fields: dict[str, Any], score: Score, scored: Callable[[Tensor], Score], mean: Tensor
) -> Variant:
    """A variant as the report shows it: with the mean added, and with the scores of its snapshots."""
    snapshots = folder.snapshots(name, folder.owner_of(name, fields["settings"]))
    scores = [(s["step"], scored(s["images"])) for s in snapshots]
    return Variant(
        name=VARIANTS[name],
        images=fields["images"] + mean,
        ids=fields["ids"],
        lineage=fields["lineage"],
        history=fields["history"],
        score=score,
        snapshots=[Snapshot(s["step"], s["ids"], s["images"] + mean) for s in snapshots],
        metrics=[{"step": t, "ssim": float(s.ssim.mean()), "recovered": s.verdict.recovered} for t, s in scores],
        seconds=fields["seconds"],
    )


def _score_fields(score: Score) -> dict[str, Any]:
    """The numbers of a score, as JSON has them."""
    tensors = {name: value.tolist() for name, value in vars(score).items() if isinstance(value, Tensor)}
    held_out = {} if score.held_out is None else {name: t.tolist() for name, t in vars(score.held_out).items()}
    return {"verdict": asdict(score.verdict), "matching": score.matching, "images": tensors, "held_out": held_out}
