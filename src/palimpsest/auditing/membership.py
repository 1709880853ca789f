"""Were given images trained on? A test of single images that reconstructs nothing and needs no other networks.

`traces` measures how much of each image the change of the weights holds. Held-out images of the same kind show what
images leave that were not trained on.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from palimpsest.auditing.doubts import common_scales
from palimpsest.auditing.exchange import centred
from palimpsest.auditing.given import Given, check_apart
from palimpsest.auditing.identity import code_of
from palimpsest.auditing.images import shielded
from palimpsest.auditing.membership_page import render_membership
from palimpsest.auditing.preflight import check_start
from palimpsest.auditing.relation import relation
from palimpsest.auditing.subject import Factory, subject
from palimpsest.auditing.traces import Loss, Statistic, Traces, loss_trace, traces
from palimpsest.errors import InvalidInputError, NonFiniteError, RunFolderError
from palimpsest.files.schema import Range, check_options
from palimpsest.files.series import InMemory, Sources
from palimpsest.files.storage import digest, open_regular, parse_json, tensor_digest, write_atomically
from palimpsest.files.versions import versions
from palimpsest.objectives.binding import parameters_of
from palimpsest.runs.journal import note
from palimpsest.scoring.rates import RATES, Rates, rates
from palimpsest.scoring.verdict import Outcome, judge

LEVEL = 0.01
RETESTED = 200  # images of each kind that are tested at other scales, if nothing was found


@dataclass(frozen=True)
class MembershipOptions:
    """Options of a membership test."""

    level: Annotated[float, Range(above=0, most=0.5)] = LEVEL
    """The rate of false positives at which images are named."""
    statistic: Statistic | None = None
    """span: how much of the image a dense layer's change holds. gradients: works for any network. loss: the final
    weights fit the image. If omitted: the best that the material allows."""
    loss: Loss | None = None
    """The loss of the training: squared, logistic (one output) or cross_entropy. With the final weights alone, the loss
    of an image tells most. It needs classes: a sub-folder each, in --images and --held-out."""


@dataclass(frozen=True)
class Membership:
    """Which of the given images were trained on."""

    names: tuple[str, ...]
    """The names of the given images."""
    traces: Tensor
    """(n,) how much of each given image the weights hold."""
    held_out: Tensor
    """(m,) the same for held-out images."""
    rates: Rates
    level: float
    statistic: Statistic
    layer: str | None
    """The dense layer in whose change the images were found."""
    knowledge: str
    """The material that the test used."""
    doubt: str = ""
    """A sign that the mean or the standard deviation is wrong, as a clause; empty if there is none."""

    @property
    def named(self) -> Tensor:
        """(n,) whether each given image is named as a training image, at ``level`` false positives."""
        return self.rates.at(self.level)

    @property
    def outcome(self) -> Outcome:
        return Outcome.NO_VERDICT if self.doubt else self.rates.verdict.outcome

    @property
    def sentence(self) -> str:
        """The result in two sentences."""
        n, verdict, α = len(self.names), self.rates.verdict, f"{100 * self.level:.3g} %"
        if verdict.auc is None or verdict.auc_interval is None:
            return f"No verdict: {n} given and {len(self.held_out)} held-out images are too few; give more."
        low, high = verdict.auc_interval
        auc = f"AUC of given against held-out images: {verdict.auc:.2f} ({low:.2f} to {high:.2f})."
        if not self.rates.resolves(self.level):
            found = (
                f"the given images leave {'larger' if self.outcome is Outcome.LEAKAGE else 'no larger'} traces than "
                f"held-out ones, but {len(self.held_out)} of these cannot resolve {α} false positives"
            )
        else:
            found = (
                f"{int(self.named.sum())} of {n} given images named as training images at {α} false positives, where "
                f"chance names {self.level * n:.2g}"
            )
        if self.doubt:
            return f"No verdict: {found}, but {self.doubt}. {auc}"
        start = "Membership shown" if self.outcome is Outcome.LEAKAGE else "No evidence of membership"
        if self.outcome is Outcome.LEAKAGE and not self.named.any():
            start = "Membership shown as a whole"
        return f"{start}: {found}. {auc}"


@torch.random.fork_rng(devices=[])
def membership(
    network: str | Factory,
    weights: Path | str | Mapping[str, Tensor],
    images: Given | Tensor,
    held_out: Given | Tensor,
    *,
    network_args: Mapping[str, Any] | None = None,
    initial: Path | str | Mapping[str, Tensor] | None = None,
    checkpoints: Sources | InMemory | None = None,
    updates: Sources | None = None,
    key: str | None = None,
    initial_key: str | None = None,
    mean: Tensor | float = 0.0,
    std: Tensor | float = 1.0,
    level: float = LEVEL,
    statistic: Statistic | None = None,
    loss: Loss | None = None,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
) -> Membership:
    """Test given images: was the network trained on them? Nothing is reconstructed, and no other network is trained.

    An image is named if at most a share ``level`` of held-out images leave as large a trace in the weights. If the
    given images were not trained on and resemble the held-out ones, each is named with at most that probability.

    Args:
        network: a function that makes the network, or its place, as for `pal.audit`.
        weights: the final weights, a state dict or a file that holds one.
        images: (n, C, H, W) the images to test, in [0, 1], or `pal.auditing.Given` with names and labels.
        held_out: (m, C, H, W) images of the same kind that were not trained on. Rates below 1/(m + 1) need more.
        network_args: keyword arguments of that function.
        initial: the weights before training. Without them or checkpoints, little can be told.
        checkpoints: weights on the way, as for `pal.audit`.
        updates: rounds of federated learning, as for `pal.audit`.
        key: the entry of the file that holds the weights.
        initial_key: the same for the file of the initial weights.
        mean: the number or image that was subtracted before training.
        std: the number or image that was divided by.
        level: the rate of false positives at which images are named.
        statistic: ``"span"``, ``"gradients"`` or ``"loss"``. None chooses the span if a dense layer shows it. With the
            final weights alone, it chooses the loss if that is given.
        loss: the loss of the training: ``"squared"``, ``"logistic"`` (one output) or ``"cross_entropy"``. The images
            then need labels.
        device: where to compute.
        out: a folder for ``membership.csv``, ``membership.json`` and ``membership.html``. One that holds those of
            another test is refused.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> data = pal.datasets.load("digits", per_class=5, held_out_per_class=100, seed=0)
        >>> def make():
        ...     return pal.networks.MLP((1, 8, 8), hidden=(60,))
        >>> fit = pal.train(make(), data.train.images - 0.5, data.train.labels, steps=100)
        >>> found = pal.auditing.membership(
        ...     make, fit.model.state_dict(), data.train.images, data.held_out.images, initial=fit.initial, mean=0.5
        ... )
        >>> int(found.named.sum()), round(found.rates.verdict.auc, 2)
        (10, 1.0)
    """
    options = check_options(MembershipOptions(level, statistic, loss))
    given, others = (some if isinstance(some, Given) else Given(some) for some in (images, held_out))
    check_apart(given, others)
    examined = subject(
        network, weights, network_args=network_args, initial=initial, image_shape=tuple(given.images.shape[1:]),
        key=key, initial_key=initial_key, checkpoints=checkpoints, updates=updates,
    )  # fmt: skip
    check_start(examined)
    if examined.initial is not None and not relation(parameters_of(examined.model), examined.initial)[1]:
        raise InvalidInputError(
            "the initial and the final weights are unrelated; give those that this training started from"
        )
    for remark in examined.remarks:
        note(remark)
    model = examined.model.to(device)
    segments = [(_on(a, device), _on(b, device)) for a, b in examined.segments]
    if not segments and examined.initial is not None:
        segments = [(_on(examined.initial, device), model.state_dict())]
    seen = _seen(model, given, others, mean, std)
    if out is not None:
        states = [model.state_dict(), *(state for segment in segments for state in segment)]
        code = code_of(network) | {"arguments": repr(network_args)}
        test = _identity(options, code, given.names, [seen, given.labels, others.labels], states)
        _check_free(Path(out), test)
    by_loss = statistic == "loss" or (statistic is None and loss is not None and not segments)
    if not segments and loss is None:
        note("the final weights alone tell little by gradients; give --initial, or --loss and classes")

    def traced(x: Tensor, some: Given, rest: Given) -> Traces:
        if by_loss:
            return loss_trace(model, x, _labels(some, rest), loss, classes=len(rest.classes) or None)
        return traces(model, segments, x, statistic=statistic)

    found = traced(seen, given, others)
    ours, theirs = found.values.cpu().split([len(given), len(others)])
    compared = rates(ours, theirs, at=tuple(dict.fromkeys([level, *RATES])))
    doubt = ""
    if compared.verdict.outcome is Outcome.NO_EVIDENCE:
        doubt = _other_scale(given.thinned(RETESTED), others.thinned(RETESTED), model, traced)
    known = _knowledge(len(segments), found.statistic)
    result = Membership(given.names, ours, theirs, compared, level, found.statistic, found.layer, known, doubt)
    if out is not None:
        save(result, given, Path(out), test)
    return result


def _seen(model: nn.Module, given: Given, others: Given, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Given, then held-out images, as the network sees them."""
    return centred(given.images, others.images, mean, std).to(next(model.parameters()))


def _other_scale(
    given: Given, others: Given, model: nn.Module, traced: Callable[[Tensor, Given, Given], Traces]
) -> str:
    """A usual mean and deviation at which the given images do leave larger traces than held-out ones, as a clause.

    Each scale is one look at the same images, so the claim at one of them is corrected for all.
    """
    scales = common_scales(given.images)
    for name, (mean, std) in scales.items():
        with suppress(NonFiniteError):  # a scale that is far off
            values = traced(_seen(model, given, others, mean, std), given, others).values.cpu()
            found = judge(*values.split([len(given), len(others)]), looks=len(scales))
            if found.outcome is Outcome.LEAKAGE:
                return f"the given images do leave larger traces with mean and deviation {name}; check --mean and --std"
    return ""


def _labels(given: Given, held_out: Given) -> Tensor:
    if given.labels is None or held_out.labels is None:
        raise InvalidInputError("the loss needs labels of the given and of the held-out images; give both")
    return torch.cat([given.labels, held_out.labels.to(given.labels)])


def _knowledge(segments: int, statistic: Statistic) -> str:
    if statistic == "loss":
        return "the final weights and the labels"
    if segments > 1:
        return f"the weights at both ends of {segments} segments"
    return "the initial and the final weights" if segments else "the final weights"


def _on(state: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: t.to(device) for name, t in state.items()}


# --- files ------------------------------------------------------------------------------------------


def save(found: Membership, given: Given, out: Path, test: str) -> None:
    """Write the summary, the table and the page. The summary is first, because it says whose the folder is."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "membership.json", (json.dumps(summary(found) | {"test": test}, indent=1) + "\n").encode())
    write_atomically(out / "membership.csv", _table(found).encode())
    write_atomically(out / "membership.html", render_membership(found, given.images, out.name).encode())


def _identity(
    options: MembershipOptions,
    code: Mapping[str, str | None],
    names: Sequence[str],
    images: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]],
) -> str:
    """Which test this is: the checksum of its options, of the network's code, and of all images and weights."""
    tensors = {f"image {i}": t for i, t in enumerate(images) if t is not None}
    tensors |= {f"state {i} {name}": t for i, state in enumerate(states) for name, t in state.items()}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return tensor_digest(plain, digest(asdict(options), code, names))


def _check_free(out: Path, test: str) -> None:
    """Refuse a folder that holds another test, as an audit does. The same test may be repeated."""
    if out.exists() and not out.is_dir():
        raise InvalidInputError(f"{out} is not a folder; choose another for --out")
    if not any((out / f"membership.{kind}").exists() for kind in ("json", "csv", "html")):
        return
    try:
        with open_regular(out / "membership.json") as file:
            other = parse_json(file.read()).get("test")
    except (OSError, ValueError):
        other = None
    if other != test:
        raise RunFolderError(f"{out} holds another membership test; choose another folder, or repeat its command")


def _table(found: Membership) -> str:
    """One row for each given image, in the order in which they were given."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "trace", "p_value", f"member_at_{found.level:g}"])
    resolvable = found.rates.resolves(found.level)
    for name, trace, p, named in zip(found.names, found.traces.tolist(), found.rates.p_values.tolist(),
                                     found.named.tolist(), strict=True):  # fmt: skip
        decided = ("yes" if named else "no") if resolvable else "not resolvable"
        writer.writerow([shielded(name), f"{trace:.6g}", f"{p:.6g}", decided])
    return file.getvalue()


def summary(found: Membership) -> dict[str, Any]:
    """The result as membership.json has it."""
    verdict = found.rates.verdict
    named = {f"{α:g}": "not resolvable" if share is None else share for α, share in found.rates.named.items()}
    return {
        "sentence": found.sentence,
        "outcome": found.outcome.value,
        "doubt": found.doubt or None,
        "knowledge": found.knowledge,
        "statistic": found.statistic,
        "layer": found.layer,
        "given": len(found.names),
        "held_out": len(found.held_out),
        "named": int(found.named.sum()),
        "level": found.level,
        "share_named_at": named,
        "finest_rate": found.rates.finest,
        "auc": verdict.auc,
        "auc_interval": verdict.auc_interval,
        "p_value": verdict.p_value,
        "versions": versions(),
    }
