"""Were given images trained on? A test of single images that reconstructs nothing and needs no other networks."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest.auditing.exchange import Scale
from palimpsest.auditing.given import Given, check_apart
from palimpsest.auditing.identity import code_of
from palimpsest.auditing.images import shielded
from palimpsest.auditing.membership_page import render_membership
from palimpsest.auditing.preflight import check_start
from palimpsest.auditing.relation import relation
from palimpsest.auditing.subject import Factory, Subject, subject
from palimpsest.auditing.told_apart import LEVEL, Membership, MembershipOptions, seen, segments_of, told_apart
from palimpsest.auditing.traces import Loss, Statistic
from palimpsest.errors import InvalidInputError, RunFolderError
from palimpsest.files.schema import check_options
from palimpsest.files.series import InMemory, Sources
from palimpsest.files.storage import digest, open_regular, parse_json, tensor_digest, write_atomically
from palimpsest.files.versions import versions
from palimpsest.objectives.binding import parameters_of
from palimpsest.runs.journal import note


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
    mean: Scale = 0.0,
    std: Scale = 1.0,
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
    if out is not None:
        test = _identity(options, network, network_args, examined, given, others, mean, std)
        _check_free(Path(out), test)
    if examined.initial is None and loss is None:
        note("the final weights alone tell little by gradients; give --initial, or --loss and classes")
    result = told_apart(examined, given, others, options, mean=mean, std=std, device=device)
    if out is not None:
        save(result, given, Path(out), test)
    return result


# --- files ------------------------------------------------------------------------------------------


def save(found: Membership, given: Given, out: Path, test: str) -> None:
    """Write the summary, the table and the page. The summary is first, because it says whose the folder is."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "membership.json", (json.dumps(summary(found) | {"test": test}, indent=1) + "\n").encode())
    write_atomically(out / "membership.csv", _table(found).encode())
    write_atomically(out / "membership.html", render_membership(found, given.images, out.name).encode())


def _identity(
    options: MembershipOptions, network: str | Factory, network_args: Mapping[str, Any] | None, examined: Subject,
    given: Given, others: Given, mean: Scale, std: Scale,
) -> str:  # fmt: skip
    """Which test this is: the checksum of its options, of the network's code, and of all images and weights."""
    images = [seen(examined.model, given, others, mean, std), given.labels, others.labels]
    states = [examined.model.state_dict(), *(state for segment in segments_of(examined) for state in segment)]
    tensors = {f"image {i}": t for i, t in enumerate(images) if t is not None}
    tensors |= {f"state {i} {name}": t for i, state in enumerate(states) for name, t in state.items()}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    code = code_of(network) | {"arguments": repr(network_args)}
    return tensor_digest(plain, digest(asdict(options), code, given.names))


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
