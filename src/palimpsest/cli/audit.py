"""`palimpsest audit`."""

import shlex
import time
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from palimpsest import auditing
from palimpsest.auditing import truth
from palimpsest.auditing.handover import LOSSES
from palimpsest.auditing.options import RungName
from palimpsest.cli import shared
from palimpsest.cli.several import audit_several, names_of
from palimpsest.cli.shared import Device, image_shape, json_object, resumable, torch_device
from palimpsest.errors import InvalidInputError
from palimpsest.execution.workers import cluster
from palimpsest.files.schema import check_options
from palimpsest.runs.journal import printable

SAME = "network network_args weights key initial initial_key checkpoints updates shape held_out mean std".split()
LOSS = {False: "logistic", True: "cross_entropy"}  # the likelier one, by whether there are several outputs


@dataclass
class AuditCommand:
    """Audit a network that was trained elsewhere: may its weights be published?

    Needs the code of the network and its final weights, but not the training images. Says for each set of files whether
    it may be published, and writes report.html with the evidence. After an interruption, run the same command again.

        palimpsest audit --out runs/audit --network mypackage.models:make --weights final.pt --initial start.pt
            --shape 3,32,32
    """

    out: Path
    """The run folder to create."""
    network: str
    """Function that creates the network: package.module:factory or path/to/file.py:factory. Its code is executed."""
    weights: tuple[Path, ...]
    """The final weights: a .safetensors file, the index of its shards, or a state dict or checkpoint of torch.
    Several files, such as models/*.pt, are audited one by one, each in a sub-folder of --out."""
    shape: str
    """Channels, height and width of the images: 3,32,32."""
    network_args: str | None = None
    """Arguments of that function, as a JSON object: '{"num_classes": 10}'."""
    initial: Path | None = None
    """The initial weights, before training, if known. They allow far better reconstructions."""
    checkpoints: tuple[Path, ...] = ()
    """Weights on the way, if known: files, folders, or patterns in quotes. They allow even better ones."""
    updates: tuple[Path, ...] = ()
    """Rounds of federated learning, to audit one client: round-03-global.pt, round-03-client.pt and so on."""
    key: str | None = None
    """Entry of --weights to read, such as ema. If omitted: state_dict, model_state_dict, model, or the only one."""
    initial_key: str | None = None
    """The same for --initial."""
    data: str | None = None
    """Training images, for scores: a folder with a sub-folder per class, in alphabetical order, or an .npz file."""
    held_out: str | None = None
    """Images of the same kind that were not used for training. They calibrate the scores."""
    mean: str = "0"
    """Mean subtracted from the images of --data: a number, one per channel (0.5,0.4,0.4), or an .npy file."""
    std: str = "1"
    """Standard deviation by which they were divided, in the same forms."""
    options: Annotated[auditing.Options, tyro.conf.arg(name="")] = field(default_factory=auditing.Options)
    gate: bool = False
    """Exit with status 0 (no evidence), 3 (leakage), or 4 (undecided or no verdict). Without it: 0 for all of them."""
    max_recovered: int | None = None
    """For --gate: the number of training images that may be recovered. Exceeding it is status 3, up to it may pass."""
    max_probability: float | None = None
    """For --gate: the highest estimated probability, 0 to 1, that a candidate may have."""
    publish: RungName | None = None
    """For --gate: the files that you will publish. W: the final weights; O: also the optimiser's state; W0: also the
    initial weights; C: also checkpoints or updates. If omitted: all files that you give."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""
    cluster: str | None = None
    """Dask scheduler whose workers do the reconstructions, such as tcp://scheduler:8786. The result is the same."""
    redact: bool = False
    """Leave all pictures out of the report. On a finished folder, only the report is written again."""

    def run(self) -> int:
        if len(self.weights) == 1:
            return self._one(self.weights[0])
        if self.checkpoints or self.updates or not self.weights:
            raise InvalidInputError("give one file as --weights, or several without --checkpoints and --updates")
        self._gate()
        models = names_of(self.weights).items()
        audits = {name: replace(self, weights=(path,), out=self.out / name).run for name, path in models}
        with resumable(), self._executor():  # each opens it again; this refuses a wrong address once
            return audit_several(audits, self.out, at_once=self.cluster is not None)

    def _one(self, weights: Path) -> int:
        gate = self._gate()
        shape, known = image_shape(self.shape), None
        if self.data is not None:
            known = truth.load(self.data, self.held_out, mean=self.mean, std=self.std, image_shape=shape)
        elif self.held_out is not None or (self.mean, self.std) != ("0", "1"):
            raise InvalidInputError("--held-out, --mean and --std belong to the training images; give these as --data")
        started = (time.monotonic() - shared.began) / 60  # loading programs and images counts, too
        minutes = self.options.minutes
        options = vars(self.options) | {"minutes": max(minutes - started, minutes / 10) if minutes > 0 else minutes}
        with resumable(), self._executor() as executor:
            found = auditing.audit(
                self.network,
                weights,
                image_shape=shape,
                out=self.out,
                network_args=None if self.network_args is None else json_object(self.network_args, "--network-args"),
                initial=self.initial,
                checkpoints=self.checkpoints or None,
                updates=self.updates or None,
                key=self.key,
                initial_key=self.initial_key,
                truth=known,
                device="auto" if self.cluster and self.device == "auto" else torch_device(self.device),
                redact=self.redact,
                executor=executor,
                **options,
            )
        lines = (*found.summary, *self._membership(found), printable(f"The report is {found.report}"))
        print(*lines, sep="\n", flush=True)
        if gate is None:
            return 0
        decision = gate.decide(auditing.load(self.out))
        print(f"Gate: status {decision.status}, because {decision.reason}.")
        return decision.status

    def _membership(self, found: auditing.Audit) -> list[str]:
        """The command that tests membership, if there are images for it, and the audit could not do it."""
        if self.data is None or self.held_out is None or found.doubts or found.membership is not None:
            return []
        several, change = found.preflight.outputs > 1, found.preflight.related is True
        words = {"out": f"{self.out}-membership"} | {name: getattr(self, name) for name in SAME}
        words |= {"images": self.data} if change else {"images": self.data, "loss": LOSS[several]}
        command = ["palimpsest", "membership"]
        for name, value in words.items():
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            command += [f"--{name.replace('_', '-')}", *map(str, values)] if values else []
        by_loss = f" (--loss as in training: {LOSSES[several]}; both folders need a sub-folder per class)"
        remark = "" if change else by_loss
        return [f"To test membership of single images, run{remark}:", f"  {printable(shlex.join(command))}"]

    def _executor(self) -> AbstractContextManager[Executor | None]:
        return nullcontext() if self.cluster is None else cluster(self.cluster)

    def _gate(self) -> auditing.Gate | None:
        limits = (self.max_recovered, self.max_probability, self.publish)
        if not self.gate and limits != (None, None, None):
            raise InvalidInputError("--max-recovered, --max-probability and --publish are for the gate; add --gate")
        if self.max_recovered is not None and None in (self.data, self.held_out):
            raise InvalidInputError("--max-recovered counts training images; give --data and --held-out")
        return check_options(auditing.Gate(*limits)) if self.gate else None
