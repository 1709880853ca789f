"""`palimpsest report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from palimpsest.runs import report as job
from palimpsest.runs.folder import VARIANTS, RunFolder
from palimpsest.runs.journal import printable
from palimpsest.scoring import Score, strongest


@dataclass
class Report:
    """Compare the reconstructions in a run folder with the training images, and write report.html.

    An image counts as recovered if its reconstruction scores higher than (1) a blurred copy of the image and (2) every
    held-out image that itself beats its blurred copy. The stronger of two reconstructions gives the verdict.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    title: str | None = None
    """Title of the page."""

    def run(self) -> None:
        with RunFolder(self.folder).locked() as folder:
            scores, page = job.report(folder, title=self.title)
        _print_table(scores)
        print("\n" + printable(f"The report is {page}"))


def _print_table(scores: dict[str, Score]) -> None:
    print(f"{'':20s}{'mean SSIM':>11s}{'above 0.6':>11s}{'above 0.9':>11s}{'recovered':>11s}{'AUC':>7s}")
    for name, score in scores.items():
        above = [int((score.ssim > threshold).sum()) for threshold in (0.6, 0.9)]
        verdict = score.verdict
        auc = "–" if verdict.auc is None else f"{verdict.auc:.2f}"
        print(
            f"{VARIANTS[name]:20s}{float(score.ssim.mean()):11.3f}{above[0]:11d}{above[1]:11d}"
            f"{verdict.recovered:11d}{auc:>7s}"
        )
    verdicts = [score.verdict for score in scores.values()]
    print(f"\n{verdicts[strongest(verdicts)].sentence}")
