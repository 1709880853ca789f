"""`palimpsest demo`."""

from dataclasses import dataclass
from pathlib import Path

from palimpsest.cli.reconstruct import Reconstruct
from palimpsest.cli.report import Report
from palimpsest.cli.shared import Device
from palimpsest.cli.train import Train
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.runs.train import TrainOptions, is_trained


@dataclass
class Demo:
    """Run the whole pipeline on faces: train, reconstruct, report. Takes a few minutes on two cores.

    Trains a face detector on 40 images that ship with scikit-image, discards the images, reconstructs them from the
    weights, and writes a report.
    """

    out: Path = Path("runs/demo")
    """The run folder."""
    seed: int = 0
    """Seed of the images, the network and the candidates."""
    again: bool = False
    """Replace the results of another seed or version in the folder."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        training = TrainOptions(seed=self.seed)
        if not is_trained(RunFolder(self.out), training):  # else the demo continues after an interruption
            Train(self.out, training, again=self.again, device=self.device).run()
        Reconstruct(self.out, ReconstructOptions(seed=self.seed), again=self.again, device=self.device).run()
        Report(self.out, title="Faces read out of the weights of a face detector").run()
