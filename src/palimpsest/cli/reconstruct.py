"""`palimpsest reconstruct`."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from palimpsest.cli.shared import Device, resumable, torch_device
from palimpsest.execution import Execution, Mode
from palimpsest.execution.processes import Processes, joined_by_torchrun
from palimpsest.runs import reconstruct as job
from palimpsest.runs.folder import VARIANTS, RunFolder
from palimpsest.runs.journal import printable
from palimpsest.solver.callbacks import Callback, TensorBoard


@dataclass
class Reconstruct:
    """Reconstruct training images from the weights in a run folder, without access to the images.

    Runs without and with sample splitting. You can interrupt it at any time (Ctrl-C, kill, power cut): run the same
    command again to continue to the same result.

        palimpsest reconstruct runs/faces
        palimpsest reconstruct runs/mnist --method kkt --candidates 200 --splitting with
        palimpsest reconstruct runs/faces --checkpoints runs/faces/checkpoints
        torchrun --nproc-per-node 4 -m palimpsest reconstruct runs/faces
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    options: Annotated[job.ReconstructOptions, tyro.conf.arg(name="")] = field(default_factory=job.ReconstructOptions)
    splitting: Literal["both", "with", "without"] = "both"
    """Which variants to run."""
    again: bool = False
    """Replace reconstructions made with other settings."""
    tensorboard: bool = False
    """Also write curves for TensorBoard into the run folder."""
    mode: Mode = "auto"
    """How steps run: eager, as a CUDA graph, or as a compiled graph. Results agree up to rounding."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        device, folder = torch_device(self.device), RunFolder(self.folder)
        with ExitStack() as held:
            held.enter_context(resumable())
            group = held.enter_context(joined_by_torchrun(device))
            processes = Processes(group)
            processes.from_first(lambda: _hold(held, folder))
            job.reconstruct(
                folder,
                self.options,
                device=device,
                variants=tuple(VARIANTS) if self.splitting == "both" else (self.splitting,),
                callbacks=self._callbacks,
                execution=Execution(mode=self.mode, processes=group),
                again=self.again,
            )
        if processes.first:
            print(printable(f"Candidates are in {self.folder}; palimpsest report {self.folder} judges them."))

    def _callbacks(self, variant: str) -> list[Callback]:
        """Each variant has its own sub-folder, because both count their steps from 0."""
        return [TensorBoard(self.folder / "tensorboard" / variant)] if self.tensorboard else []


def _hold(held: ExitStack, folder: RunFolder) -> None:
    """Lock the folder until the end. On several processes the first does so, because it alone writes."""
    held.enter_context(folder.locked())
