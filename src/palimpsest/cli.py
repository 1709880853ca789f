"""The command line: `palimpsest demo | train | reconstruct | report | audit | identify | bench | reproduce`.

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

from palimpsest import __version__, auditing, benchmark, jobs, journal
from palimpsest.auditing import truth
from palimpsest.callbacks import Callback, TensorBoard
from palimpsest.errors import DivergenceError, InvalidInputError, PalimpsestError, TrainingDivergedError
from palimpsest.execution import Execution, Mode
from palimpsest.identifiability.command import IdentifyOptions, run_identify
from palimpsest.journal import printable
from palimpsest.reproduce import Options, reproduce
from palimpsest.resources import out_of_memory
from palimpsest.runs import RunFolder
from palimpsest.scoring import Score, strongest
from palimpsest.storage import write_atomically

INTERRUPTED = "interrupted; the state is saved: give the same command again to go on with it"
Device = Literal["auto", "cpu", "cuda"]
DESCRIPTION = """How much of the training set can be read back out of a network's weights?

Palimpsest is a privacy audit tool. Run it on models and data you are entitled to. Start with `palimpsest demo`.
`palimpsest --version` prints the version."""


@dataclass
class Train:
    """Train a network on a small set of images, and keep its weights from before and after.

    Everything goes into a run folder, from which `palimpsest reconstruct` reads the weights. The images themselves are
    not kept: they are drawn again, by the same seed, when a report compares the reconstructions with them.

        palimpsest train --out runs/faces
        palimpsest train --out runs/mnist --data mnist --per-class 50 --loss logistic
    """

    out: Path
    """The run folder to make."""
    training: Annotated[jobs.Training, tyro.conf.arg(name="")] = field(default_factory=jobs.Training)
    again: bool = False
    """Replace a network from which images were already read, and what was read."""
    device: Device = "auto"

    def run(self) -> None:
        with RunFolder(self.out).locked(create=True) as folder, _training_bar(self.training.steps) as record:
            fit = jobs.train(folder, self.training, device=_device(self.device), callback=record, again=self.again)
        print(fit.summary)
        if not fit.converged and self.training.loss == "squared":
            print("What was not learnt cannot be read: give more --steps before drawing conclusions.")
        if fit.kkt_residual is not None:
            margin = "" if fit.normalised_margin is None else f", normalised margin {fit.normalised_margin:.3g}"
            print(f"KKT residual {fit.kkt_residual:.3g} (0 at the maximum margin){margin}.")
        print(printable(f"Weights are in {self.out}; palimpsest reconstruct {self.out} reads them."))


@dataclass
class Reconstruct:
    """Read training images back out of the weights of a run folder, without looking at them.

    Runs without and with sample splitting. It can be interrupted at any time (Ctrl-C, or worse): the same command goes
    on where it stopped, to the same result.

        palimpsest reconstruct runs/faces
        palimpsest reconstruct runs/mnist --method kkt --candidates 200 --splitting with
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    reading: Annotated[jobs.Reading, tyro.conf.arg(name="")] = field(default_factory=jobs.Reading)
    splitting: Literal["both", "with", "without"] = "both"
    """Which variants to run."""
    again: bool = False
    """Replace what was read with other settings."""
    tensorboard: bool = False
    """Also write the curves for TensorBoard, into the run folder."""
    mode: Mode = "auto"
    """How steps run: one by one, as a CUDA graph, or as a compiled one; the result is the same."""
    device: Device = "auto"

    def run(self) -> None:
        variants = ("without", "with") if self.splitting == "both" else (self.splitting,)
        with RunFolder(self.folder).locked() as folder:
            try:
                for variant in variants:
                    jobs.reconstruct(
                        folder,
                        self.reading,
                        device=_device(self.device),
                        variants=(variant,),
                        callbacks=self._callbacks(variant),
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
    """Compare the reconstructions of a run folder with the images it was trained on, and write report.html.

    An image counts as recovered if its match is better than a blurred copy of the image, and better than that of every
    held-out image that itself beats its blurred copy. The stronger of two reconstructions gives the verdict.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    title: str | None = None
    """Of the page."""

    def run(self) -> None:
        with RunFolder(self.folder).locked() as folder:
            scores, page = jobs.report(folder, title=self.title)
        _print_table(scores)
        print("\n" + printable(f"The report is {page}"))


@dataclass
class Demo:
    """The main job in one go, a few minutes on two cores: faces read out of the weights of a small network.

    Trains a face detector on 40 images that ship with scikit-image, forgets the images, reads them back from the
    weights, and writes a report.
    """

    out: Path = Path("runs/demo")
    """The run folder."""
    seed: int = 0
    """Of everything: the images, the network and the candidates."""
    again: bool = False
    """Replace what another seed or version left in the folder."""
    device: Device = "auto"

    def run(self) -> None:
        training = jobs.Training(seed=self.seed)
        if not jobs.is_trained(RunFolder(self.out), training):  # else the demo goes on where it was interrupted
            Train(self.out, training, again=self.again, device=self.device).run()
        Reconstruct(self.out, jobs.Reading(seed=self.seed), again=self.again, device=self.device).run()
        Report(self.out, title="Faces read out of the weights of a face detector").run()


@dataclass
class Identify:
    """What the saved weights of a polynomial network determine about its training data: exact recovery.

    From a stationary point, from a batch gradient, or from weights before and after training; see
    docs/identifiability.md. Prints a certificate that says what is identified and what is not.

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
    """How fast a step of reconstruction is here, in every mode, against the published method and the hardware's floor.

    All are timed in turns in one run, since only ratios of one run mean anything; let nothing else run meanwhile.
    Writes bench.json and, from the sweep, bench.png: time and memory against candidates, width, depth and input size.

        palimpsest bench
        palimpsest bench --no-sweep --image 1,28,28 --hidden 1000 1000 --candidates 500
    """

    out: Path = Path("runs/bench")
    """The folder to write to."""
    image: Annotated[str | None, tyro.conf.arg(metavar="C,H,W")] = None
    """Channels, height and width of an image; by default 1,25,25, and 3,32,32 on CUDA."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers; by default 500 500, and 1000 1000 on CUDA."""
    candidates: int | None = None
    """By default 80, and 1000 on CUDA."""
    sweep: bool = True
    """Also vary each of these numbers, for the published method in float32, our automatic mode and the floor."""
    turns: int = 7
    """How often each contender has its turn; the median counts."""
    seconds: float = 0.25
    """How long a turn is."""
    device: Device = "auto"

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
        from palimpsest.benchmark.figure import draw  # no other command should wait for matplotlib

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
class Audit:
    """Audit a network that was trained elsewhere: can its training images be read out of its weights?

    Needs the network's own code and its weights; the training images are not needed. Writes a verdict, the likeliest
    candidates with their probabilities, controls, and report.html. Interrupted at any moment, the same command goes on.

        palimpsest audit --out runs/audit --network mypackage.models:make --weights final.pt --initial start.pt
            --shape 3,32,32
    """

    out: Path
    """The run folder to make."""
    network: str
    """A function that makes the network: package.module:factory or path/to/file.py:factory. Its code is run."""
    weights: Path
    """The trained weights: a .safetensors file, or a state dict saved by torch."""
    shape: str
    """Channels, height and width of the images: 3,32,32."""
    initial: Path | None = None
    """The weights before training, if known; far more can be read with them."""
    key: str | None = None
    """Which entry of --weights holds the weights, such as ema.state_dict; needed where there are several."""
    initial_key: str | None = None
    """The same for --initial."""
    data: str | None = None
    """The training images, if at hand: a folder with a sub-folder per class, or an .npz file. Only scores see them."""
    held_out: str | None = None
    """Images of the same kind that were not trained on; they calibrate the scores."""
    mean: str = "0"
    """What was subtracted from the images of --data: a number, one for each channel (0.5,0.4,0.4), or an .npy file."""
    std: str = "1"
    """What they were divided by."""
    options: Annotated[auditing.Options, tyro.conf.arg(name="")] = field(default_factory=auditing.Options)
    device: Device = "auto"

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
        print(*found.told, printable(f"The report is {found.report}"), sep="\n")


@dataclass
class Reproduce:
    """Run an experiment of the paper, as published and as we do it, with every control; finished parts are kept.

    Give the same command again to go on. What was run is summed up in scoreboard.md, with tables and figures, beside
    the finished parts. `all` stands for every experiment.

        palimpsest reproduce ntk-cifar10 --data-root DATA
        palimpsest reproduce ntk-cifar10 --small
    """

    options: Annotated[Options, tyro.conf.arg(name=""), tyro.conf.PositionalRequiredArgs]

    def run(self) -> None:
        reproduce(self.options)


class InterruptedRunError(PalimpsestError):
    """Ctrl-C."""


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Reconstruct, tyro.conf.subcommand("reconstruct")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Identify, tyro.conf.subcommand("identify")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
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
    print(f"{'':20s}{'ms a step':>11s}{'of the floor':>14s}{'times faster than published':>29s}")
    print(f"{'':45s}{'float64':>15s}{'float32':>14s}")
    for row in rows:
        faster = (row[f"faster than published {dtype}"] for dtype in ("float64", "float32"))
        times = "".join(f"{ratio:{width}.2f}" for ratio, width in zip(faster, (15, 14), strict=True))
        print(f"{row['name']:20s}{row['milliseconds']:11.3f}{row['of the floor']:14.2f}{times}")
    print(f"\nLong runs take {results['automatic']} mode here by themselves.")


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
