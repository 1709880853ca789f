"""`palimpsest train`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from palimpsest.cli.shared import Device, bar, torch_device
from palimpsest.runs import train as job
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import printable


@dataclass
class Train:
    """Train a network on a small set of images and save its weights before and after training.

    The weights go into a run folder, which `palimpsest reconstruct` reads. The images are not saved: `palimpsest
    report` draws them again with the same seed and compares the reconstructions with them.

        palimpsest train --out runs/faces
        palimpsest train --out runs/mnist --data mnist --per-class 50 --loss logistic
    """

    out: Path
    """The run folder to create."""
    options: Annotated[job.TrainOptions, tyro.conf.arg(name="")] = field(default_factory=job.TrainOptions)
    again: bool = False
    """Replace an existing network and its reconstructions."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        device = torch_device(self.device)
        with (
            RunFolder(self.out).locked(create=True) as folder,
            bar(self.options.steps, desc="training", unit="step", delay=2) as progress,
        ):

            def record(entry: dict[str, float]) -> None:
                progress.set_postfix(loss=f"{entry['loss']:.3g}", gap=f"{entry['gap']:.3g}", refresh=False)
                progress.update(int(entry["step"]) - progress.n)

            fit = job.train(folder, self.options, device=device, callback=record, again=self.again)
        print(fit.summary)
        if not fit.converged and self.options.loss == "squared":
            print("Images that were not learnt cannot be recovered; give more --steps before you draw conclusions.")
        if fit.kkt_residual is not None:
            margin = "" if fit.normalised_margin is None else f", normalised margin {fit.normalised_margin:.3g}"
            print(f"KKT residual {fit.kkt_residual:.3g} (0 at the maximum margin){margin}.")
        print(printable(f"Weights are in {self.out}; palimpsest reconstruct {self.out} reads them."))
