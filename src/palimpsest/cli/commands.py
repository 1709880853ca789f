"""The command line: `palimpsest demo | train | reconstruct | report | audit | identify | bench`.

Exit status 0, 1 (failed) or 2 (wrong use); errors are one sentence on standard error.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from palimpsest import __version__, auditing
from palimpsest import bench as benchmark
from palimpsest.auditing import truth
from palimpsest.cli.identify import IdentifyOptions, run_identify
from palimpsest.errors import DivergenceError, InvalidInputError, PalimpsestError, TrainingDivergedError
from palimpsest.execution import Execution, Mode
from palimpsest.execution.resources import out_of_memory
from palimpsest.files.storage import write_atomically
from palimpsest.runs import jobs, journal
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import printable
from palimpsest.scoring import Score, strongest
from palimpsest.solver.callbacks import Callback, TensorBoard

INTERRUPTED = "interrupted; the state is saved, so run the same command again to continue"
Device = Literal["auto", "cpu", "cuda"]
DESCRIPTION = """Measure how much of the training set can be reconstructed from a network's weights.

Palimpsest is a privacy audit tool. Use it only on models and data you are entitled to. Start with `palimpsest demo`.
`palimpsest --version` prints the version."""


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
    training: Annotated[jobs.Training, tyro.conf.arg(name="")] = field(default_factory=jobs.Training)
    again: bool = False
    """Replace an existing network and its reconstructions."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        with RunFolder(self.out).locked(create=True) as folder, _training_bar(self.training.steps) as record:
            fit = jobs.train(folder, self.training, device=_device(self.device), callback=record, again=self.again)
        print(fit.summary)
        if not fit.converged and self.training.loss == "squared":
            print("Images that were not learnt cannot be recovered; give more --steps before you draw conclusions.")
        if fit.kkt_residual is not None:
            margin = "" if fit.normalised_margin is None else f", normalised margin {fit.normalised_margin:.3g}"
            print(f"KKT residual {fit.kkt_residual:.3g} (0 at the maximum margin){margin}.")
        print(printable(f"Weights are in {self.out}; palimpsest reconstruct {self.out} reads them."))


@dataclass
class Reconstruct:
    """Reconstruct training images from the weights in a run folder, without access to the images.

    Runs without and with sample splitting. You can interrupt it at any time (Ctrl-C, kill, power cut): run the same
    command again to continue to the same result.

        palimpsest reconstruct runs/faces
        palimpsest reconstruct runs/mnist --method kkt --candidates 200 --splitting with
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    reading: Annotated[jobs.Reading, tyro.conf.arg(name="")] = field(default_factory=jobs.Reading)
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
        variants = ("without", "with") if self.splitting == "both" else (self.splitting,)
        with RunFolder(self.folder).locked() as folder:
            try:
                jobs.reconstruct(
                    folder,
                    self.reading,
                    device=_device(self.device),
                    variants=variants,
                    callbacks=self._callbacks,
                    execution=Execution(mode=self.mode),
                    again=self.again,
                )
            except KeyboardInterrupt:
                raise InterruptedRunError(INTERRUPTED) from None
        print(printable(f"Candidates are in {self.folder}; palimpsest report {self.folder} judges them."))

    def _callbacks(self, variant: str) -> list[Callback]:
        """Each variant has its own sub-folder, because both count their steps from 0."""
        return [TensorBoard(self.folder / "tensorboard" / variant)] if self.tensorboard else []


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
            scores, page = jobs.report(folder, title=self.title)
        _print_table(scores)
        print("\n" + printable(f"The report is {page}"))


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
        training = jobs.Training(seed=self.seed)
        if not jobs.is_trained(RunFolder(self.out), training):  # else the demo goes on where it was interrupted
            Train(self.out, training, again=self.again, device=self.device).run()
        Reconstruct(self.out, jobs.Reading(seed=self.seed), again=self.again, device=self.device).run()
        Report(self.out, title="Faces read out of the weights of a face detector").run()


@dataclass
class Identify:
    """Recover training data exactly from the saved weights of a polynomial network.

    Needs a stationary point, a batch gradient, or the weights before and after training; see docs/identifiability.md.
    Prints a certificate that states which samples are identified.

        palimpsest identify --weights net.safetensors --gradient gradient.safetensors --output samples.safetensors
    """

    options: Annotated[IdentifyOptions, tyro.conf.arg(name="")]

    def run(self) -> int:
        status, text = run_identify(self.options)
        if status:
            return _complain(text, status=status)
        print(text)
        return 0


@dataclass
class Bench:
    """Time a reconstruction step in every mode, against the published method and the minimum of the hardware.

    Close other programs first. All modes are timed in turns; compare only numbers of the same run. Writes bench.json
    and, from the sweep, bench.png: time and memory against candidates, width, depth and input size.

        palimpsest bench
        palimpsest bench --no-sweep --image 1,28,28 --hidden 1000 1000 --candidates 500
    """

    out: Path = Path("runs/bench")
    """The folder to write to."""
    image: Annotated[str | None, tyro.conf.arg(metavar="C,H,W")] = None
    """Channels, height and width of an image. If omitted: 1,25,25, or 3,32,32 on CUDA."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers. If omitted: 500 500, or 1000 1000 on CUDA."""
    candidates: int | None = None
    """Number of candidates. If omitted: 80, or 1000 on CUDA."""
    sweep: bool = True
    """Also vary each of these numbers for the published method in float32, the automatic mode and the floor."""
    turns: int = 7
    """Timing turns per mode; the median is reported."""
    seconds: float = 0.25
    """Seconds per turn."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        device, effort = _device(self.device), benchmark.Effort(self.turns, self.seconds)
        shape = self._shape(device)
        self.out.mkdir(parents=True, exist_ok=True)
        with _bar(benchmark.ticks(shape, device, effort, sweep=self.sweep)) as tick:
            results = benchmark.compare(shape, device, effort, sweep=self.sweep, tick=tick)
        self._write(results)
        _print_timings(results)
        print("\n" + printable(f"The figures are in {self.out}"))

    def _write(self, results: Mapping[str, Any]) -> None:
        from palimpsest.bench.figure import draw  # no other command should wait for matplotlib

        picture = self.out / "bench.png"
        picture.unlink(missing_ok=True)  # one of another run would not belong to these numbers
        write_atomically(self.out / "bench.json", (json.dumps(results, indent=1) + "\n").encode())
        if self.sweep:
            write_atomically(picture, draw(results))

    def _shape(self, device: torch.device) -> benchmark.Shape:
        usual = benchmark.Shape.usual(device)
        return replace(
            usual,
            image=usual.image if self.image is None else _sides(self.image),
            hidden=usual.hidden if self.hidden is None else self.hidden,
            candidates=usual.candidates if self.candidates is None else self.candidates,
        )


@dataclass
class AuditCommand:
    """Audit a network that was trained elsewhere: can its training images be read out of its weights?

    Needs the code of the network and its weights, but not the training images. Writes report.html with a verdict, the
    likeliest candidates with their probabilities, and controls. After an interruption, run the same command again.

        palimpsest audit --out runs/audit --network mypackage.models:make --weights final.pt --initial start.pt
            --shape 3,32,32
    """

    out: Path
    """The run folder to create."""
    network: str
    """Function that creates the network: package.module:factory or path/to/file.py:factory. Its code is executed."""
    weights: Path
    """The trained weights: a .safetensors file, or a state dict saved by torch."""
    shape: str
    """Channels, height and width of the images: 3,32,32."""
    initial: Path | None = None
    """The weights before training, if known. They allow far better reconstructions."""
    key: str | None = None
    """Entry of --weights that holds the weights, such as ema.state_dict. Needed if there are several."""
    initial_key: str | None = None
    """Entry of --initial that holds the weights."""
    data: str | None = None
    """Training images, if available: a folder with a sub-folder per class, or an .npz file. Only scores use them."""
    held_out: str | None = None
    """Images of the same kind that were not used for training. They calibrate the scores."""
    mean: str = "0"
    """Mean subtracted from the images of --data: a number, one per channel (0.5,0.4,0.4), or an .npy file."""
    std: str = "1"
    """Standard deviation by which they were divided, in the same forms."""
    options: Annotated[auditing.Options, tyro.conf.arg(name="")] = field(default_factory=auditing.Options)
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        shape = _sides(self.shape)
        known = None
        if self.held_out is not None and self.data is None:
            raise InvalidInputError("--held-out calibrates scores of the training images; give these too, as --data")
        if (self.mean, self.std) != ("0", "1") and self.data is None:
            raise InvalidInputError("--mean and --std say how the training images were seen; give these too, as --data")
        if self.data is not None:
            known = truth.load(self.data, self.held_out, mean=self.mean, std=self.std, image_shape=shape)
        try:
            found = auditing.audit(
                self.network,
                self.weights,
                image_shape=shape,
                out=self.out,
                initial=self.initial,
                key=self.key,
                initial_key=self.initial_key,
                truth=known,
                device=_device(self.device),
                **vars(self.options),
            )
        except KeyboardInterrupt:
            raise InterruptedRunError(INTERRUPTED) from None
        print(*found.summary, printable(f"The report is {found.report}"), sep="\n")


class InterruptedRunError(PalimpsestError):
    """Ctrl-C."""


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Reconstruct, tyro.conf.subcommand("reconstruct")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[AuditCommand, tyro.conf.subcommand("audit")]
    | Annotated[Identify, tyro.conf.subcommand("identify")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the value is the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders need not be text
    if (sys.argv[1:] if arguments is None else [*arguments]) == ["--version"]:
        print(f"palimpsest {__version__}")
        return 0
    try:
        command: Any = tyro.cli(Command, prog="palimpsest", description=DESCRIPTION, args=arguments)
        with journal.shown():
            return command.run() or 0
    except (DivergenceError, TrainingDivergedError, InterruptedRunError) as error:
        return _complain(str(error), status=1)
    except PalimpsestError as error:
        return _complain(str(error), status=2)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _complain(f"cannot use{where}: {error.strerror}; make room or choose another folder", status=2)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _complain("there is not enough memory; use fewer --candidates, or a smaller network", status=1)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing was left half-written", status=1)


def _complain(sentence: str, *, status: int) -> int:
    print(f"palimpsest: {printable(sentence)}", file=sys.stderr)
    return status


def _device(choice: Device) -> torch.device:
    if choice == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("there is no CUDA device; use --device cpu")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if choice == "auto" else choice)


def _sides(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise InvalidInputError(f"the shape is {text!r}; give channels, height and width, such as 3,32,32")
    return tuple(map(int, parts))


@contextmanager
def _training_bar(steps: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A bar for training, shown after two seconds on a terminal; yields what to call with each record."""
    with tqdm(total=steps, desc="training", unit="step", delay=2, disable=not sys.stderr.isatty()) as bar:

        def record(entry: dict[str, float]) -> None:
            bar.set_postfix(loss=f"{entry['loss']:.3g}", gap=f"{entry['gap']:.3g}", refresh=False)
            bar.update(int(entry["step"]) - bar.n)

        yield record


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many ticks on a terminal; yields what to call with the name of what comes next."""
    with tqdm(total=total, unit="", disable=not sys.stderr.isatty()) as bar:

        def tick(name: str) -> None:
            bar.set_description(f"{name:20s}")
            bar.update()

        yield tick


def _print_timings(results: Mapping[str, Any]) -> None:
    ((shape, rows),) = results["steps"].items()
    print(f"{shape}; {results['device']}, threads: {results['threads']}\n")
    print(f"{'':20s}{'ms per step':>11s}{'of the floor':>14s}{'times faster than published':>29s}")
    print(f"{'':45s}{'float64':>15s}{'float32':>14s}")
    for row in rows:
        faster = (row[f"faster than published {dtype}"] for dtype in ("float64", "float32"))
        times = "".join(f"{ratio:{width}.2f}" for ratio, width in zip(faster, (15, 14), strict=True))
        print(f"{row['name']:20s}{row['milliseconds']:11.3f}{row['of the floor']:14.2f}{times}")
    print(f"\nLong runs use {results['automatic']} mode on this device by default.")


def _print_table(scores: dict[str, Score]) -> None:
    print(f"{'':20s}{'mean SSIM':>11s}{'above 0.6':>11s}{'above 0.9':>11s}{'recovered':>11s}{'AUC':>7s}")
    for name, score in scores.items():
        above = [int((score.ssim > bar).sum()) for bar in (0.6, 0.9)]
        verdict = score.verdict
        auc = "–" if verdict.auc is None else f"{verdict.auc:.2f}"
        print(
            f"{jobs.VARIANTS[name]:20s}{float(score.ssim.mean()):11.3f}{above[0]:11d}{above[1]:11d}"
            f"{verdict.recovered:11d}{auc:>7s}"
        )
    verdicts = [score.verdict for score in scores.values()]
    print(f"\n{verdicts[strongest(verdicts)].sentence}")


if __name__ == "__main__":
    sys.exit(main())
